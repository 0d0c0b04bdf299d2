"""The boxes that source and destination shards share."""

import numpy as np

from jreshard._layout import Layout


def _dim_overlaps(size: int, src_parts: int, dst_parts: int) -> np.ndarray:
    """`int64[overlaps, 4]` along one dim: source part, destination part, start, stop; in order of start."""
    if size == 0:
        return np.zeros((0, 4), np.int64)
    src_step, dst_step = size // src_parts, size // dst_parts
    cuts = np.union1d(np.arange(0, size + 1, src_step), np.arange(0, size + 1, dst_step))
    start, stop = cuts[:-1], cuts[1:]
    return np.stack([start // src_step, start // dst_step, start, stop], axis=1)


def overlaps(src: Layout, dst: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Every pair of a source box and a destination box that share elements, and the box that they share.

    The boxes are products of intervals, so the overlaps are the product of the overlaps along each dim.
    """
    dims = [_dim_overlaps(*args) for args in zip(src.shape, src.parts, dst.parts, strict=True)]
    counts = [len(dim) for dim in dims]
    pick = np.indices(counts).reshape(len(dims), -1) if dims else np.zeros((0, 1), np.int64)
    total = pick.shape[1]
    src_box, dst_box = np.zeros(total, np.int64), np.zeros(total, np.int64)
    start, stop = np.zeros((total, len(dims)), np.int64), np.zeros((total, len(dims)), np.int64)
    for d, dim in enumerate(dims):
        rows = dim[pick[d]]
        src_box = src_box * src.parts[d] + rows[:, 0]
        dst_box = dst_box * dst.parts[d] + rows[:, 1]
        start[:, d], stop[:, d] = rows[:, 2], rows[:, 3]
    return src_box, dst_box, start, stop
