"""Weights that exist on paper: their shapes and logical axes, stacked over layers and experts or one array each."""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

#: Names of the dims of a weight, outermost first; `None` for a dim that no rule may split.
Axes: TypeAlias = tuple[str | None, ...]


@dataclass(frozen=True)
class Weight:
    """One array of a model, or one weight of a block before it is stacked. A leaf of the trees that hold it.

    Attributes:
        shape: its sizes in elements. Matrices are (in, out), heads are dims of their own, as in Flax.
        axes: the logical axis of each dim.
        layers: the layers `start <= layer < stop` that it belongs to; `(0, 0)` for what comes before the first layer,
            `(depth, depth)` for what comes after the last one.
        depth: the model's number of layers.
        expert: for a weight of one expert, its number and how many there are.
    """

    shape: tuple[int, ...]
    axes: Axes
    layers: tuple[int, int] = (0, 0)
    depth: int = 0
    expert: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(
                f"a weight of shape {self.shape} has {len(self.axes)} axes {self.axes}; expected one a dim"
            )

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for weights that rules split alike: those of other layers, and of other experts."""
        return self.shape, self.axes, self.expert and self.expert[1]

    def is_alike(self, other: "Weight") -> bool:
        """Whether the two are of one kind."""
        return self.kind == other.kind


@dataclass(frozen=True)
class Experts:
    """The part of a block that it holds once for every expert.

    Attributes:
        count: the number of experts.
        block: the weights of one.
    """

    count: int
    block: "Block"


Block: TypeAlias = Mapping[str, "Weight | Experts | Block"]


@dataclass(frozen=True)
class Model:
    """An architecture.

    Attributes:
        name: what it is called here.
        source: where its figures were published.
        first: the weights before the first layer.
        blocks: the weights of a layer, by kind of layer.
        kinds: the kind of every layer, in order.
        last: the weights after the last layer.
    """

    name: str
    source: str
    first: Block
    blocks: Mapping[str, Block]
    kinds: tuple[str, ...]
    last: Block

    @property
    def depth(self) -> int:
        """The number of layers."""
        return len(self.kinds)


def stage_sizes(depth: int, stages: int) -> list[int]:
    """How many of `depth` layers each of `stages` pipeline stages holds: as even as can be, the first ones more.

    Example:
        >>> stage_sizes(61, 8)
        [8, 8, 8, 8, 8, 7, 7, 7]
    """
    return [depth // stages + (stage < depth % stages) for stage in range(stages)]


def stage_of(weight: Weight, stages: int) -> int | None:
    """The pipeline stage that holds `weight`; `None` if its layers are in more than one."""
    ends = list(itertools.accumulate(stage_sizes(weight.depth, stages)))
    start, stop = weight.layers
    first, last = (min(bisect_right(ends, layer), stages - 1) for layer in (start, max(start, stop - 1)))
    return first if first == last else None


def stacked_tree(model: Model, stages: Sequence[int]) -> dict[str, Any]:
    """The weights as a training framework holds them: layers of a kind stacked, experts stacked.

    Args:
        model: the architecture.
        stages: numbers of pipeline stages. Layers that are on different stages in one of these pipelines are stacked
            apart.
    """
    spans = _spans(model.depth, stages)
    chunks = [_stacked_span(model, start, stop) for start, stop in spans]
    layers = chunks[0] if len(chunks) == 1 else {"stages": chunks}
    return _with_ends(model, layers)


def unstacked_tree(model: Model) -> dict[str, Any]:
    """The weights one array each, a layer after the other, an expert after the other."""
    layers = [_unstacked(model.blocks[kind], (i, i + 1), model.depth) for i, kind in enumerate(model.kinds)]
    return _with_ends(model, {"layers": layers})


def is_weight(node: Any) -> bool:
    """Whether a node of a tree is a `Weight`."""
    return isinstance(node, Weight)


def weights_of(tree: Any) -> Iterator[Weight]:
    """The weights of a tree."""
    return iter(jax.tree.leaves(tree, is_leaf=is_weight))


def _with_ends(model: Model, layers: Mapping[str, Any]) -> dict[str, Any]:
    first = _unstacked(model.first, (0, 0), model.depth)
    last = _unstacked(model.last, (model.depth, model.depth), model.depth)
    return {**first, **layers, **last}


def _spans(depth: int, stages: Sequence[int]) -> list[tuple[int, int]]:
    cuts = {0, depth}.union(*(itertools.accumulate(stage_sizes(depth, count)) for count in stages))
    return list(itertools.pairwise(sorted(cuts)))


def _stacked_span(model: Model, start: int, stop: int) -> dict[str, Any]:
    kinds = model.kinds[start:stop]
    out = {}
    for kind, block in model.blocks.items():
        if count := kinds.count(kind):
            layers = (start + kinds.index(kind), stop - kinds[::-1].index(kind))
            name = f"{kind}_layers" if len(model.blocks) > 1 else "layers"
            out[name] = _stacked(block, (count,), ("layers",), layers, model.depth)
    return out


def _stacked(block: Block, shape: tuple[int, ...], axes: Axes, layers: tuple[int, int], depth: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, part in block.items():
        if isinstance(part, Weight):
            out[name] = Weight(shape + part.shape, axes + part.axes, layers, depth)
        elif isinstance(part, Experts):
            out[name] = _stacked(part.block, (*shape, part.count), (*axes, "expert"), layers, depth)
        else:
            out[name] = _stacked(part, shape, axes, layers, depth)
    return out


def _unstacked(
    block: Block, layers: tuple[int, int], depth: int, expert: tuple[int, int] | None = None
) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, part in block.items():
        if isinstance(part, Weight):
            out[name] = Weight(part.shape, part.axes, layers, depth, expert)
        elif isinstance(part, Experts):
            out[name] = [_unstacked(part.block, layers, depth, (i, part.count)) for i in range(part.count)]
        else:
            out[name] = _unstacked(part, layers, depth, expert)
    return out
