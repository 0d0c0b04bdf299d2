"""Faults that were found by trying to break it, each kept from coming back."""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from oracle import P, assert_holds, assert_tree_holds, cpus, mesh, named, numbers, put, values

import jreshard
from jreshard._runtime.launch import Launcher


def test_params_over_the_memory_of_the_last_result():
    src, both = named(mesh([0, 1]), "x"), named(mesh([0, 1]), None, "x")
    old = jreshard.transfer(put(numbers((4, 4)), src), src, both)
    rewrapped = jax.make_array_from_single_device_arrays(old.shape, both, [s.data for s in old.addressable_shards])
    with pytest.raises(ValueError, match="memory of a leaf of params"):
        jreshard.transfer(rewrapped, both, both, into=old)
    assert not old.is_deleted()


def slow_source(sharding: NamedSharding, *, fails: bool) -> jax.Array:
    def work(x: np.ndarray) -> np.ndarray:
        time.sleep(0.5)
        if fails:
            raise RuntimeError("the training step failed")
        return np.asarray(x)

    def step(x: jax.Array) -> jax.Array:
        return jax.pure_callback(work, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    # On each device by itself: where one fails, none waits for it in a collective.
    mapped = jax.shard_map(step, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=sharding.spec, check_vma=False)
    return jax.jit(mapped)(jax.device_put(jnp.ones((4, 4)), sharding))


@pytest.mark.parametrize(("src", "dst"), [([3], range(8)), (range(8), [3])], ids=str)
def test_meshes_of_one_device_wait_for_a_source_that_is_being_computed(src, dst):
    """Else what waits for it could keep all the threads that XLA has, and the source would never be published."""
    pending = slow_source(named(mesh(range(8))), fails=False)
    if len(src) == 1:
        pending = pending.addressable_shards[src[0]].data
    assert not pending.is_ready()
    moved = jreshard.transfer(pending, None, named(mesh(dst)), timeout=30)
    assert pending.is_ready()
    assert moved.is_ready()
    assert_holds(moved, np.ones((4, 4), np.float32), named(mesh(dst)))


@pytest.mark.filterwarnings("ignore")
def test_source_that_fails_fails_the_result_at_once_and_the_next_call_works():
    src, dst = named(mesh([0])), named(mesh([1]))
    begin = time.monotonic()
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.block_until_ready(jreshard.transfer(slow_source(src, fails=True), src, dst, timeout=60))
    assert time.monotonic() - begin < 30
    value = numbers((4, 4))
    assert_holds(jreshard.transfer(put(value, src), src, dst), value, dst)


def assert_source_is_let_go(params: jax.Array, result: jax.Array) -> None:
    """A step takes the source long before the timeout, though the result is an error."""
    begin = time.monotonic()
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(params))
    assert time.monotonic() - begin < 30
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.block_until_ready(result)


def test_failed_result_given_as_into_does_not_hold_up_the_source():
    src, dst = named(mesh([0, 1]), "x"), named(mesh([2, 3]), "x")
    params = put(numbers((4, 4)), src)
    late = slow_source(src, fails=False)
    failed = jreshard.transfer(late, src, dst, timeout=0.05)
    with pytest.raises(jax.errors.JaxRuntimeError, match="timed out"):
        jax.block_until_ready(failed)
    again = jreshard.transfer(params, src, dst, into=failed, timeout=60)
    assert_source_is_let_go(params, again)


@pytest.mark.filterwarnings("ignore")
def test_refits_after_a_failed_one_do_not_hold_up_their_sources():
    """Each is over when the one before has failed, whose arrays it takes; also if the next one has taken its own."""
    src, dst = named(mesh([0, 1]), "x"), named(mesh([2, 3]), "x")
    params, others = (put(numbers((4, 4)), src) for _ in range(2))
    weights = jreshard.transfer(slow_source(src, fails=True), src, dst, timeout=60)
    weights = jreshard.transfer(params, src, dst, into=weights, timeout=60)
    weights = jreshard.transfer(others, src, dst, into=weights, timeout=60)
    assert_source_is_let_go(params, weights)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=str)
def test_params_over_the_memory_of_the_last_result_of_which_a_part_is_pending(order):
    src, dst = named(mesh([0, 1]), "x"), named(mesh(order), "x")
    old = jreshard.transfer(put(numbers((4, 4)), src), src, dst)
    first, second = (
        {shard.device: shard.data for shard in x.addressable_shards} for x in (old, slow_source(src, fails=False))
    )
    params = jax.make_array_from_single_device_arrays((4, 4), src, [first[cpus()[0]], second[cpus()[1]]])
    assert not params.is_ready()
    with pytest.raises(ValueError, match="memory of a leaf of params"):
        jreshard.transfer(params, src, dst, into=old)
    assert not old.is_deleted()
    jax.block_until_ready(params)


