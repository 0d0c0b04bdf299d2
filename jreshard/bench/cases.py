"""What is moved in each case, and from where to where."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from jreshard.bench import sides
from jreshard.bench.shapes import Shapes, amount, many, model, nbytes, one, scaled
from jreshard.bench.sides import Side


@dataclass(frozen=True)
class Base:
    """A simpler move that a case is held against: of the same arrays, or of those that some of its devices hold.

    Attributes:
        name: what it is, in words.
        src: where the leaves lie, on shards that the case's source has as well.
        dst: where they go.
    """

    name: str
    src: Side
    dst: Side


@dataclass(frozen=True)
class Case:
    """One move.

    Attributes:
        what: the tree, in words; `{size}` and `{leaf}` stand for the bytes of all and of one leaf.
        way: from where to where, in words.
        shapes: the leaves.
        src: where they lie.
        dst: where they go.
        base: what it is held against, where there are replicas: such a case is planned so that replicas of the source
            share what has to be sent, and those of the destination pass it on, with the plain plan beside it.
        multiple: of what the sides are multiples when the case is scaled.
    """

    what: str
    way: str
    shapes: Callable[[], Shapes]
    src: Side
    dst: Side
    base: Base | None = None
    multiple: int = 8

    def scaled(self, scale: float) -> Shapes:
        """The leaves with about `scale` times the bytes: as many of them, with shorter sides."""
        return scaled(self.shapes(), scale, self.multiple)

    def title(self, shapes: Shapes) -> str:
        """The case in words."""
        sizes = [nbytes(shape) for shape in shapes.values()]
        return f"{self.what.format(size=amount(sum(sizes)), leaf=amount(sizes[0]))}, {self.way}"

    @property
    def num_devices(self) -> int:
        """The devices that there must be."""
        return 1 + max(self.src.devices + self.dst.devices)


def select(chosen: Sequence[str] | None, num_devices: int) -> list[str]:
    """The cases to measure on so many devices, the most important first.

    Args:
        chosen: their names; `None` for those that suit the number of devices.

    Raises:
        ValueError: one of them needs more devices.
    """
    suited = SETS[max(n for n in SETS if n <= num_devices)]
    if chosen is None:
        return list(suited)
    if large := [f"{name} ({CASES[name].num_devices})" for name in chosen if CASES[name].num_devices > num_devices]:
        raise ValueError(f"{num_devices} devices are not enough for {', '.join(large)}")
    return [name for name in dict.fromkeys([*suited, *CASES]) if name in chosen]


_LLAMA, _QWEN = "Llama-3.1-8B shapes ({size})", "Qwen3-30B-A3B shapes ({size})"
_LLAMA_70B = "Llama-3.1-70B shapes ({size})"
_LLAMA_SHAPES, _QWEN_SHAPES, _LLAMA_70B_SHAPES = map(model, ("llama-3.1-8b", "qwen3-30b-a3b", "llama-3.1-70b"))
_ONE = "one array of {size}"
_8_GIB, _2_GIB = one(1 << 20), one(1 << 18)
_6_GIB = one(3 << 18)  # rows and columns that divide by 3 and 6 need more than powers of two

_FIRST, _SECOND = Side((0,), sides.whole), Side((1,), sides.whole)
_ROWS, _COLUMNS = Side((0, 1), sides.rows), Side((0, 1), sides.columns)
_TP = Side((0, 1), sides.tensor_parallel)

_PAIR = {
    "one": Case(_ONE, "0 -> 1", _8_GIB, _FIRST, _SECOND),
    "llama-8b": Case(_LLAMA, "0 -> 1", _LLAMA_SHAPES, _FIRST, _SECOND),
    "llama-8b-fsdp-to-tp": Case(_LLAMA, "fsdp=2 -> tp=2 on {0,1}", _LLAMA_SHAPES, _ROWS, _TP),
    "small": Case("2,000 x {leaf}", "0 -> 1", many(2000, (64, 128)), _FIRST, _SECOND),
    "one-rows-to-columns": Case(_ONE, "rows -> columns of {0,1}", _2_GIB, _ROWS, _COLUMNS),
    "medium": Case("400 x {leaf}", "0 -> 1", many(400, (2560, 4096)), _FIRST, _SECOND),
    "qwen3-30b-a3b": Case(_QWEN, "0 -> 1", _QWEN_SHAPES, _FIRST, _SECOND),
    "one-rows-to-1": Case(_ONE, "rows of {0,1} -> 1", _2_GIB, _ROWS, _SECOND),
    "one-0-to-columns": Case(_ONE, "0 -> columns of {0,1}", _2_GIB, _FIRST, _COLUMNS),
    "llama-8b-rows-to-1": Case(_LLAMA, "rows of {0,1} -> 1", _LLAMA_SHAPES, _ROWS, _SECOND),
    "llama-8b-0-to-columns": Case(_LLAMA, "0 -> columns of {0,1}", _LLAMA_SHAPES, _FIRST, _COLUMNS),
    "llama-8b-rows-to-columns": Case(_LLAMA, "rows -> columns of {0,1}", _LLAMA_SHAPES, _ROWS, _COLUMNS),
}


def _fan_out(count: int) -> Case:
    """From the first device to all others."""
    others = Side(tuple(range(1, count)), sides.whole, replicas=count - 1)
    way = f"0 -> {count - 1} replicas"
    return Case(_LLAMA, way, _LLAMA_SHAPES, _FIRST, others, Base("1 -> 1", _FIRST, _SECOND))


def _between_halves(count: int) -> dict[str, Case]:
    """From the first half of the devices to the others, and among all, for 4 devices or 8."""
    half = count // 2
    lower, upper, everywhere = (tuple(range(*ends)) for ends in ((half,), (half, count), (count,)))
    large, what = (_LLAMA_70B_SHAPES, _LLAMA_70B) if count == 8 else (_LLAMA_SHAPES, _LLAMA)
    name = "llama-70b" if count == 8 else "llama-8b"
    fsdp, tp = Side(lower, sides.rows), Side(upper, sides.tensor_parallel)
    there = f"{{{lower[0]}..{lower[-1]}}} -> {{{upper[0]}..{upper[-1]}}}"
    key = f"{half}-to-{half}"
    disjoint = Case(what, f"fsdp={half} -> tp={half}, {there}", large, fsdp, tp)
    experts = Case(_QWEN, f"ep={half} -> tp={half}, {there}", _QWEN_SHAPES, fsdp, tp)
    in_place = Side(everywhere, sides.rows), Side(everywhere, sides.tensor_parallel)
    copies = replace(tp, rule=sides.whole, replicas=half)
    return {
        f"{name}-{key}": disjoint,
        f"llama-8b-1-to-{count - 1}-replicas": _fan_out(count),
        f"{name}-{count}-to-{count}": Case(what, f"fsdp={count} -> tp={count}, the same devices", large, *in_place),
        f"qwen3-30b-a3b-{key}": experts,
        f"llama-8b-{key}-replicas": Case(
            _LLAMA, f"fsdp={half} -> {half} replicas, {there}", _LLAMA_SHAPES, fsdp, copies,
            Base(f"{half} -> 1", fsdp, Side((half,), sides.whole)),
        ),
        f"one-{key}-columns": Case(
            _ONE, f"rows -> columns, {there}", _8_GIB, fsdp, replace(tp, rule=sides.columns)
        ),
        f"one-{key}-same": Case(_ONE, f"rows -> rows, {there}", _8_GIB, fsdp, replace(tp, rule=sides.rows)),
    }  # fmt: skip


def _overlapping(src: tuple[int, ...], dst: tuple[int, ...]) -> Case:
    way = f"rows of {{{src[0]}..{src[-1]}}} -> columns of {{{dst[0]}..{dst[-1]}}}"
    return Case(_ONE, way, _6_GIB, Side(src, sides.rows), Side(dst, sides.columns), multiple=24)


def _first(*names: str, then: Iterable[str]) -> tuple[str, ...]:
    return (*names, *(name for name in then if name not in names))


_OF_4 = _between_halves(4) | {
    "llama-8b-2-replicas-to-2": Case(
        _LLAMA, "replicas on 0 and 1 -> tp=2 on {2,3}", _LLAMA_SHAPES,
        Side((0, 1), sides.whole, replicas=2), Side((2, 3), sides.tensor_parallel),
        Base("one source", _FIRST, Side((2, 3), sides.tensor_parallel)),
    ),
    "one-3-to-4": _overlapping((0, 1, 2), (0, 1, 2, 3)),
    "qwen3-30b-a3b-4-to-4-in-place": Case(
        _QWEN, "ep=4 -> tp=4, the same devices", _QWEN_SHAPES,
        Side((0, 1, 2, 3), sides.rows), Side((0, 1, 2, 3), sides.tensor_parallel),
    ),
}  # fmt: skip
_OF_8 = _between_halves(8) | {
    "llama-70b-tp4-to-tp2-dp2": Case(
        _LLAMA_70B, "tp=4 on {0..3} -> 2 replicas of tp=2 on {4..7}", _LLAMA_70B_SHAPES,
        Side((0, 1, 2, 3), sides.tensor_parallel), Side((4, 5, 6, 7), sides.tensor_parallel, replicas=2),
        Base("one replica", Side((0, 1, 2, 3), sides.tensor_parallel), Side((4, 5), sides.tensor_parallel)),
    ),
    "one-6-to-4": _overlapping((0, 1, 2, 3, 4, 5), (4, 5, 6, 7)),
}  # fmt: skip
_OF_3 = {"llama-8b-1-to-2-replicas": _fan_out(3)}

CASES = _PAIR | _OF_3 | _OF_4 | _OF_8

#: The cases for each number of devices, the most important first; more devices than these are not all used.
SETS = {
    2: tuple(_PAIR),
    3: (*_OF_3, *_PAIR),
    4: _first("one", "llama-8b-2-to-2", "llama-8b-1-to-3-replicas", "llama-8b-2-replicas-to-2", then=_OF_4),
    8: _first("one", "llama-70b-4-to-4", "llama-8b-1-to-7-replicas", "llama-70b-8-to-8", then=_OF_8),
}
