"""Amounts shared out among bins, against linear programs."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from jreshard._planning.filling import WHOLE, Filling, settle, settle_below, water_fill
from jreshard._planning.options import Options


@st.composite
def basins(draw) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows, bins = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    numbers = st.integers(0, 1000)
    level = np.array(draw(st.lists(st.lists(numbers, min_size=bins, max_size=bins), min_size=rows, max_size=rows)))
    amount = np.array(draw(st.lists(numbers, min_size=rows, max_size=rows)))
    usable = np.array(
        draw(st.lists(st.lists(st.booleans(), min_size=bins, max_size=bins), min_size=rows, max_size=rows))
    )
    usable[:, draw(st.integers(0, bins - 1))] = True
    return level, amount, usable


@given(basins())
def test_water_finds_its_level(basin):
    level, amount, usable = basin
    poured = water_fill(level, amount, usable)
    assert (poured.sum(axis=1) == amount).all()
    assert (poured >= 0).all()
    assert (poured[~usable] == 0).all()
    for row in range(len(level)):
        if amount[row]:
            surface = (level + poured)[row, poured[row] > 0]
            assert surface.max() - surface.min() <= 1
            assert (level[row, usable[row]] >= surface.max() - 1).all() | (poured[row] > 0)[usable[row]].any()
            dry = level[row, usable[row] & (poured[row] == 0)]
            assert (dry >= surface.max() - 1).all()


@st.composite
def divisions(draw) -> tuple[int, list[tuple[np.ndarray, np.ndarray]]]:
    """Divisions of bins into groups of equal size, each with an amount to share out."""
    bins = draw(st.sampled_from([4, 6, 8, 12]))
    out = []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.sampled_from([n for n in range(1, bins + 1) if bins % n == 0]))
        table = np.array(draw(st.permutations(range(bins)))).reshape(-1, size)
        out.append((table, np.array([draw(st.integers(0, 10**6)) for _ in table])))
    return bins, out


def least_fullest(bins: int, groups: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """The fullest bin of the best way to share out, by linear programming."""
    rows = [(row, amount) for table, amounts in groups for row, amount in zip(table, amounts, strict=True)]
    count = sum(len(row) for row, _ in rows)
    equal, below = np.zeros((len(rows), count + 1)), np.zeros((bins, count + 1))
    below[:, -1] = -1
    at = 0
    for i, (row, _) in enumerate(rows):
        for place in row:
            equal[i, at] = below[place, at] = 1
            at += 1
    cost = np.zeros(count + 1)
    cost[-1] = 1
    return float(linprog(cost, below, np.zeros(bins), equal, [amount for _, amount in rows]).fun)


@given(divisions())
def test_the_fullest_bin_is_nearly_as_empty_as_can_be(division):
    bins, groups = division
    fillings = [Filling(table, amounts, amounts, bins) for table, amounts in groups]
    level = settle(fillings, np.zeros(bins, np.int64))
    assert level.sum() == sum(amounts.sum() for _, amounts in groups)
    assert level.max() <= 1.05 * least_fullest(bins, groups) + bins


@given(divisions(), st.integers(0, 10**6))
def test_extra_amounts_stay_below_the_limit_where_they_can(division, limit):
    bins, groups = division
    fillings = [Filling(table, amounts, 3 * amounts, bins) for table, amounts in groups]
    least = settle(fillings, np.zeros(bins, np.int64)).max()
    limit = max(limit, int(least) + 1)
    level = settle_below(fillings, np.zeros(bins, np.int64), limit)
    assert level.max() <= 1.05 * limit + bins
    assert all(((f.extra >= 0) & (f.extra <= WHOLE)).all() for f in fillings)


def test_fractions_are_even_where_it_makes_no_difference():
    filling = Filling(np.array([[0, 1, 2], [3, 4, -1]]), np.array([300, 7]), np.array([300, 7]), 5)
    settle([filling], np.zeros(5, np.int64))
    thirds = [0, -(-WHOLE // 3), -(-2 * WHOLE // 3), WHOLE]
    assert filling.fractions(10**6).tolist() == [thirds, [0, WHOLE // 2, WHOLE, WHOLE]]


@st.composite
def shared_bins(draw) -> tuple[int, np.ndarray, np.ndarray]:
    """Groups whose options may share bins, as ranks share network cards, and that share bins with each other."""
    bins = draw(st.integers(1, 6))
    table = np.full((draw(st.integers(1, 6)), draw(st.integers(1, 6))), -1)
    for row in table:
        count = draw(st.integers(1, len(row)))
        row[:count] = draw(st.lists(st.integers(0, bins - 1), min_size=count, max_size=count))
    return bins, table, np.array([draw(st.integers(0, 10**6)) for _ in table])


@given(shared_bins())
def test_options_that_share_a_bin_do_not_count_as_two(case):
    bins, table, amounts = case
    filling = Filling(table, amounts, amounts, bins)
    level = settle([filling], np.zeros(bins, np.int64))
    poured = filling.poured
    assert (poured.sum(axis=1) == amounts).all()
    assert (poured[table < 0] == 0).all()
    assert (poured >= 0).all()
    assert (np.bincount(table[table >= 0], poured[table >= 0], bins) == level).all()
    for row, of_row in zip(table, poured, strict=True):
        for place in set(row[row >= 0].tolist()):
            assert np.ptp(of_row[row == place]) <= 1
    distinct = [(np.array([np.unique(row[row >= 0])]), amounts[[i]]) for i, row in enumerate(table)]
    assert level.max() <= 1.05 * least_fullest(bins, distinct) + bins


def test_groups_of_a_round_have_no_bin_in_common():
    rounds = Options(np.array([[0, 0, 1], [1, 2, 2], [3, -1, -1]])).rounds
    assert [groups.tolist() for groups in rounds] == [[0, 2], [1]]