@pytest.mark.parametrize("donates", [False, True])
def test_params_that_another_thread_takes_meanwhile(donates, monkeypatch):
    """Where nothing holds them any more, right after they were published: wrong bytes must not pass for weights."""
    src, dst = named(mesh([0])), named(mesh([1]))
    params = [put(numbers((64, 64)), src) for _ in range(4)]
    plan = jreshard.plan(params, src, dst)
    jax.block_until_ready(plan.execute(params))
    take = jax.jit(lambda x: x * 0, donate_argnums=0) if donates else lambda x: x.delete()
    compiled = Launcher._publish.func

    def publish(launcher):
        (program,) = compiled(launcher)

        def published(*operands):
            token = jax.block_until_ready(program(*operands))
            for x in params:
                take(x)
            return token

        return [published]

    monkeypatch.setattr(Launcher, "_publish", property(publish))
    with pytest.raises(RuntimeError, match="deleted"):
        plan.execute(params, timeout=60)


def test_into_with_python_numbers():
    dst = named(mesh([0, 1]))
    tree = {"step": 3, "rate": 0.5, "scale": np.float64(2)}
    old = jreshard.transfer(tree, None, dst)
    new = jreshard.transfer(tree | {"step": 4}, None, dst, into=old)
    assert int(new["step"]) == 4
    assert float(new["rate"]) == 0.5


def test_plan_follows_the_configuration():
    src, dst = named(mesh([0])), named(mesh([1]))
    params = {"w": put(numbers((4,)), src)}

    def widen(tree):
        return {"w": tree["w"].astype(float)}

    assert jreshard.transfer(params, src, dst, transform=widen)["w"].dtype == np.float32
    with jax.enable_x64(True):
        assert jreshard.transfer(params, src, dst, transform=widen)["w"].dtype == np.float64


def test_partial_transforms_are_told_apart():
    src, dst = named(mesh([0])), named(mesh([1]))
    params = put(numbers((4,)), src)

    def scale(x, *, by):
        return x * by

    for by in (1, True, 2.0, np.float32(3)):
        got = jreshard.transfer(params, src, dst, transform=jax.tree_util.Partial(scale, by=by))
        np.testing.assert_array_equal(got, numbers((4,)) * np.float32(by))
    got = jreshard.transfer(params, src, dst, transform=functools.partial(scale, by=4))
    np.testing.assert_array_equal(got, numbers((4,)) * 4)


@pytest.mark.parametrize("bad", [np.zeros(3), [np.zeros(3)], {"w": 3}, "cpu"])
def test_what_is_no_sharding_is_named(bad):
    src = named(mesh([0]))
    with pytest.raises((TypeError, ValueError), match="dst_sharding"):
        jreshard.transfer({"w": put(numbers((4,)), src)}, src, bad)


def test_one_struct_at_two_places_is_two_arrays():
    src, dst = named(mesh([0])), named(mesh([1]))
    struct = jax.ShapeDtypeStruct((8, 8), np.float32)
    assert jreshard.plan({"a": struct, "b": struct}, src, dst).bytes_moved == 512


def test_plan_for_abstract_meshes_says_that_it_cannot_move():
    src = NamedSharding(AbstractMesh((2,), ("x",)), P("x"))
    plan = jreshard.plan({"w": jax.ShapeDtypeStruct((8, 8), np.float32)}, src, src)
    assert plan.bytes_moved == plan.lower_bound == 256
    with pytest.raises(ValueError, match=r"\[.w.\]|without devices"):
        plan.execute({"w": jnp.ones((8, 8))})


def test_mesh_without_axes():
    src = NamedSharding(Mesh(np.array(cpus()[0]), ()), P())
    dst = named(mesh([1, 2]), "x")
    value = values((4, 4))
    assert_holds(jreshard.transfer({"w": put(value, src)}, src, dst)["w"], value, dst)


def test_other_device_layout_is_named():
    src, dst = named(mesh([0])), named(mesh([1]))
    array = jax.device_put(jnp.ones((4, 8)), Format(Layout((1, 0)), src))
    with pytest.raises(ValueError, match=r"\['w'\].*layout"):
        jreshard.transfer({"w": array}, src, dst)


def test_arrays_without_elements_come_first_on_the_same_devices():
    src, dst = named(mesh([0, 1, 2, 3])), named(mesh([0, 1, 2, 3], y=4))
    host = {"a": np.zeros((0, 4), np.float32), "b": values((4, 4)), "c": np.zeros((4, 0), np.int32)}
    params = jax.tree.map(lambda x: put(x, src), host)
    old = None
    for _ in range(2):
        old = jreshard.transfer(params, src, dst, into=old, timeout=30)
        assert_tree_holds(old, host, dst)


