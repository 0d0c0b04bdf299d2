"""Tables of shares: each row divides the whole among its options, at cuts in 1 / `WHOLE`."""

from functools import cached_property

import numpy as np

from jreshard._planning.filling import WHOLE, even_cuts


class Shares:
    """Rows of cuts.

    Attributes:
        cuts: `int64[rows, options + 1]`, where the share of each option begins and ends; all shares beyond the row's
            last option are empty.
        size: `int64[rows]`, the options of each row.
    """

    def __init__(self, cuts: np.ndarray) -> None:
        self.cuts = cuts
        self.size = np.maximum((cuts[:, :-1] < WHOLE).sum(axis=1), 1)
        self._uneven = (cuts != even_cuts(self.size, cuts.shape[1] - 1)).any(axis=1)

    def at(self, row: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Which option of its row each place belongs to."""
        if self.cuts.shape[1] == 2:
            return np.zeros(len(row), np.int64)
        option: np.ndarray = place * self.size[row] // WHOLE
        if self._uneven.any():
            (uneven,) = np.nonzero(self._uneven[row])
            inside = self.cuts[row[uneven], 1:] <= place[uneven, None]
            option[uneven] = np.minimum(inside.sum(axis=1), self.size[row[uneven]] - 1)
        return option

    def turned_at(self, row: np.ndarray, place: np.ndarray, turn: np.ndarray) -> np.ndarray:
        """The same for readers that begin elsewhere: the n-th by n times one even share further on."""
        size = self.size[row]
        return self.at(row, (place + turn % size * WHOLE // size) % WHOLE)

    @cached_property
    def turned_cuts(self) -> np.ndarray:
        """`int64[kinds, cuts]`: the cuts of each kind of row, and as all those see them that begin elsewhere."""
        columns = [self.kinds]
        if self._uneven.any():
            size = self.size[self._first_of_kind][:, None]
            columns += [(self.kinds - turn * WHOLE // size) % WHOLE for turn in range(1, self.cuts.shape[1] - 1)]
        return np.concatenate(columns, axis=1)

    @cached_property
    def _unique(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        kinds, first, kind = np.unique(self.cuts, axis=0, return_index=True, return_inverse=True)
        return kinds, first, kind.reshape(-1)

    @property
    def kinds(self) -> np.ndarray:
        """The different rows."""
        return self._unique[0]

    @property
    def _first_of_kind(self) -> np.ndarray:
        return self._unique[1]

    @property
    def kind(self) -> np.ndarray:
        """Which of `kinds` each row is."""
        return self._unique[2]

    def columns(self, rows: int, at: np.ndarray, index: np.ndarray) -> np.ndarray:
        """`int64[rows, cuts]`: the cuts of every row in `index` that belongs to row `at`, each kind once."""
        pairs = np.unique(at * len(self.kinds) + self.kind[index])
        return side_by_side(rows, pairs // len(self.kinds), self.kinds[pairs % len(self.kinds)])


def side_by_side(rows: int, at: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Rows of values side by side where they belong to the same row; `at` is sorted. Zero elsewhere."""
    position = positions(at)
    out = np.zeros((rows, int(position.max(initial=0)) + 1, values.shape[1]), np.int64)
    out[at, position] = values
    return out.reshape(rows, out.shape[1] * out.shape[2])


def positions(sorted_keys: np.ndarray) -> np.ndarray:
    """For each row, how many before it have the same key."""
    out: np.ndarray = np.arange(len(sorted_keys)) - np.searchsorted(sorted_keys, sorted_keys)
    return out


def split(offset: np.ndarray, length: np.ndarray, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which of equal parts of an interval an offset lies in, and where in that part, in 1 / `WHOLE`."""
    scaled = np.clip(offset, 0, None) * parts * WHOLE // np.maximum(length, 1)
    turn = np.minimum(scaled // WHOLE, parts - 1)
    return turn, np.minimum(scaled - turn * WHOLE, WHOLE - 1)
