"""In which parts a route is launched, so that copying begins early."""

import numpy as np

from jreshard._planning.route import Route

_FEWEST_LEAVES, _FIRST_PART = 64, 4  # of a route that is launched in parts, and of the first of them
# What launching a part takes, by itself and for each leaf, and how fast NVLink and a GPU's own memory copy: cautious
# estimates (with H200s 0.3 ms, 10 and 16 us, 390 GB/s and 1.1 TB/s were seen). Where launching takes less, or copying
# longer, the links are never without work.
_PART_SECONDS, _LEAF_SECONDS = 5e-4, {"p2p": 14e-6, "nccl": 20e-6}
_COPY_RATE, _LOCAL_RATE = 4e11, 1.2e12


def arranged(route: Route, transport: str) -> Route:
    """The route in the parts in which it is launched.

    GPUs copy while the host launches: the leaves that take longest go first, few of them, and each part after that has
    as many as can be launched while the one before is copied.
    """
    if transport not in _LEAF_SECONDS or len(route.leaves) < _FEWEST_LEAVES:
        return route
    crossing, staying = _seconds(route)
    launching = _LEAF_SECONDS[transport]
    spread = (staying > crossing) & (staying > launching)
    orders = [_order(crossing, staying, some) for some in (spread, np.zeros_like(spread))]
    # Spread, they may leave too little between them to launch others meanwhile.
    order, cuts = max(((order, _cuts(crossing[order], launching)) for order in orders), key=lambda found: len(found[1]))
    return route.in_parts([sorted(some.tolist()) for some in np.split(order, cuts)]) if cuts else route


def _seconds(route: Route) -> tuple[np.ndarray, np.ndarray]:
    """`float64[leaves]` twice: what copying a leaf takes the device that is busiest with it, from others and within."""
    by_template = []
    for template in route.templates:
        moves, nbytes = template.moves, template.nbytes
        crosses = moves.src != moves.dst
        received = [np.bincount(moves.dst[some], nbytes[some], minlength=1).max() for some in (crosses, ~crosses)]
        by_template.append((received[0] / _COPY_RATE, received[1] / _LOCAL_RATE))
    crossing, staying = np.array(by_template)[route.template_of].T
    return crossing, staying


def _order(crossing: np.ndarray, staying: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """The leaves, those longest on links first; and evenly among them those in `spread`, longest on their device first.

    A part's copies begin when the one before has ended. If all that stays on its device came last, links would idle.
    """

    def progress(seconds: np.ndarray, which: np.ndarray, *, after: bool) -> tuple[np.ndarray, np.ndarray]:
        longest_first = np.flatnonzero(which)[np.argsort(-seconds[which], kind="stable")]
        share = seconds[longest_first] / max(seconds[which].sum(), np.finfo(float).tiny)
        return longest_first, np.cumsum(share) - (0 if after else share)

    links, done = progress(crossing, ~spread, after=False)
    others, in_proportion = progress(staying, spread, after=True)
    return np.concatenate([links, others])[np.argsort(np.concatenate([done, in_proportion]), kind="stable")]


def _cuts(seconds: np.ndarray, launching: float) -> list[int]:
    """Where the parts after the first begin, given what each leaf takes on links, and launching any."""

    def launched_meanwhile(begin: int, end: int) -> int:
        return int((seconds[begin:end].sum() - _PART_SECONDS) / launching)

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
