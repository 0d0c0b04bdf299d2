"""How the transfers of a test between GPUs go."""

from typing import Any

import pytest


@pytest.fixture(params=["p2p", "nccl"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"transport": request.param, "timeout": 60}
