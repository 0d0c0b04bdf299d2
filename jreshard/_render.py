"""A plan as text, as HTML, and as plain data for JSON."""

import html
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jreshard._planning.cost import link_loads

if TYPE_CHECKING:
    from jreshard._plan import Plan
    from jreshard._planning.cost import Link

_ROWS = 20  # leaves shown
_RANKS = 64  # ranks whose traffic is shown as a table, and written to JSON


def human_bytes(count: int) -> str:
    """`count` in decimal units, as link speeds are given: 1 GB is 10⁹ bytes.

    Example:
        >>> human_bytes(1_234_000)
        '1.23 MB'
    """
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.4g} TB"


def human_seconds(seconds: float) -> str:
    """A time with three digits.

    Example:
        >>> human_seconds(0.0123)
        '12.3 ms'
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def figures(plan: "Plan") -> dict[str, str]:
    """The plan's figures, named and formatted."""
    return {**_size_figures(plan), **_link_figures(plan), "fingerprint": plan.fingerprint}


def _size_figures(plan: "Plan") -> dict[str, str]:
    return {
        "leaves": f"{plan.num_leaves:,}",
        "devices": f"{len(plan.devices)}",
        "destination": human_bytes(plan.nbytes),
        "crossing": f"{human_bytes(plan.bytes_moved)} in {plan.num_messages:,} boxes",
        "lower bound": human_bytes(plan.lower_bound),
        "on the device": human_bytes(plan.bytes_local),
        "busiest sender": human_bytes(int(plan.sent.max(initial=0))),
        "busiest receiver": human_bytes(int(plan.received.max(initial=0))),
    }


def _link_figures(plan: "Plan") -> dict[str, str]:
    if plan.topology is None:
        return {}
    made = plan.figures
    links, boxes = made.bytes_by_link, made.boxes_by_link
    gathered = made.gather_and_broadcast
    return {
        "topology": plan.topology.name,
        **{name: f"{human_bytes(links[name])} in {boxes[name]:,} boxes" for name in ("nvlink", "network")},
        "phases": str(made.phases),
        "staged": human_bytes(made.staging),
        "busiest link": f"{made.busiest.kind} {made.busiest.direction} of {_owner(made.busiest)}, "
        f"{human_bytes(made.busiest.nbytes)} in {human_seconds(made.busiest.seconds)}",
        "least possible": f"{human_seconds(made.bound.seconds)}; the plan is {made.over_bound:.3f} times that",
        "predicted": human_seconds(made.predicted.total),
        "one sender": f"{human_seconds(made.one_sender.total)} ({_times(made.one_sender.total, made.predicted.total)})",
        "gather+broadcast": f"{human_seconds(gathered)} ({_times(gathered, made.predicted.total)})",
    }


def _owner(link: "Link") -> str:
    return f"card {link.number}" if link.kind == "network" else f"rank {link.number}"


def _times(other: float, ours: float) -> str:
    return f"{other / ours:.1f} times as long"


def as_text(plan: "Plan") -> str:
    """The figures, one a line."""
    return "\n".join(["Plan:", *(f"  {name:<17} {value}" for name, value in figures(plan).items())])


def as_html(plan: "Plan") -> str:
    """The figures, the first leaves, and the bytes from rank to rank as a table shaded by size."""
    rows = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in figures(plan).items())
    leaves = "".join(_leaf_row(plan, i) for i in range(min(_ROWS, plan.num_leaves)))
    more = f"<p>… {plan.num_leaves - _ROWS} more</p>" if plan.num_leaves > _ROWS else ""
    head = "<tr><th>leaf</th><th>shape</th><th>dtype</th><th>from</th><th>to</th></tr>"
    return f"<table>{rows}</table><table>{head}{leaves}</table>{more}{_traffic_table(plan)}"


def as_dict(plan: "Plan") -> dict[str, Any]:
    """The plan as data that JSON can hold."""
    return {
        "version": 1,
        "fingerprint": plan.fingerprint,
        "nbytes": plan.nbytes,
        "bytes_moved": plan.bytes_moved,
        "bytes_local": plan.bytes_local,
        "lower_bound": plan.lower_bound,
        "num_moves": plan.num_moves,
        "num_messages": plan.num_messages,
        "devices": [str(device) for device in plan.devices],
        **_traffic(plan),
        **_links(plan),
        "leaves": [
            {
                "path": t.path,
                "shape": list(t.shape),
                "dtype": str(t.dtype),
                "src": None if t.src is None else str(t.src.spec),
                "dst": str(t.dst.spec),
            }
            for t in plan.targets
        ],
    }


def _traffic(plan: "Plan") -> dict[str, Any]:
    """Bytes from rank to rank; only what each sends and receives where a matrix would be most of the file."""
    if len(plan.devices) <= _RANKS:
        return {"traffic": plan.traffic.tolist()}
    return {"sent": plan.sent.tolist(), "received": plan.received.tolist()}


def _links(plan: "Plan") -> dict[str, Any]:
    if plan.topology is None or plan.domains is None:
        return {}
    made, topology = plan.figures, plan.topology
    kept = ("domain_size", "nvlink", "nic", "ranks_per_nic", "ranks_per_process", "memory", "smallest_piece", "origins")
    return {
        "topology": {
            "name": topology.name,
            **{name: getattr(topology, name) for name in kept},
            "costs": asdict(topology.costs),
        },
        "domains": plan.domains.tolist(),
        "bytes_by_link": made.bytes_by_link,
        "boxes_by_link": made.boxes_by_link,
        "links": {f"{kind} {direction}": nbytes.tolist() for kind, direction, nbytes in link_loads(made.loads)},
        "phases": made.phases,
        "staging": made.staging,
        "busiest_link": asdict(made.busiest),
        "bound": asdict(made.bound),
        "over_bound": made.over_bound,
        "predicted": asdict(made.predicted),
        "one_sender": asdict(made.one_sender),
        "gather_and_broadcast": made.gather_and_broadcast,
    }


def _leaf_row(plan: "Plan", index: int) -> str:
    t = plan.targets[index]
    cells = (t.path, list(t.shape), t.dtype, "host" if t.src is None else t.src.spec, t.dst.spec)
    return "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>"


def _traffic_table(plan: "Plan") -> str:
    if len(plan.devices) > _RANKS:
        return f"<p>{len(plan.devices):,} ranks: <code>plan.plot()</code> shows what goes from rank to rank</p>"
    top = max(int(plan.traffic.max(initial=0)), 1)
    head = "".join(f"<th>{rank}</th>" for rank in range(len(plan.devices)))
    body = "".join(
        f"<tr><th>{rank}</th>"
        + "".join(
            f'<td style="background:rgba(31,119,180,{value / top:.2f})">{human_bytes(value) if value else ""}</td>'
            for value in row
        )
        + "</tr>"
        for rank, row in enumerate(plan.traffic.tolist())
    )
    return f"<table><caption>bytes from rank (row) to rank</caption><tr><th></th>{head}</tr>{body}</table>"
