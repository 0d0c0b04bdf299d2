"""Simulates eight CPU devices and settles how the tests run."""

import os

import jax
import pytest
from hypothesis import settings

NUM_DEVICES = 8

# Takes effect only before JAX makes its backends, hence here and not in a fixture.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)

# `ci` is repeatable; HYPOTHESIS_PROFILE=explore looks for examples that were never tried.
settings.register_profile("ci", max_examples=60, deadline=None, derandomize=True, database=None, print_blob=True)
settings.register_profile("explore", max_examples=500, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def has_cuda() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not has_cuda():
        pytest.skip("needs CUDA devices")
