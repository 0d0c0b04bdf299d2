"""`python -m jreshard plan`: what a move between two clusters would take, worked out on paper."""

import argparse
import difflib
import importlib
import importlib.util
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jreshard import Plan, Topology, models, plan
from jreshard.cli.errors import UsageError, require_extra
from jreshard.cli.mesh_spec import format_mesh_spec, parse_mesh_spec
from jreshard.cli.paper_meshes import paper_meshes
from jreshard.cli.placement import partition_spec
from jreshard.cli.plan_table import fact, table
from jreshard.cli.rules_spec import check_mesh_axes, read_rules
from jreshard.cli.shapes_file import MOST_BYTES, Shapes, read_shapes
from jreshard.models import Rule
from jreshard.models._rules import as_tuple, near

_STEPS = 3
#: Seconds from one look at the clock to the next.
_TICK = 0.5
_LEAVES_SHOWN = 5
_PICTURES = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class Side:
    """The source or the destination.

    Attributes:
        option: what it is called on the command line.
        mesh: its devices.
        rules: how logical axes are split there.
    """

    option: str
    mesh: Mesh
    rules: Sequence[Rule]

    @property
    def stage_axis(self) -> str | None:
        """The mesh axis along which the devices are pipeline stages, if there is one."""
        [axes] = models.mesh_axes_of(("layers",), self.rules, self.mesh.axis_names)
        if len(axes) > 1:
            raise UsageError(f"{self.option}: layers are split along {' and '.join(axes)}; expected one mesh axis")
        return axes[0] if axes else None

    @property
    def stages(self) -> int:
        """The number of pipeline stages."""
        return self.mesh.shape[self.stage_axis] if self.stage_axis else 1


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the `plan` command."""
    parser = subparsers.add_parser(
        "plan",
        help="work out on paper what a move between two clusters would take",
        description="Plan the move of a model from one mesh to another of devices that nobody needs to have, and print "
        "what it would take: bytes on each kind of link, the busiest link against the lower bound, and the time that a "
        "model of the links predicts, beside the usual ways.",
        epilog="Meshes are AXIS=SIZE[,AXIS=SIZE...], the last axis varying fastest over the devices. Without --rules, "
        "fsdp splits weights along the model's width, tp by heads and along feed-forward widths and the vocabulary, "
        "ep by experts, and pp gives each pipeline stage its layers, as evenly as can be; the ranks along dp hold "
        "copies. Key-value heads that are fewer than the ranks of tp are shared by several ranks.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", metavar="NAME", help=f"one of {', '.join(models.names())}")
    what.add_argument(
        "--shapes",
        type=Path,
        metavar="FILE",
        help="a model of your own: a .safetensors file, of which only the header is read, or .json such as "
        '{"w": {"shape": [64, 32], "dtype": "bfloat16", "axes": ["embed", null]}}. dtype and axes may be left out; '
        "arrays without axes are split as `try` does it, and copied along dp",
    )
    parser.add_argument("--src", required=True, metavar="MESH", help="source mesh, such as pp=8,ep=16")
    parser.add_argument("--dst", required=True, metavar="MESH", help="destination mesh, such as dp=16,tp=8")
    parser.add_argument(
        "--topology",
        default="h100-8",
        choices=Topology.presets(),
        help="which devices share fast links, and what the links carry; default: %(default)s",
    )
    parser.add_argument(
        "--colocated",
        action="store_true",
        help="the destination has the source's devices, all of them, not others of its own",
    )
    parser.add_argument(
        "--unstacked", action="store_true", help="one array for each layer and expert of a --model, not stacked ones"
    )
    parser.add_argument(
        "--strict", action="store_true", help="refuse pipeline stages that do not all get the same number of layers"
    )
    parser.add_argument(
        "--rules",
        metavar="RULES",
        help="in front of the default rules: LOGICAL=MESH[+MESH...],... such as embed=fsdp,mlp=tp+ep,norm=none, or a "
        'JSON file such as [["embed", "fsdp"], ["mlp", ["tp", "ep"]], ["norm", null]]',
    )
    parser.add_argument("--src-rules", metavar="RULES", help="the same for the source only, in place of --rules")
    parser.add_argument("--dst-rules", metavar="RULES", help="the same for the destination only, in place of --rules")
    parser.add_argument("--explain", metavar="LEAF", help="tell where the parts of one array come from, and why")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan's figures")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the bytes from rank to rank and the loads: .png, .pdf or .svg"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the `plan` command; return 0."""
    _check_outputs(args)
    topology = Topology.preset(args.topology)
    src_axes, dst_axes = parse_mesh_spec(args.src), parse_mesh_spec(args.dst)
    src_mesh, dst_mesh, topology = paper_meshes(src_axes, dst_axes, topology, colocated=args.colocated)
    src = Side("--src", src_mesh, read_rules(args.src_rules or args.rules))
    dst = Side("--dst", dst_mesh, read_rules(args.dst_rules or args.rules))
    check_mesh_axes([*src.rules, *dst.rules], src_axes.keys() | dst_axes.keys())
    with _Progress() as progress:
        structs, *shardings = progress.step("shapes", lambda: _layouts(args, src, dst))
        made = progress.step("plan", lambda: plan(structs, *shardings, topology=topology))
        leaf = _find_leaf(made, args.explain) if args.explain else None
        lines = progress.step("figures", lambda: [*_task(args, src, dst), *table(made)])
    print("\n".join(lines))
    if leaf is not None:
        print(f"\n{made.explain(leaf)}")
    if args.json:
        _write("--json", args.json, lambda path: path.write_text(made.to_json(indent=2) + "\n"))
    if args.plot:
        _write("--plot", args.plot, made.plot().savefig)
    return 0


