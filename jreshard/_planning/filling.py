"""Sharing amounts out among bins so that the fullest bin is as empty as can be. Whole numbers only, so that every
process comes to the same result on every machine."""

from collections.abc import Sequence

import numpy as np

from jreshard._planning.options import Options

WHOLE = 1 << 16  # fractions are in units of 1 / WHOLE
_ROUND = 512  # shares that are not equal are multiples of 1 / _ROUND
_SWEEPS = 6
_FULL = 1 << 60


def water_fill(level: np.ndarray, amount: np.ndarray, usable: np.ndarray) -> np.ndarray:
    """Pours `amount[row]` into the bins of each row, lowest first, as water finds its level.

    Args:
        level: `int64[rows, bins]`, how full each bin is.
        amount: `int64[rows]`.
        usable: `bool[rows, bins]`; at least one in each row.

    Returns:
        `int64[rows, bins]`: what goes into each bin.

    Example:
        >>> water_fill(np.array([[5, 0, 1]]), np.array([5]), np.array([[True, True, True]])).tolist()
        [[0, 3, 2]]
    """
    rows, bins = level.shape
    order = np.argsort(np.where(usable, level, _FULL), axis=1, kind="stable")
    low = np.take_along_axis(np.where(usable, level, _FULL), order, axis=1)
    below = np.cumsum(np.where(low < _FULL, low, 0), axis=1)
    count = np.arange(1, bins + 1)
    surface = (amount[:, None] + below) // count
    above = np.concatenate([low[:, 1:], np.full((rows, 1), _FULL)], axis=1)
    used = np.argmax(surface < above, axis=1)
    surface = np.take_along_axis(surface, used[:, None], axis=1)
    poured = np.where(count - 1 <= used[:, None], np.maximum(surface - low, 0), 0)
    poured += (count - 1 < (amount - poured.sum(axis=1))[:, None]) & (count - 1 <= used[:, None])
    out = np.zeros_like(level)
    np.put_along_axis(out, order, poured, axis=1)
    return out