@pytest.mark.parametrize("host", [{}, {"a": np.zeros((0, 4), np.float32)}], ids=["no leaf", "no element"])
def test_a_plan_in_which_nothing_moves(host):
    src, dst = named(mesh([0, 1]), "x"), named(mesh([2, 3]), None, "x")
    params = jax.tree.map(lambda x: put(x, src), host)
    plan = jreshard.plan(params, src, dst)
    assert plan.num_moves == plan.nbytes == 0
    assert plan.plot() is not None
    assert "leaves" in repr(plan)
    assert_tree_holds(plan.execute(params), host, dst)


def test_values_of_the_host_take_over_memory_under_any_mesh():
    src, dst = named(mesh([0, 1]), "x"), named(mesh([2, 3]), "x")
    host = {"w": values((4, 4)), "nan": np.full(2, np.nan, np.float32)}
    tree = {"w": put(host["w"], src), "nan": host["nan"]}
    old = jreshard.transfer(tree, None, dst)
    with jax.set_mesh(mesh([0, 1], z=2)), jax.debug_nans(True):
        new = jreshard.transfer(tree, None, dst, into=old)
    assert_tree_holds(new, host, dst)


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match=r"\['w'\]: is of shape \(-4, 4\)"):
        jreshard.plan(
            {"w": jax.ShapeDtypeStruct((-4, 4), np.float32)},
            named(
                mesh([0]),
            ),
            named(mesh([1])),
        )


def test_the_least_whole_number():
    assert jreshard.transfer({"n": -(2**31)}, None, named(mesh([0])))["n"] == -(2**31)


def test_replicas_share_the_sending_over_leaves_of_different_shapes():
    src, dst = named(mesh([0, 1, 2, 3])), named(mesh([4]))
    shapes = {f"w{i}": jax.ShapeDtypeStruct((i + 8, 4), np.float32) for i in range(12)}
    sent = jreshard.plan(shapes, src, dst).sent
    assert (sent[:4] > 0).all()
    assert sent.max() < 2 * sent[:4].min()


def test_into_while_a_callback_runs_on_the_destination():
    """Asking a pending array for its address would hold Python's lock, which the callback needs."""
    on = named(mesh([0, 1]), "x")
    old = [jreshard.transfer(put(numbers((4, 4), seed=i), on), on, on) for i in range(6)]
    late = slow_source(on, fails=False)
    new = jreshard.transfer(late, on, on, into=old[0], timeout=60)
    np.testing.assert_array_equal(new, np.ones((4, 4)))


def test_inside_of_jit_is_refused_with_concrete_arrays_too():
    src, dst = named(mesh([0])), named(mesh([1]))
    params = put(numbers((4,)), src)
    with pytest.raises(TypeError, match="inside a function that is traced"):
        jax.jit(lambda x: x + jreshard.transfer(params, src, dst)[0])(1.0)


@pytest.mark.parametrize("context", [jax.disable_jit, lambda: jax.debug_nans(True)])
def test_checks_that_the_caller_set_for_other_code(context):
    src, dst = named(mesh([0, 1]), "x"), named(mesh([2, 3]), None, "x")
    value = np.full((6, 10), np.nan, np.float32)
    source = put(value, src)
    with context():
        moved = jreshard.transfer({"w": source}, src, dst)
    assert_holds(moved["w"], value, dst)


def test_static_fields_are_those_handed_over():
    @functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["tag"])
    @dataclasses.dataclass
    class Weights:
        w: jax.Array
        tag: object

    src, dst = named(mesh([0])), named(mesh([1]))
    for tag in (1, True, 1.0, np.zeros(2), np.zeros(2)):
        moved = jreshard.transfer(Weights(put(numbers((4,)), src), tag), src, dst)
        assert type(moved.tag) is type(tag)


@pytest.mark.parametrize(
    "value", [np.array(["a"]), np.array([object()]), np.zeros(3, ">f4"), 2**40, np.zeros(2, "datetime64[s]")]
)
def test_values_that_jax_cannot_hold_are_named(value):
    dst = named(mesh([0]))
    with pytest.raises((TypeError, ValueError), match=r"\['bad'\]"):
        jreshard.transfer({"good": 1.0, "bad": value}, None, dst)


def test_device_twice_in_a_mesh_is_named():
    twice = NamedSharding(Mesh(np.array([cpus()[1], cpus()[1]]), ("x",)), P("x"))
    src = named(mesh([0]))
    with pytest.raises(ValueError, match=r"\['w'\].*twice"):
        jreshard.transfer({"w": put(numbers((4,)), src)}, src, twice)


def test_single_device_sharding_as_source():
    where = jax.sharding.SingleDeviceSharding(cpus()[3])
    dst = named(mesh([1]))
    value = numbers((4,))
    assert_holds(jreshard.transfer(jax.device_put(value, where), where, dst), value, dst)