def _check_outputs(args: argparse.Namespace) -> None:
    """Refuse what could not be written, before the work is done."""
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path:
            _check_writable(option, path)
    if args.plot:
        _check_picture(args.plot)
    if args.shapes and (args.unstacked or args.strict):
        raise UsageError("--unstacked and --strict are for a --model; the arrays of --shapes are taken as they are")


def _check_writable(option: str, path: Path) -> None:
    """Refuse a path that is seen to be of no use; a full disk shows only when it is written to."""
    if os.path.isdir(path):
        raise UsageError(f"{option} {path}: is a directory; expected a file")
    if not os.path.isdir(path.absolute().parent):
        raise UsageError(f"{option} {path}: no such directory: {path.parent}")
    if not os.access(path if os.path.exists(path) else path.absolute().parent, os.W_OK):
        raise UsageError(f"{option} {path}: no permission to write it")


def _check_picture(path: Path) -> None:
    if path.suffix.lower() not in _PICTURES:
        raise UsageError(f"--plot {path}: expected a file that ends in {', '.join(_PICTURES)}")
    require_extra("demo", "matplotlib")
    # whatever a broken installation raises: it is told here, before the work is done
    try:
        importlib.import_module("matplotlib.figure")
    except Exception as error:
        raise UsageError(f"--plot: matplotlib is installed, and cannot be imported: {error}") from error


def _write(option: str, path: Path, write: Callable[[Path], object]) -> None:
    try:
        write(path)
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror or error}") from error


def _layouts(args: argparse.Namespace, src: Side, dst: Side) -> tuple[Any, Any, Any]:
    """The tree of arrays, and the trees of their shardings on the two sides."""
    if args.shapes:
        shapes = read_shapes(args.shapes)
        if not shapes.weights and (args.rules or args.src_rules or args.dst_rules):
            raise UsageError(f"{args.shapes}: no array has logical axes, which rules are for")
        _check_shapes(args.shapes, shapes, src, dst)
        layouts = shapes.structs, _shardings_of_shapes(shapes, src), _shardings_of_shapes(shapes, dst)
        _check_bytes(args.shapes, *layouts)
    else:
        layouts = _model_layouts(args, src, dst)
    for side, shardings in zip((src, dst), layouts[1:], strict=True):
        _note_copies(side, shardings)
    return layouts


def _model_layouts(args: argparse.Namespace, src: Side, dst: Side) -> tuple[Any, Any, Any]:
    try:
        depth = models.num_layers(args.model)
        weights = models.weights(args.model, stacked=not args.unstacked, stages={src.stages, dst.stages})
    except ValueError as error:
        raise UsageError(str(error)) from error
    for side in (src, dst):
        if depth % side.stages:
            _note_uneven(side, depth, strict=args.strict)
    return models.shapes(weights), _shardings(weights, src), _shardings(weights, dst)


def _shardings(weights: Any, side: Side, *, stages: bool = True) -> Any:
    try:
        return models.shardings(weights, side.mesh, side.rules, stage_axis=side.stage_axis if stages else None)
    except ValueError as error:
        raise UsageError(f"{side.option}: {error}") from error


def _note_uneven(side: Side, depth: int, *, strict: bool) -> None:
    sizes = models.stage_sizes(depth, side.stages)
    named = f"{side.option}: {depth} layers do not divide among {side.stage_axis}={side.stages}"
    if strict:
        even = ", ".join(str(n) for n in range(1, depth + 1) if depth % n == 0)
        raise UsageError(f"{named}; {side.stage_axis} of {even} would, and so would any without --strict")
    print(f"note: {named}: the stages get {', '.join(map(str, sizes))}", file=sys.stderr)


def _note_copies(side: Side, shardings: Any) -> None:
    """Tell of mesh axes that split nothing, such as one for experts where a model has none."""
    distinct = {id(sharding): sharding for sharding in jax.tree.leaves(shardings)}.values()
    split = {axis for sharding in distinct for entry in sharding.spec for axis in as_tuple(entry)}
    # an array that lies on a part of the mesh, as a single expert's does, has a mesh without the axis
    split.update(axis for sharding in distinct for axis in side.mesh.axis_names if axis not in sharding.mesh.axis_names)
    for axis, size in side.mesh.shape.items():
        if size > 1 and axis not in split | models.REPLICA_AXES:
            print(f"note: {side.option}: no array is split along {axis}={size}; its ranks hold copies", file=sys.stderr)


