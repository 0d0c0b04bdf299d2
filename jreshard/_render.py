"""A plan as text, as HTML, and as plain data for JSON."""

import html
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jreshard._plan import Plan

_ROWS = 20  # leaves shown


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


def figures(plan: "Plan") -> dict[str, str]:
    """The plan's figures, named and formatted."""
    return {
        "leaves": f"{plan.num_leaves:,}",
        "devices": f"{len(plan.devices)}",
        "destination": human_bytes(plan.nbytes),
        "crossing": f"{human_bytes(plan.bytes_moved)} in {plan.num_messages:,} boxes",
        "lower bound": human_bytes(plan.lower_bound),
        "on the device": human_bytes(plan.bytes_local),
        "busiest sender": human_bytes(int(plan.sent.max(initial=0))),
        "busiest receiver": human_bytes(int(plan.received.max(initial=0))),
        "fingerprint": plan.fingerprint,
    }


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
        "traffic": plan.traffic.tolist(),
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


def _leaf_row(plan: "Plan", index: int) -> str:
    t = plan.targets[index]
    cells = (t.path, list(t.shape), t.dtype, "host" if t.src is None else t.src.spec, t.dst.spec)
    return "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>"


def _traffic_table(plan: "Plan") -> str:
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
