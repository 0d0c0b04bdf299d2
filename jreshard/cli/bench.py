"""`python -m jreshard bench`: jreshard's transports beside the hardware's ceilings and `jax.device_put`."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jreshard.bench.cases import CASES
from jreshard.bench.config import CEILINGS, SLOWDOWN
from jreshard.bench.results import conclude, faults
from jreshard.bench.session import Outcome, Refused, Request, measure
from jreshard.bench.table import as_text
from jreshard.cli.errors import UsageError, require_extra
from jreshard.doctor.facts import TRANSPORTS

DEFAULT_ROUNDS = 9
DEFAULT_TIMEOUT = 60.0


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the `bench` command."""
    parser = subparsers.add_parser(
        "bench",
        help="time transfers between two devices beside the hardware's ceilings and jax.device_put",
        description="Move trees of weights between the first two devices in every way that there is: the copy engine "
        "and NCCL by themselves, jax.device_put, and jreshard's transports, into new memory and into the old. Every "
        "element that arrives is checked first. The ways take turns, and medians are reported. All measuring is done "
        "by processes of its own; one that hangs or dies is replaced, and what it was at is left out. On CPU devices "
        "the cases are smaller.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw a bar chart; default: beside the JSON file")
    parser.add_argument("--cases", type=_words, metavar="A,B,...", help="only these; `--cases list` names them")
    parser.add_argument("--transports", type=_words, default=[], metavar="A,B,...", help="only these, such as p2p,nccl")
    parser.add_argument("--rounds", type=_positive, default=DEFAULT_ROUNDS, help="default: %(default)s")
    parser.add_argument("--scale", type=_scale, help="factor on the bytes of all cases; default: 1, or 1/64 on CPUs")
    parser.add_argument("--processes", type=int, choices=(1, 2), default=1, help="2: measure also across two processes")
    parser.add_argument("--isolate", action="store_true", help="with two processes, let each see its own GPU only")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=DEFAULT_TIMEOUT,
        metavar="SECONDS",
        help="for one transfer; a process that is silent for twice as long is given up; default: %(default)s",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the `bench` command; return 0 if all transports that there are worked, and 1 if one failed."""
    require_extra("demo", "tqdm")
    plot = args.plot or (args.json and args.json.with_suffix(".png"))
    if plot:
        require_extra("demo", "matplotlib")
    for path in filter(None, (args.json, plot)):
        if not path.absolute().parent.is_dir():
            raise UsageError(f"{path}: no such directory: {path.parent}")
    if args.cases == ["list"]:
        for name, case in CASES.items():
            print(f"{name:28}{case.title(case.shapes())}")
        print(f"{SLOWDOWN:28}matrix products on both GPUs while bytes move")
        return 0
    runs, report = _measure(args, _request(args))
    if plot and report["host"]:
        from jreshard.bench.plot import save_plot

        save_plot(runs, f"{report['host']['devices']}, {report['host']['link'] or 'no link'}", plot)
    wrong = [fault for figures in runs.values() for fault in faults(figures)]
    for fault in wrong:
        print(f"bench failed: {fault}", file=sys.stderr)
    return 1 if wrong else 0


def _request(args: argparse.Namespace) -> Request:
    choices = [*CASES, SLOWDOWN]
    for name, known in (("cases", choices), ("transports", TRANSPORTS)):
        if unknown := [word for word in getattr(args, name) or [] if word not in known]:
            raise UsageError(f"--{name}: no {', '.join(unknown)}; there are {', '.join(known)}")
    units = [CEILINGS, *(name for name in choices if not args.cases or name in args.cases)]
    return Request(units, args.transports, args.rounds, args.scale, args.timeout)


def _measure(args: argparse.Namespace, request: Request) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures of each run, and the whole report, which is printed and written as it grows."""
    report: dict[str, Any] = {}

    def alone(outcome: Outcome) -> dict[str, Any]:
        figures = conclude(outcome)
        report.update(host=outcome.host, versions=outcome.versions, **figures)
        _write(args.json, report)
        return figures

    def across(outcome: Outcome) -> dict[str, Any]:
        figures = conclude(outcome, runs["one process"])
        report["two_processes"] = {"isolated": args.isolate, **figures}
        _write(args.json, report)
        return figures

    runs = {"one process": _run(request, "one process", alone)}
    if args.processes > 1:
        units = [unit for unit in request.units if unit != SLOWDOWN]
        request = replace(request, units=units, processes=args.processes, isolated=args.isolate)
        runs["two processes"] = _run(request, "two processes", across)
    return runs, report


def _run(request: Request, title: str, report: Callable[[Outcome], dict[str, Any]]) -> dict[str, Any]:
    """The figures of one run, as `report` makes them of what has been measured so far."""
    from tqdm import tqdm

    print(f"--- {title}", flush=True)
    with tqdm(desc=title, unit="turn", total=1, disable=None) as bar:

        def progress(done: int, total: int, what: str) -> None:
            bar.total = max(done, total)
            bar.set_postfix_str(what, refresh=False)
            bar.update(done - bar.n)

        def watch(outcome: Outcome, unit: str) -> None:
            if text := as_text(report(outcome), unit):
                with bar.external_write_mode():
                    print(text, flush=True)

        try:
            return report(measure(request, progress, watch))
        except Refused as error:
            raise UsageError(str(error)) from error


def _write(path: Path | None, report: Mapping[str, Any]) -> None:
    if path:
        path.write_text(json.dumps(report, indent=1) + "\n")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def _scale(text: str) -> float:
    if not 0 < (number := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return number


def _seconds(text: str) -> float:
    if not 0 < (number := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return number
