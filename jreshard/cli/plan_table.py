"""The figures of a plan as a table."""

from collections.abc import Iterator

from jreshard import Figures, Plan
from jreshard._render import human_bytes, human_seconds

LABEL_WIDTH = 28
_COLUMN_WIDTH = 16


def table(made: Plan) -> Iterator[str]:
    """Yield the lines of the table of a plan that was made for a topology."""
    found = made.figures
    yield fact("leaves", f"{made.num_leaves:,}")
    yield fact("devices", f"{len(made.devices):,}")
    yield fact("bytes on destination", human_bytes(made.nbytes))
    yield fact("busiest sender", human_bytes(int(made.sent.max(initial=0))))
    yield fact("busiest receiver", human_bytes(int(made.received.max(initial=0))))
    yield fact("phases", str(found.phases))
    yield fact("staged", human_bytes(found.staging))
    yield ""
    yield from _links(found)
    yield ""
    yield from _times(found)


def fact(label: str, *cells: str) -> str:
    """A line: what it is about, and the value, or values in columns."""
    if len(cells) == 1:
        return f"{label:<{LABEL_WIDTH}}{cells[0]}"
    return f"{label:<{LABEL_WIDTH}}" + "".join(f"{cell:>{_COLUMN_WIDTH}}" for cell in cells)


def _links(found: Figures) -> Iterator[str]:
    boxes = found.boxes_by_link
    yield fact("link", "bytes", "boxes")
    for name, nbytes in found.bytes_by_link.items():
        yield fact(f"  {name}", human_bytes(nbytes), f"{boxes[name]:,}")
    link = found.busiest
    whose = "network card" if link.kind == "network" else f"{link.kind} of rank"
    where = f"{whose} {link.number}, {link.direction}"
    yield fact("busiest link", f"{where}: {human_bytes(link.nbytes)}, {human_seconds(link.seconds)}")
    yield fact("lower bound", f"{human_seconds(found.bound.seconds)}: {found.bound.reason}")
    yield fact("busiest over bound", f"{found.over_bound:.3f}")


def _times(found: Figures) -> Iterator[str]:
    ours = found.predicted.total
    yield fact("predicted time", "", "relative")
    for name, seconds in (
        ("this plan", ours),
        ("one sender a shard", found.one_sender.total),
        ("gather and broadcast", found.gather_and_broadcast),
    ):
        yield fact(f"  {name}", human_seconds(seconds), f"{seconds / ours:.2f}")
