"""The bins that groups may use, where several of a group's options share a bin, and several groups too."""

from functools import cached_property

import numpy as np

_NONE = 1 << 60  # sorts after all bins


class Options:
    """The different bins of each group: several of its options may share one, as ranks share a network card.

    Args:
        bins: `int64[groups, options]`, -1 where a group has fewer: always at the end.

    Attributes:
        count: `int64[groups]`, the options of each.
        bins: `int64[groups, different bins]`.
        usable: `bool[groups, different bins]`; false where a group has fewer.
    """

    def __init__(self, bins: np.ndarray) -> None:
        self.count = (bins >= 0).sum(axis=1)
        self._column = np.broadcast_to(np.arange(bins.shape[1]), bins.shape)
        self._alone = True
        rank = np.where(bins >= 0, bins, _NONE)
        order = np.argsort(rank, axis=1, kind="stable")
        ordered = np.take_along_axis(rank, order, axis=1)
        new = np.diff(ordered, axis=1, prepend=-1) != 0
        if new[ordered < _NONE].all():
            self.bins, self.usable = np.maximum(bins, 0), bins >= 0
            return
        self._alone, self._column = False, np.empty_like(bins)
        np.put_along_axis(self._column, order, np.cumsum(new, axis=1) - 1, axis=1)
        first = np.maximum.accumulate(np.where(new, np.arange(bins.shape[1]), 0), axis=1)
        self._place = np.empty_like(bins)  # of each option, among those that share its bin
        np.put_along_axis(self._place, order, np.arange(bins.shape[1]) - first, axis=1)
        self.bins = np.full((len(bins), int(np.max(self._column)) + 1), -1, np.int64)
        np.put_along_axis(self.bins, self._column, bins, axis=1)
        self.bins, self.usable = np.maximum(self.bins, 0), self.bins >= 0

    def shared_out(self, values: np.ndarray) -> np.ndarray:
        """`int64[groups, options]`: what is in a bin in equal parts for the options that share it."""
        if self._alone:
            return values
        total, of = (np.take_along_axis(table, self._column, axis=1) for table in (values, self._sharing))
        out: np.ndarray = total // of + (self._place < total % of)
        return out

    @cached_property
    def _sharing(self) -> np.ndarray:
        """`int64[groups, different bins]`: how many options share each."""
        out: np.ndarray = np.zeros_like(self.bins)
        np.add.at(out, (np.arange(len(out))[:, None], self._column), 1)
        return out

    @cached_property
    def rounds(self) -> list[np.ndarray]:
        """The groups in rounds: those of a round have no bin in common."""
        round_of = np.zeros(len(self.bins), np.int64)
        after: dict[int, int] = {}  # by bin, the first round in which nobody uses it yet
        for group, (bins, usable) in enumerate(zip(self.bins.tolist(), self.usable.tolist(), strict=True)):
            used = [b for b, there in zip(bins, usable, strict=True) if there]
            round_of[group] = turn = max([after.get(b, 0) for b in used], default=0)
            after.update(dict.fromkeys(used, turn + 1))
        return [np.flatnonzero(round_of == turn) for turn in range(int(np.max(round_of, initial=0)) + 1)]
