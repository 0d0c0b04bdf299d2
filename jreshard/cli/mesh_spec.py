"""Mesh shapes as text: `fsdp=4,tp=2`."""

from collections.abc import Mapping

from jreshard.cli.errors import UsageError

#: As NumPy's arrays have, which meshes are made of.
MOST_AXES = 32


def parse_mesh_spec(text: str) -> dict[str, int]:
    """Return the axes of `text` in order: `"fsdp=4,tp=2"` gives `{"fsdp": 4, "tp": 2}`.

    Raises:
        UsageError: `text` is empty, names an axis twice or not at all, or has a size that is not a positive integer.
    """
    axes: dict[str, int] = {}
    for item in text.split(","):
        name, size = _parse_axis(item, text)
        if name in axes:
            raise UsageError(f"mesh {text!r}: axis {name!r} is repeated")
        axes[name] = size
    if len(axes) > MOST_AXES:
        raise UsageError(f"mesh {text!r} has {len(axes)} axes; expected at most {MOST_AXES}")
    return axes


def format_mesh_spec(axes: Mapping[str, int]) -> str:
    """Return the text that `parse_mesh_spec` reads as `axes`."""
    return ",".join(f"{name}={size}" for name, size in axes.items())


def _parse_axis(item: str, text: str) -> tuple[str, int]:
    name, equals, size = (part.strip() for part in item.partition("="))
    if not (name and equals):
        raise UsageError(f"mesh {text!r}: expected AXIS=SIZE[,AXIS=SIZE...], such as fsdp=4,tp=2; found {item!r}")
    try:
        number = int(size)
    except ValueError:
        number = 0
    if number < 1:
        raise UsageError(f"mesh {text!r}: the size of axis {name!r} must be a positive integer, not {size!r}")
    return name, number