def _check_shapes(path: Path, shapes: Shapes, *sides: Side) -> None:
    """Refuse logical axes that no rule names, and pipeline stages that arrays are not stacked for."""
    named = {logical for side in sides for logical, _ in side.rules}
    used = {axis: name for name, weight in shapes.weights.items() for axis in weight.axes if axis is not None}
    for axis, name in used.items():
        if axis not in named:
            there = ", ".join(sorted(named))
            raise UsageError(
                f"{path}: {name}: no rule names the axis {axis!r}{near(axis, named)}; the rules name {there}"
            )
    for side in sides:
        if side.stage_axis and shapes.weights:
            _check_layers(path, shapes, side, f"{side.stage_axis}={side.stages}")


def _check_layers(path: Path, shapes: Shapes, side: Side, stages: str) -> None:
    stacked = {name: weight for name, weight in shapes.weights.items() if "layers" in weight.axes}
    if not stacked:
        raise UsageError(
            f"{side.option}: {stages} is for layers, and no array of {path} has the axis 'layers'; "
            "expected one that has, or rules that use it otherwise, with layers=none"
        )
    for name, weight in stacked.items():
        dim = weight.axes.index("layers")
        axes = models.mesh_axes_of(weight.axes, side.rules, side.mesh.axis_names)[dim]
        if axes and weight.shape[dim] % side.stages:
            raise UsageError(f"{side.option}: {name}: {weight.shape[dim]} layers do not divide among {stages}")


def _check_bytes(path: Path, structs: dict[str, Any], *sides: dict[str, NamedSharding]) -> None:
    held = sum(
        math.prod(shardings[name].shard_shape(struct.shape)) * struct.dtype.itemsize * shardings[name].mesh.size
        for shardings in sides
        for name, struct in structs.items()
    )
    if held > MOST_BYTES:
        raise UsageError(f"{path}: the devices would hold {held:,} bytes; expected at most {MOST_BYTES:,}")


def _shardings_of_shapes(shapes: Shapes, side: Side) -> dict[str, NamedSharding]:
    """By the rules where logical axes are known; else from the shape alone, with copies along the replica axes."""
    split = {axis: size for axis, size in side.mesh.shape.items() if axis not in models.REPLICA_AXES}
    by_rules = _shardings(shapes.weights, side, stages=False) if shapes.weights else {}
    return {
        name: by_rules.get(name) or NamedSharding(side.mesh, partition_spec(struct.shape, split))
        for name, struct in shapes.structs.items()
    }


def _find_leaf(made: Plan, wanted: str) -> str:
    """The path of the leaf that `wanted` names, as `keystr` or with dots: `layers.3.mlp.up`."""
    paths = {target.path: target.path for target in made.targets}
    dotted = {path.translate(_DOTTED).strip("."): path for path in paths}
    known = {**dotted, **paths}
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, dotted, n=3) or list(dotted)[:_LEAVES_SHOWN]
    raise UsageError(f"--explain: there is no leaf {wanted!r} among {len(paths)}; there are {', '.join(near)}, ...")


_DOTTED = str.maketrans({"[": ".", "]": None, "'": None, '"': None})


def _task(args: argparse.Namespace, src: Side, dst: Side) -> Iterator[str]:
    if args.model:
        form = "one array a weight" if args.unstacked else "layers and experts stacked"
        yield fact("model", f"{args.model}, {models.num_params(args.model):,} parameters in bfloat16, {form}")
    else:
        yield fact("shapes", str(args.shapes))
    for label, side in (("source mesh", src), ("destination mesh", dst)):
        yield fact(label, f"{format_mesh_spec(side.mesh.shape)}, {side.mesh.size:,} devices")
    yield fact("topology", args.topology)


class _Progress:
    """The step that is at work, of how many, and the time so far; on a terminal, if tqdm is installed."""

    def __enter__(self) -> "_Progress":
        self._bar: Any = None
        self._done = threading.Event()
        if importlib.util.find_spec("tqdm") is not None:
            from tqdm import tqdm

            form = "{desc} ({n_fmt} of {total_fmt} done, {elapsed})"
            self._bar = tqdm(total=_STEPS, desc="plan", bar_format=form, leave=False, disable=None)
            threading.Thread(target=self._tick, daemon=True).start()
        return self

    def step(self, name: str, work: Callable[[], Any]) -> Any:
        """Return the result of `work`."""
        if self._bar is None:
            return work()
        self._bar.set_description_str(name)
        result = work()
        self._bar.update()
        return result

    def _tick(self) -> None:
        """A step may take long and has no parts to count: let the clock show that it is at work."""
        while not self._done.wait(_TICK):
            self._bar.refresh()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._bar is not None:
            self._bar.close()
