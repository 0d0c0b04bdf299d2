"""Plans in which GPUs pass on what they have received, byte for byte."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from gpu_meshes import COLS, ROWS, WHOLE, on
from jax.sharding import NamedSharding
from relays import relayed

import jreshard
from jreshard._planning import turns

pytestmark = pytest.mark.gpu


def leaves(seed: int) -> dict[str, np.ndarray]:
    """Large ones and small ones, some of several waves' worth where slots are small."""
    host = {f"small {i}": oracle.values((34, 2, 14), np.uint8, seed + i) for i in range(40)}
    host |= {f"large {i}": oracle.values((768, 1024, 2), np.float32, seed + i) for i in range(4)}
    host["bf16"] = oracle.values((96, 240, 6), jnp.bfloat16, seed)
    host["int4"] = oracle.values((24, 48), jnp.dtype("int4"), seed)
    return host


def check(src: NamedSharding, dst: NamedSharding, topology: jreshard.Topology | None, **options: Any) -> None:
    plan: jreshard.Plan | None = None
    got = None
    for seed in range(3):
        host = leaves(seed)
        params = jax.device_put(host, src)
        plan = plan or jreshard.plan(params, src, dst, topology=topology)
        assert any(template.relays for route in plan.routes for template in route.templates)
        got = plan.execute(params, into=got, verify=True, **options)
        oracle.assert_tree_holds(got, host, dst)


# With two GPUs no planner has anything passed on, so that the moves are made up: GPU 0 completes its replica, and GPU 1
# reads all of its own from there.
TWO = {
    "rows": ([0, 1], ROWS),
    "columns": ([0, 1], COLS),
    "0": ([0], WHOLE),
    "1": ([1], WHOLE),
    "replicas": ([1, 0], WHOLE),
}


@pytest.mark.parametrize("staging", ["1", "128"])
@pytest.mark.parametrize("name", TWO)
def test_two_gpus(name: str, staging: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "plan_moves", relayed)
    monkeypatch.setenv("JRESHARD_STAGING_MIB", staging)
    src_ids, src_spec = TWO[name]
    check(on(src_ids, src_spec), on([0, 1], WHOLE), None, **options)


def hosts(*domains: int) -> jreshard.Topology:
    """GPUs on several hosts, as far as the planner is told."""
    return jreshard.Topology(domain_size=8, nvlink=400e9, nic=50e9, domains=domains, smallest_piece=1 << 10)


MANY = {
    "1 to 3 replicas": ([0], WHOLE, [1, 2, 3], WHOLE, {}, (0, 1, 1, 1)),
    "1 to 3 hosts": ([0], WHOLE, [1, 2, 3], WHOLE, {}, (0, 1, 2, 3)),
    "rows of 2 to 2 replicas": ([0, 1], ROWS, [2, 3], WHOLE, {}, (0, 0, 1, 1)),
    "columns of 2 to 2 replicas": ([0, 1], COLS, [2, 3], WHOLE, {}, (0, 0, 1, 1)),
    "1 to 2 columns of 2 replicas": ([0], WHOLE, [0, 1, 2, 3], COLS, {"x": 2, "replica": 2}, (0, 1, 1, 2)),
    "2 to 2 hosts of 3 replicas": ([0, 1], ROWS, [2, 3, 4, 5, 6, 7], WHOLE, {}, (0, 0, 1, 1, 1, 2, 2, 2)),
}


@pytest.mark.parametrize("staging", ["1", "128"])
@pytest.mark.parametrize("name", MANY)
def test_plans_for_hosts(name: str, staging: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JRESHARD_STAGING_MIB", staging)
    src_ids, src_spec, dst_ids, dst_spec, axes, domains = MANY[name]
    check(on(src_ids, src_spec), on(dst_ids, dst_spec, **axes), hosts(*domains), **options)
