"""Moves to strided copies in bytes, and the stream of words that the native core reads."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jreshard._layout import Layout
from jreshard._planning.moves import Moves

_CHUNK = 64  # leaves in one FFI call: enough to make the call cheap, few enough that copying starts early
_GPU_CHUNK = 1024  # for GPUs, where a call costs more, and chunks have to be in order (measured on two H200)

_SENDS, _RECEIVES = 1, 2


def leaves_in_a_call(platform: str) -> int:
    """How many leaves one FFI call on devices of this platform takes."""
    return _GPU_CHUNK if platform == "gpu" else _CHUNK


@dataclass(frozen=True)
class StridedCopy:
    """A box as the copy engines see it: runs of contiguous bytes, repeated over `dims`.

    Attributes:
        run: contiguous bytes.
        dims: (extent, source stride, destination stride) from the outermost in; strides in bytes.
    """

    run: int
    dims: tuple[tuple[int, int, int], ...]


def strided_copy(
    extents: Sequence[int], src_shard: Sequence[int], dst_shard: Sequence[int], bits: int
) -> StridedCopy | None:
    """The copy of a box of `extents` between row-major shards, with as few dims as can be.

    Returns:
        The copy, or `None` where a run or a stride is not a whole number of bytes.

    Example:
        >>> strided_copy((4, 2, 8), (4, 2, 8), (4, 6, 8), 16)
        StridedCopy(run=32, dims=((4, 32, 96),))
    """
    run, src_stride, dst_stride = bits, bits, bits
    dims: list[tuple[int, int, int]] = []
    for extent, src_size, dst_size in zip(reversed(extents), reversed(src_shard), reversed(dst_shard), strict=True):
        if extent > 1:
            if not dims and src_stride == dst_stride == run:
                run *= extent
            elif dims and (src_stride, dst_stride) == (dims[0][0] * dims[0][1], dims[0][0] * dims[0][2]):
                dims[0] = (dims[0][0] * extent, dims[0][1], dims[0][2])
            else:
                dims.insert(0, (extent, src_stride, dst_stride))
        src_stride, dst_stride = src_stride * src_size, dst_stride * dst_size
    if run % 8 or any(src % 8 or dst % 8 for _, src, dst in dims):
        return None
    return StridedCopy(run // 8, tuple((extent, src // 8, dst // 8) for extent, src, dst in dims))


def copy_words(
    moves: Moves, src: Layout, dst: Layout, src_ranks: np.ndarray, dst_ranks: np.ndarray, bits: int
) -> np.ndarray | None:
    """The moves of one leaf as words for the native core, or `None` where bytes cannot express them.

    Each copy is: source rank, destination rank, phase, source offset, destination offset, run, number of dims, then
    extent, source stride and destination stride of each dim, outermost first. Offsets, runs and strides are in bytes.
    In phases after the first, the source is what the source rank has received: it lies as the destination does.
    """
    forwarded = moves.phase > 0
    src_offset = np.zeros(len(moves), np.int64)
    for of, layout, ranks in ((~forwarded, src, src_ranks), (forwarded, dst, dst_ranks)):
        src_offset[of] = _offsets(moves.start[of], layout, ranks, moves.src[of]) * bits
    dst_offset = _offsets(moves.start, dst, dst_ranks, moves.dst) * bits
    if (src_offset % 8).any() or (dst_offset % 8).any():
        return None
    boxes = np.column_stack([moves.stop - moves.start, forwarded])
    kinds, kind_of = np.unique(boxes, axis=0, return_inverse=True)
    copies = [
        strided_copy(extents, dst.shard_shape if forwarded else src.shard_shape, dst.shard_shape, bits)
        for *extents, forwarded in kinds.tolist()
    ]
    words: list[int] = [len(moves)]
    rows = zip(
        moves.src.tolist(), moves.dst.tolist(), moves.phase.tolist(), (src_offset // 8).tolist(),
        (dst_offset // 8).tolist(), kind_of.reshape(-1).tolist(), strict=True,
    )  # fmt: skip
    for src_rank, dst_rank, phase, src_at, dst_at, kind in rows:
        copy = copies[kind]
        if copy is None:
            return None
        words += (src_rank, dst_rank, phase, src_at, dst_at, copy.run, len(copy.dims))
        for dim in copy.dims:
            words += dim
    return np.array(words, np.int64)


def plan_words(
    num_ranks: int,
    src_ranks: np.ndarray,
    dst_ranks: np.ndarray,
    leaf_template: Sequence[int],
    templates: Sequence[np.ndarray],
    chunk_ends: Sequence[int],
) -> np.ndarray:
    """The whole table: what `CopyPlan` in native/copy_plan.h parses.

    Ranks, leaves, templates, chunks; each rank's role (1 sends, 2 receives, 3 both); the leaf at which each chunk ends;
    each leaf's template; each template's copies as `copy_words` gives them.
    """
    roles = np.zeros(num_ranks, np.int64)
    roles[src_ranks] |= _SENDS
    roles[dst_ranks] |= _RECEIVES
    head = np.array([num_ranks, len(leaf_template), len(templates), len(chunk_ends)], np.int64)
    return np.concatenate([head, roles, np.array([*chunk_ends, *leaf_template], np.int64), *templates])


def _offsets(start: np.ndarray, layout: Layout, ranks: np.ndarray, of: np.ndarray) -> np.ndarray:
    """Where each box starts in the shard of rank `of`, in elements."""
    row = np.zeros(int(ranks.max()) + 1, np.int64)
    row[ranks] = np.arange(len(ranks))
    shard = np.array(layout.shard_shape, np.int64)
    local = start - layout.part_of[row[of]] * shard
    strides = np.append(np.cumprod(shard[::-1], dtype=np.int64)[::-1][1:], 1) if len(shard) else shard
    offsets: np.ndarray = local @ strides if len(shard) else np.zeros(len(start), np.int64)
    return offsets
