"""`python -m jreshard bench`: jreshard's transports beside the hardware's ceilings and `jax.device_put`."""

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from jreshard.bench.cases import CASES, SETS
from jreshard.bench.config import MEMORY, SLOWDOWN
from jreshard.bench.course import Display, Wishes
from jreshard.bench.course import run as run_course
from jreshard.bench.report import ONE_PROCESS, OtherHost, Report
from jreshard.bench.session import Refused, Request
from jreshard.cli.errors import UsageError, require_extra
from jreshard.cli.json_file import read_json
from jreshard.doctor.facts import TRANSPORTS

DEFAULT_ROUNDS = 9
DEFAULT_TIMEOUT = 60.0
#: What may stand in `--cases` beside cases.
_BESIDE = {
    SLOWDOWN: "matrix products on the first two GPUs while bytes move",
    MEMORY: "the memory that the cases take beyond source and destination, in processes of their own",
}


class _Stopped(BaseException):
    """A signal asks to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


_MOST_DEVICES = 64  # that a host has


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the `bench` command."""
    parser = subparsers.add_parser(
        "bench",
        help="time transfers between devices beside the hardware's ceilings and jax.device_put",
        description="Move trees of weights between the devices in every way that there is: the copy engine and NCCL by "
        "themselves, jax.device_put, jit, and jreshard's transports, into new memory and into the old. Every element "
        "that arrives is checked first. The ways take turns, and medians are reported. All measuring is done "
        "by processes of its own; one that hangs or dies is replaced, and what it was at is left out. On CPU devices "
        "the cases are smaller. docs/benchmark.md tells more.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, after every case")
    parser.add_argument("--resume", action="store_true", help="measure only what the JSON file does not hold yet")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw a bar chart; default: beside the JSON file")
    parser.add_argument("--cases", type=_words, metavar="A,B,...", help="only these; `--cases list` names them")
    parser.add_argument("--transports", type=_words, default=[], metavar="A,B,...", help="only these, such as p2p,nccl")
    parser.add_argument("--rounds", type=_positive, default=DEFAULT_ROUNDS, help="default: %(default)s")
    parser.add_argument("--scale", type=_scale, help="factor on the bytes of all cases; default: 1, or 1/64 on CPUs")
    parser.add_argument(
        "--devices", type=_two_or_more, metavar="N", help="use the first N; default: all GPUs, or 2 simulated CPUs"
    )
    parser.add_argument(
        "--processes",
        type=_counts,
        default=[1],
        metavar="N,N,...",
        help="measure in one process with all devices (1), and across so many with one device each; default: 1",
    )
    parser.add_argument("--isolate", action="store_true", help="let each of several processes see its own GPU only")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=DEFAULT_TIMEOUT,
        metavar="SECONDS",
        help="for one transfer; a process that is silent for twice as long is given up; default: %(default)s",
    )
    parser.add_argument(
        "--seconds", type=_seconds, help="end after so many, with the most important cases done; default: no limit"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the `bench` command; return 0 if all transports that there are worked, and 1 if one failed."""
    require_extra("demo", "tqdm")
    plot = args.plot or (args.json and args.json.name and args.json.with_suffix(".png")) or None
    if plot:
        require_extra("demo", "matplotlib")
    for path in filter(None, (args.json, plot)):
        if not path.absolute().parent.is_dir():
            raise UsageError(f"{path}: no such directory: {path.parent}")
        if path.is_dir():
            raise UsageError(f"{path} is a directory; expected a file")
    if args.cases == ["list"]:
        _list_cases()
        return 0
    wishes, report = _wishes(args), Report(args.json, _earlier(args))
    status = 0
    try:
        with _signals_raise():
            faults = run_course(wishes, report, _display)
    except (Refused, OtherHost) as error:
        raise UsageError(str(error)) from error
    except _Stopped as stopped:
        faults, status = [f"ended by {stopped}; what was measured by then is kept"], 128 + stopped.number
    if plot and report.data["host"]:
        from jreshard.bench.plot import save_plot

        host = report.data["host"]
        save_plot(report.parts(), report.ceilings(ONE_PROCESS), f"{host['devices']}, {host['link'] or 'no link'}", plot)
    for fault in faults:
        print(f"bench failed: {fault}", file=sys.stderr)
    return status or int(bool(faults))


def _list_cases() -> None:
    for count, names in SETS.items():
        print(f"of {count} devices:")
        for name in names:
            print(f"  {name:32}{CASES[name].title(CASES[name].shapes())}")
    for name, what in _BESIDE.items():
        print(f"{name:34}{what}")


def _wishes(args: argparse.Namespace) -> Wishes:
    for name, known in (("cases", [*CASES, *_BESIDE]), ("transports", TRANSPORTS)):
        if unknown := [word for word in getattr(args, name) or [] if word not in known]:
            raise UsageError(f"--{name}: no {', '.join(unknown)}; there are {', '.join(known)}")
    request = Request(
        None,
        transports=args.transports,
        rounds=args.rounds,
        scale=args.scale,
        timeout=args.timeout,
        devices=args.devices,
        isolated=args.isolate,
    )
    return Wishes(args.cases, request, args.processes, args.seconds)


def _earlier(args: argparse.Namespace) -> dict[str, Any] | None:
    """The results to go on from, if any."""
    if not args.resume:
        return None
    if not args.json:
        raise UsageError("--resume: needs --json, the file to go on from")
    if not args.json.exists():
        return None
    found = read_json(args.json, str(args.json))
    if not isinstance(found, dict) or not isinstance(found.get("runs"), list):
        raise UsageError(f"{args.json}: expected the results of this command; remove --resume to write over it")
    return found


@contextmanager
def _signals_raise() -> Iterator[None]:
    """What ends the command politely ends the measuring processes as well, and leaves the results whole."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # one is enough
        raise _Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _display(title: str) -> Iterator[Display]:
    from tqdm import tqdm

    class Bar:
        def progress(self, done: int, total: int, what: str) -> None:
            bar.total = total
            bar.set_postfix_str(what, refresh=False)
            bar.update(done - bar.n)

        def show(self, text: str) -> None:
            with bar.external_write_mode():
                print(text, flush=True)

    print(f"--- {title}", flush=True)
    with tqdm(desc=title, total=1, disable=None) as bar:
        yield Bar()


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def _two_or_more(text: str) -> int:
    if not 2 <= (number := int(text)) <= _MOST_DEVICES:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 2 to {_MOST_DEVICES}")
    return number


def _counts(text: str) -> list[int]:
    counts = list(dict.fromkeys(map(_positive, text.split(","))))
    if max(counts) > _MOST_DEVICES:
        raise argparse.ArgumentTypeError(f"{max(counts)} are too many processes for one host; at most {_MOST_DEVICES}")
    return counts


def _scale(text: str) -> float:
    if not 0 < (number := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return number


def _seconds(text: str) -> float:
    if not 0 < (number := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return number
