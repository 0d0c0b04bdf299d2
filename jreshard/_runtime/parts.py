"""In which parts a route is launched, so that copying begins early."""

import numpy as np

from jreshard._planning.route import LeafMoves, Route

_FEWEST_LEAVES, _FIRST_PART = 64, 4  # of a route that is launched in parts, and of the first of them
# What launching a part takes, by itself and for each leaf, and how fast NVLink copies: cautious estimates (with an H200
# 0.3 ms and 10 us were seen). Where launching takes less, or copying longer, the links are never without work.
_PART_SECONDS, _LEAF_SECONDS, _COPY_RATE = 5e-4, 14e-6, 4e11


def arranged(route: Route, transport: str) -> Route:
    """The route in the parts in which it is launched.

    Copy engines of GPUs copy while the host launches: the leaves that take longest go first, few of them, and each part
    after that has as many as can be launched while the one before is copied.
    """
    if transport != "p2p" or len(route.leaves) < _FEWEST_LEAVES:
        return route
    seconds = np.array([_busiest_receiver(template) / _COPY_RATE for template in route.templates])[route.template_of]
    longest_first = np.argsort(-seconds, kind="stable")
    cuts = _cuts(seconds[longest_first])
    return route.in_parts([sorted(some.tolist()) for some in np.split(longest_first, cuts)]) if cuts else route


def _busiest_receiver(template: LeafMoves) -> int:
    """Bytes that the rank which receives most of a leaf gets from others: what is on a device is copied in no time."""
    moves = template.moves
    crosses = moves.src != moves.dst
    received = np.bincount(moves.dst[crosses], template.nbytes[crosses], minlength=1)
    return int(received.max())


def _cuts(seconds: np.ndarray) -> list[int]:
    """Where the parts after the first begin, given what copying each leaf takes."""

    def launched_meanwhile(begin: int, end: int) -> int:
        return int((seconds[begin:end].sum() - _PART_SECONDS) / _LEAF_SECONDS)

    cuts: list[int] = []
    begin, end = 0, _FIRST_PART
    while end < len(seconds) and launched_meanwhile(begin, end) < 2 * end:  # so that few parts are enough
        end += 1
    while end < len(seconds):
        fits = launched_meanwhile(begin, end)
        if fits < end - begin:  # copying does not cover the launching any more
            break
        cuts.append(end)
        begin, end = end, end + fits
    return cuts
