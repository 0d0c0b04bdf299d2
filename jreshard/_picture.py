"""A plan as pictures: bytes from rank to rank, and what each link carries beside what it must."""

from typing import TYPE_CHECKING, Any

import numpy as np

from jreshard._planning.cost import link_loads, link_rates
from jreshard._render import human_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jreshard._plan import Plan
    from jreshard._planning.figures import Figures

_PIXELS = 512  # a side of the heat map at most; more ranks are added up in blocks


def picture(plan: "Plan") -> "Figure":
    """See `Plan.plot`."""
    try:
        from jreshard._shown_figure import ShownFigure
    except ImportError as error:
        raise ImportError("Plan.plot needs matplotlib: pip install matplotlib") from error
    figure = ShownFigure(figsize=(7, 6) if plan.topology is None else (14, 6), layout="constrained")
    axes = figure.subplots(1, 1 if plan.topology is None else 2, squeeze=False)[0]
    _heat_map(plan, figure, axes[0])
    if plan.topology is not None:
        _link_loads(plan.figures, axes[1])
    return figure


def _heat_map(plan: "Plan", figure: Any, axes: Any) -> None:
    """Bytes from rank to rank on a logarithmic scale; what stays on a device is left out."""
    from matplotlib.colors import LogNorm

    traffic = plan.traffic - np.diag(plan.traffic.diagonal())
    ranks = len(traffic)
    block = -(-ranks // _PIXELS)
    edges = range(0, ranks, block) if ranks else []
    shown = np.add.reduceat(np.add.reduceat(traffic, edges, axis=0), edges, axis=1) if ranks else traffic
    axes.set_title(f"{human_bytes(plan.bytes_moved)} from rank to rank")
    axes.set_xlabel("receives")
    axes.set_ylabel("sends")
    if shown.any():
        norm = LogNorm(shown[shown > 0].min(), max(shown.max(), 2))
        image = axes.imshow(
            np.ma.masked_equal(shown, 0),
            norm=norm,
            cmap="viridis_r",
            interpolation="nearest",
            extent=(-0.5, ranks - 0.5, ranks - 0.5, -0.5),
        )
        figure.colorbar(image, ax=axes, label="bytes" if block == 1 else f"bytes, blocks of {block} ranks")
    if plan.domains is not None:
        for border in np.flatnonzero(np.diff(plan.domains)) + 0.5:
            axes.axhline(border, color="0.8", linewidth=0.5)
            axes.axvline(border, color="0.8", linewidth=0.5)


def _link_loads(figures: "Figures", axes: Any) -> None:
    """How long each link is busy, the fullest first, with the bound."""
    rates = link_rates(figures.topology)
    for kind, direction, nbytes in link_loads(figures.loads):
        if nbytes.any():
            seconds = np.sort(nbytes)[::-1] / rates[kind]
            axes.step(np.linspace(0, 100, len(seconds)), seconds, where="mid", label=f"{kind}, {direction}")
    axes.axhline(figures.bound.seconds, color="black", linestyle="--", label="lower bound")
    axes.set_title(f"busiest link {figures.over_bound:.3f} times the bound; {figures.predicted.total:.3g} s predicted")
    axes.set_xlabel("links, the busiest first (%)")
    axes.set_ylabel("busy (s)")
    axes.set_ylim(bottom=0)
    axes.legend()
