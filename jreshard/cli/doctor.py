"""`python -m jreshard doctor`: what this machine can move weights with, and why not with more."""

import argparse
import subprocess
import sys

#: A driver in a bad state makes JAX's start hang; a good one needs seconds.
MAX_SECONDS = 120


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the `doctor` command."""
    parser = subparsers.add_parser(
        "doctor",
        help="say which transports work between which devices, and why not where not",
        description="Look at the versions of JAX, the CUDA driver and NCCL, at the devices and how they are linked, "
        "and say which transports work between them. Takes no device memory. Exit status: 0 if some transport works "
        "between every two devices, 1 if something is wrong.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the `doctor` command; return 0 if all is well, and 1 if not."""
    # In a process of its own, since what is examined may hang or crash.
    command = [sys.executable, "-m", "jreshard.doctor", *(["--json"] if args.json else [])]
    sys.stdout.flush()
    try:
        status = subprocess.run(command, timeout=MAX_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"doctor: starting JAX and asking the driver has not ended after {MAX_SECONDS} s", file=sys.stderr)
        return 1
    if status < 0:
        print(f"doctor: starting JAX or asking the driver died of signal {-status}", file=sys.stderr)
    return 0 if status == 0 else 1
