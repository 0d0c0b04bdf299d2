"""`python -m jreshard try`: move a safetensors checkpoint between two meshes, check it, time it."""

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jreshard import Plan, plan, transfer
from jreshard.cli.checkpoint import open_checkpoint, with_progress
from jreshard.cli.compare import differences
from jreshard.cli.errors import require_extra
from jreshard.cli.mesh_spec import format_mesh_spec, parse_mesh_spec
from jreshard.cli.meshes import disjoint_meshes
from jreshard.cli.placement import partition_spec
from jreshard.cli.timing import median_seconds, timed

REPEATS = 9
#: A broken move is wrong almost everywhere; this many places tell the story.
MAX_REPORTED = 10
LABEL_WIDTH = 22

Tensors = dict[str, np.ndarray]
Arrays = dict[str, jax.Array]
Shardings = dict[str, NamedSharding]
Move = Callable[[], Arrays]


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the `try` command."""
    parser = subparsers.add_parser(
        "try",
        help="move a safetensors checkpoint, compare every byte, time it beside jax.device_put",
        description="Load a safetensors checkpoint onto a source mesh, move it to a destination mesh of other devices, "
        "compare every byte there with the file, and time the move beside the same one by jax.device_put. CPU devices "
        "are simulated where there are too few accelerators.",
    )
    parser.add_argument("file", type=Path, metavar="FILE.safetensors", help="the checkpoint")
    parser.add_argument("--src", required=True, metavar="MESH", help="shape of the source mesh, such as fsdp=4,tp=2")
    parser.add_argument("--dst", required=True, metavar="MESH", help="shape of the destination mesh, such as tp=4")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the `try` command; return 0 if the bytes on the destination are the file's, and 1 if not."""
    require_extra("demo", "safetensors", "tqdm")
    src_axes, dst_axes = parse_mesh_spec(args.src), parse_mesh_spec(args.dst)
    tensors = open_checkpoint(args.file)
    src_mesh, dst_mesh = disjoint_meshes(src_axes, dst_axes)
    # JAX would cut 64-bit tensors down to 32 bits. The others it leaves alone either way.
    jax.config.update("jax_enable_x64", True)
    src, dst = _shardings(tensors, src_mesh), _shardings(tensors, dst_mesh)
    _print_task(args.file, tensors, src_mesh, dst_mesh)

    params = _load(tensors, src)
    move = partial(transfer, params, src, dst)
    moved, first_call = timed(move)
    # Compare the first result: the memory of a later one may hold the right bytes since the one before.
    wrong = list(differences(moved, tensors, dst))
    del moved
    if wrong:
        _print_differences(wrong)
        return 1
    _print_fact("check", "every byte on the destination equals the file")

    planned = plan(params, src, dst)
    _print_plan(planned)
    _print_times(planned.nbytes, move, first_call, partial(jax.device_put, params, dst))
    return 0


def _shardings(tensors: Tensors, mesh: Mesh) -> Shardings:
    return {name: NamedSharding(mesh, partition_spec(tensor.shape, mesh.shape)) for name, tensor in tensors.items()}


def _load(tensors: Tensors, shardings: Shardings) -> Arrays:
    arrays = {name: jax.device_put(tensor, shardings[name]) for name, tensor in with_progress(tensors, "loading")}
    jax.block_until_ready(arrays)
    return arrays


def _print_task(path: Path, tensors: Tensors, src: Mesh, dst: Mesh) -> None:
    dtypes = Counter(str(tensor.dtype) for tensor in tensors.values())
    _print_fact("checkpoint", str(path))
    _print_fact("tensors", f"{len(tensors)} ({', '.join(f'{count} {name}' for name, count in dtypes.most_common())})")
    _print_fact("source", _describe(src))
    _print_fact("destination", _describe(dst))
    _print_fact("bytes in the file", f"{sum(tensor.nbytes for tensor in tensors.values()):,}")


def _print_plan(move: Plan) -> None:
    _print_fact("bytes on destination", f"{move.nbytes:,}")
    _print_fact("moved bytes", f"{move.bytes_moved:,}")
    _print_fact("lower bound", f"{move.lower_bound:,}")


def _print_fact(label: str, value: str) -> None:
    print(f"{label:<{LABEL_WIDTH}}{value}", flush=True)


def _describe(mesh: Mesh) -> str:
    first, last = mesh.devices.flat[0], mesh.devices.flat[-1]
    return f"{format_mesh_spec(mesh.shape)} on {first}" + (f" to {last}" if mesh.size > 1 else "")


def _print_differences(wrong: list[str]) -> None:
    for line in wrong[:MAX_REPORTED]:
        print(f"differs from the file: {line}", file=sys.stderr)
    if len(wrong) > MAX_REPORTED:
        print(f"... and {len(wrong) - MAX_REPORTED} more", file=sys.stderr)


def _print_times(nbytes: int, move: Move, first_call: float, device_put: Move) -> None:
    """Time the move and the same move by `jax.device_put`, and print both."""
    moves, first_calls = {"jreshard": move}, {"jreshard": first_call}
    try:
        _, first_calls["jax.device_put"] = timed(device_put)
        moves["jax.device_put"] = device_put
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        _print_fact("jax.device_put", f"fails: {reason}")
    medians = median_seconds(moves, REPEATS)
    _print_row("", list(moves))
    _print_row("first call", [f"{first_calls[name] * 1e3:.1f} ms" for name in moves])
    _print_row(f"median of {REPEATS}", [f"{medians[name] * 1e3:.1f} ms" for name in moves])
    _print_row("rate", [f"{nbytes / medians[name] / 1e9:.2f} GB/s" for name in moves])
    _print_row("relative time", [f"{medians[name] / medians['jreshard']:.2f}" for name in moves])


def _print_row(label: str, cells: list[str]) -> None:
    _print_fact(label, "".join(f"{cell:>16}" for cell in cells))
