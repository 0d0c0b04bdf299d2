"""The command line, `python -m jreshard`.

Every subcommand is a module of this package with two functions: `add_parser(subparsers)`, which declares its arguments
and sets `func`, and `run(args)`, which returns the exit status.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from jreshard import __version__
from jreshard.cli.errors import UsageError

#: The modules with a subcommand each, in the order in which `--help` lists them.
SUBCOMMANDS = ("demo", "try_checkpoint", "plan", "doctor", "bench")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `python -m jreshard` with every subcommand."""
    parser = argparse.ArgumentParser(
        prog="python -m jreshard",
        description="Move JAX weights from one mesh and sharding to another.",
        epilog="Exit status: 0 for success, 1 for a failed check, 2 for a request that cannot be carried out.",
    )
    parser.add_argument("--version", action="version", version=f"jreshard {__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for module in SUBCOMMANDS:
        importlib.import_module(f"{__name__}.{module}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line on `argv` (`sys.argv[1:]` by default) and return the exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        status: int = args.func(args)
    except UsageError as error:
        print(f"{parser.prog} {args.command}: error: {error}", file=sys.stderr)
        return 2
    return status
