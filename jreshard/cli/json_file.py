"""JSON files that the user names."""

import json
from pathlib import Path
from typing import Any

from jreshard.cli.errors import UsageError


def read_json(path: Path, what: str, *, hint: str = "", **options: Any) -> Any:
    """What a JSON file holds.

    Args:
        path: the file.
        what: how errors call it.
        hint: what an error adds where there is no such file.
        options: as `json.loads` takes them.

    Raises:
        UsageError: it cannot be read, or is not JSON.
    """
    try:
        return json.loads(path.read_text(), **options)
    except FileNotFoundError:
        raise UsageError(f"{what}: no such file{hint}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{what}: {error}") from error
    except RecursionError as error:
        raise UsageError(f"{what}: the JSON is nested too deeply") from error
