"""How the transfers of a test between GPUs go."""

import os
from typing import Any

import pytest

# Tests of several processes need the rest: what this process has taken it keeps.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.2")


@pytest.fixture(params=["p2p", "nccl"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"transport": request.param, "timeout": 60}
