"""What the commands raise when a request cannot be carried out."""

import importlib.util


class UsageError(Exception):
    """A request that cannot be carried out; the command line prints it in one line and exits with status 2."""


def require_extra(extra: str, *modules: str) -> None:
    """Raise `UsageError` unless every one of `modules`, which the optional `extra` brings, is installed."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        how = f'pip install "jreshard[{extra}]", or ".[{extra}]" in a clone'
        raise UsageError(f"this command needs {' and '.join(missing)}; run: {how}")
