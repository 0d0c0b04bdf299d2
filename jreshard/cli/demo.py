"""`python -m jreshard demo`: a reinforcement-learning loop on simulated devices, refitted at every step."""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from jreshard.cli.errors import UsageError, require_extra
from jreshard.cli.meshes import disjoint_meshes

# The loop needs Flax and optax, which the command line does not: it is imported only once they are known to be there.
if TYPE_CHECKING:
    from jreshard.demo.loop import Loop, Step

DEFAULT_STEPS = 120


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the `demo` command."""
    parser = subparsers.add_parser(
        "demo",
        help="train a small policy by reinforcement learning, refitting its rollout copy at every step",
        description="Teach a small transformer to sort digits by policy gradient, on simulated CPU devices: a trainer "
        "mesh (fsdp x tp) improves it, a rollout mesh (tp) answers with the weights it was last sent. Succeeds if the "
        "reward ends well above its start and the weights on both meshes are the same in every bit.",
    )
    parser.add_argument("--steps", type=_positive, default=DEFAULT_STEPS, help="default: %(default)s")
    parser.add_argument("--seed", type=_seed, default=0, help="default: %(default)s")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw reward and refit time by step")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the `demo` command; return 0 if the loop learned and its weights agree, and 1 if not."""
    require_extra("demo", "flax", "optax", "tqdm", *(["matplotlib"] if args.plot else []))
    if args.plot and not args.plot.absolute().parent.is_dir():
        raise UsageError(f"--plot {args.plot}: no such directory: {args.plot.parent}")
    from jreshard.demo import layout
    from jreshard.demo.loop import Loop

    jax.config.update("jax_platforms", "cpu")
    trainer_mesh, rollout_mesh = disjoint_meshes(layout.TRAINER_AXES, layout.ROLLOUT_AXES)
    loop = Loop(trainer_mesh, rollout_mesh, args.seed)
    steps = _run_steps(loop, args.steps)
    if args.plot:
        from jreshard.demo.plot import save_plot

        save_plot(steps, loop.plan.bytes_moved / 1e6, args.plot)
    return _conclude(loop, steps)


def _run_steps(loop: "Loop", count: int) -> "list[Step]":
    from tqdm import tqdm

    steps = []
    with tqdm(range(count), desc="demo", unit="step") as bar:
        for _ in bar:
            steps.append(step := loop.step())
            bar.set_postfix_str(
                f"reward {step.reward:.2f}, refit {1e3 * step.refit_seconds:.1f} ms, "
                f"{loop.plan.bytes_moved / 1e6:.2f} MB",
                refresh=False,  # the bar redraws itself when it moves on
            )
    return steps


def _conclude(loop: "Loop", steps: "Sequence[Step]") -> int:
    from jreshard.demo import outcome

    rewards = [step.reward for step in steps]
    start, end = outcome.start_and_end(rewards)
    identical = outcome.identical(loop.trainer.params, loop.rollout.params)
    print(f"reward    {start:.2f} -> {end:.2f}")
    print(f"refits    {len(steps)}, median {1e3 * statistics.median(step.refit_seconds for step in steps):.1f} ms")
    print(f"bytes     {loop.plan.bytes_moved:,} between devices in each refit")
    print(f"weights   {'identical in every bit' if identical else 'DIFFERENT'} on trainer and rollout mesh")
    failures = outcome.failures(rewards, identical)
    for failure in failures:
        print(f"demo failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def _seed(text: str) -> int:
    if not 0 <= (number := int(text)) < 1 << 32:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to 2**32 - 1")
    return number