class Filling:
    """Amounts of many groups, each to be shared out among bins of its own.

    The amount of a group lies between `least` and `most`, as its entry of `extra` says: 0 for the least, `WHOLE` for
    the most.

    Args:
        bins: `int64[groups, options]`, the bins that each group may use, -1 where it has fewer.
        least: `int64[groups]`.
        most: `int64[groups]`.
        num_bins: bins in all.
    """

    def __init__(self, bins: np.ndarray, least: np.ndarray, most: np.ndarray, num_bins: int) -> None:
        self._options, self._num_bins = Options(bins), num_bins
        self.least, self.most = least, most
        self.extra = np.zeros(len(least), np.int64)
        self._in_bins = np.zeros_like(self._options.bins)  # by different bin

    @property
    def amount(self) -> np.ndarray:
        """`int64[groups]`: what each shares out now."""
        out: np.ndarray = self.least + (self.most - self.least) * self.extra // WHOLE
        return out

    @property
    def poured(self) -> np.ndarray:
        """`int64[groups, options]`: what each option has."""
        return self._options.shared_out(self._in_bins)

    @property
    def state(self) -> tuple[np.ndarray, np.ndarray]:
        """What filling has come to, for setting it again."""
        return self.extra, self._in_bins

    @state.setter
    def state(self, state: tuple[np.ndarray, np.ndarray]) -> None:
        self.extra, self._in_bins = state

    @property
    def load(self) -> np.ndarray:
        """`int64[bins]`: what is in each bin from these groups."""
        usable = self._options.usable
        load = np.bincount(self._options.bins[usable], self._in_bins[usable], self._num_bins)
        return load.astype(np.int64)

    def fill(self, level: np.ndarray) -> None:
        """Shares the amounts out anew, over bins that are `level` full already.

        Groups that use the same bin take turns, each over what the others have poured.
        """
        bins, usable, amount = self._options.bins, self._options.usable, self.amount
        if bins.shape[1] == 1:
            self._in_bins = amount[:, None]
            return
        if len(self._options.rounds) == 1:
            self._in_bins = water_fill(level[bins], amount, usable)
            return
        level, poured = level + self.load, self._in_bins.copy()
        for groups in self._options.rounds:
            rest = level[bins[groups]] - poured[groups]
            poured[groups] = water_fill(rest, amount[groups], usable[groups])
            level[bins[groups][usable[groups]]] = (rest + poured[groups])[usable[groups]]
        self._in_bins = poured

    def fullest(self, level: np.ndarray) -> np.ndarray:
        """`int64[groups]`: how full the fullest bin is that each group has poured into."""
        out: np.ndarray = np.where(self._in_bins > 0, level[self._options.bins], 0).max(axis=1, initial=0)
        return out

    def emptiest(self, order: np.ndarray) -> np.ndarray:
        """`int64[groups]`: the least `order[bin]` among the bins that each group may use."""
        options = self._options
        out: np.ndarray = np.where(options.usable, order[options.bins], _FULL).min(axis=1, initial=_FULL)
        return out

    def fractions(self, fullest: int) -> np.ndarray:
        """`int64[groups, options + 1]`: where the share of each option begins and ends, in 1 / `WHOLE`.

        Shares are equal where that makes next to no difference to bins that are `fullest` full, and round otherwise:
        fewer different shares are fewer places where boxes are split. Groups that pour nothing have equal shares.
        """
        poured, size = self.poured, np.maximum(self._options.count, 1)[:, None]
        even = even_cuts(size[:, 0], poured.shape[1])
        total = poured.sum(axis=1)[:, None]
        ends = (np.cumsum(poured, axis=1) * _ROUND + total // 2) // np.maximum(total, 1) * (WHOLE // _ROUND)
        ends = np.concatenate([np.zeros((len(size), 1), np.int64), ends], axis=1)
        excess = np.where(np.arange(poured.shape[1]) < size, np.abs(poured - total // size), 0).max(axis=1, initial=0)
        alike = (excess <= np.maximum(fullest, total[:, 0]) // 1024) | (total[:, 0] == 0)
        return np.where(alike[:, None], even, ends)


def even_cuts(size: np.ndarray, options: int) -> np.ndarray:
    """`int64[rows, options + 1]`: where equal shares of `size[row]` options begin and end."""
    cuts: np.ndarray = -(-np.minimum(np.arange(options + 1), size[:, None]) * WHOLE // size[:, None])
    return cuts


def settle(fillings: Sequence[Filling], base: np.ndarray) -> np.ndarray:
    """Fills all of them so that the fullest bin is as empty as can be.

    Each in turn is shared out over what the others have poured, until nothing changes: at that point no group could
    lower its fullest bin, so the fullest bins are full of amounts that have no other place to go.

    Args:
        fillings: what shares the bins.
        base: `int64[bins]`, what is in the bins from elsewhere.

    Returns:
        `int64[bins]`: how full each bin is.
    """
    level: np.ndarray = base + sum((f.load for f in fillings), np.zeros_like(base))
    for _ in range(_SWEEPS):
        before = level.copy()
        for filling in fillings:
            rest = level - filling.load
            filling.fill(rest)
            level = rest + filling.load
        if np.array_equal(before, level):
            break
    return level


def settle_below(fillings: Sequence[Filling], base: np.ndarray, limit: int) -> np.ndarray:
    """Fills them with as much `extra` as goes in while no bin gets fuller than `limit`.

    Returns:
        `int64[bins]`: how full each bin is.
    """
    for filling in fillings:
        filling.extra = np.full_like(filling.extra, WHOLE)
    level = settle(fillings, base)
    for _ in range(4 * _SWEEPS):
        if level.max(initial=0) <= limit:
            break
        for filling in fillings:
            # Where a bin is too full, whatever can be taken from its groups is scaled down alike.
            full = np.maximum(filling.fullest(level), 1)
            fits = filling.amount * np.minimum(limit * WHOLE // full, WHOLE) // WHOLE
            room = np.maximum(filling.most - filling.least, 1)
            extra = np.clip(fits - filling.least, 0, None) * WHOLE // room
            filling.extra = np.where(full > limit, np.minimum(filling.extra, extra), filling.extra)
        level = settle(fillings, base)
    return level
