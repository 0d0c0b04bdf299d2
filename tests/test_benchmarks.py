"""The scripts in benchmarks/ find what they import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("name", sorted(script.stem for script in FOLDER.glob("*.py")))
def test_imports(name: str) -> None:
    """In a process of its own: some set up JAX, or the path, for themselves."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"],
        cwd=FOLDER,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
