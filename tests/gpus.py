"""How many GPUs there are, asked without JAX: the processes of a test are to have them for themselves."""

import shutil
import subprocess
from functools import cache

import pytest


@cache
def count() -> int:
    found = shutil.which("nvidia-smi")
    listed = (
        subprocess.run([found, "-L"], capture_output=True, text=True, check=False, timeout=60).stdout if found else ""
    )
    return listed.count("GPU ")


def need(wanted: int) -> None:
    """Skips the test where there are fewer."""
    if count() < wanted:
        pytest.skip(f"needs {wanted} GPUs")
