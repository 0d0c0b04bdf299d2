import importlib.util
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jreshard.cli import main
from jreshard.cli.meshes import disjoint_meshes
from jreshard.demo import layout, outcome, policy, task
from jreshard.demo.loop import Loop
from jreshard.demo.rollout import Rollout

PROMPT = np.array([[3, 1, 2, 9, 0, 1, task.SEPARATOR]], np.int32)
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def meshes():
    return disjoint_meshes(layout.TRAINER_AXES, layout.ROLLOUT_AXES)


def run_demo(*args):
    command = [sys.executable, "-m", "jreshard", "demo", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_prompts_are_random_digits_and_a_separator():
    prompts = task.sample_prompts(np.random.default_rng(0), 500)
    assert prompts.shape == (500, task.LENGTH + 1)
    assert prompts.dtype == np.int32
    assert (prompts[:, -1] == task.SEPARATOR).all()
    assert set(prompts[:, :-1].flat) == set(range(task.DIGITS))


@pytest.mark.parametrize(
    ("answer", "rewards"),
    [
        ([0, 1, 1, 2, 3, 9], [1, 1, 1, 1, 1, 1]),
        ([0, 1, 2, 3, 9, 9], [1, 1, 0, 0, 0, 1]),
        ([3, 1, 2, 9, 0, 1], [0, 1, 0, 0, 0, 0]),
    ],
)
def test_score_checks_each_digit_of_the_sorted_prompt(answer, rewards):
    np.testing.assert_array_equal(task.score(PROMPT, np.array([answer], np.int32)), [rewards])


def test_advantages_compare_within_a_group_only():
    rewards = np.array([[1, 0], [0, 0], [1, 1], [1, 0]], np.float32)
    np.testing.assert_array_equal(task.advantages(rewards, group=2), [[0.5, 0], [-0.5, 0], [0, 0.5], [0, -0.5]])


@pytest.mark.parametrize(
    ("rewards", "succeeds"),
    [
        ([0.1] * 20, False),
        ([0.1] * 10 + [0.5] * 10, False),
        ([0.1] * 19 + [1.0], False),
        ([0.1] * 10 + [0.9] * 10, True),
        ([0.9] * 10 + [0.1] * 10, False),
        ([1.0], False),
    ],
)
def test_success_takes_a_lasting_rise(rewards, succeeds):
    failures = outcome.failures(rewards, weights_identical=True)
    assert (not failures) is succeeds
    assert all("reward rose by" in failure for failure in failures)


def test_success_takes_identical_weights():
    assert outcome.failures([0.1] * 10 + [0.9] * 10, weights_identical=False) == [
        "the rollout weights differ from the trainer's"
    ]


def test_identical_compares_bits():
    tree = {"a": jnp.array([1.0, jnp.nan]), "b": [jnp.arange(3)]}
    assert outcome.identical(tree, jax.tree.map(jnp.copy, tree))
    assert not outcome.identical(jnp.array([0.0]), jnp.array([-0.0]))
    assert not outcome.identical(jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.float32))
    assert not outcome.identical(jnp.zeros(2), jnp.zeros((2, 1)))
    assert not outcome.identical({"a": jnp.zeros(2)}, {"b": jnp.zeros(2)})


def test_weights_are_split_over_both_meshes(meshes):
    trainer_mesh, rollout_mesh = meshes
    abstract = policy.abstract()[1]
    trainer, rollout = (layout.shardings(abstract, mesh) for mesh in (trainer_mesh, rollout_mesh))
    trainer_up, rollout_up = (tree["blocks"][0]["up"]["kernel"].get_value() for tree in (trainer, rollout))
    assert trainer_up.spec == PartitionSpec("fsdp", "tp")
    assert rollout_up.spec == PartitionSpec(None, "tp")
    assert trainer["norm"]["scale"].get_value().is_fully_replicated


def test_policy_is_causal():
    params = policy.initial_params(0)
    ids = np.zeros((1, policy.CONTEXT), np.int32)
    changed = ids.copy()
    changed[0, 7] = 5
    before, after = policy.logits(params, ids), policy.logits(params, changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert not np.array_equal(before[:, 7:], after[:, 7:])


def test_a_step_sends_the_improved_weights(meshes):
    loop = Loop(*meshes, seed=0)
    before = jax.tree.map(np.asarray, loop.rollout.params)
    step = loop.step()
    assert 0 < step.reward < 0.5
    assert step.refit_seconds > 0
    assert outcome.identical(loop.trainer.params, loop.rollout.params)
    assert not outcome.identical(before, loop.rollout.params)


def test_answers_follow_the_seed(meshes):
    rollout = Rollout(meshes[1])
    rollout.refit(policy.initial_params(0))
    prompts = np.repeat(PROMPT, 8, axis=0)
    first, again, other = (rollout.generate(prompts, np.uint32(seed)) for seed in (1, 1, 2))
    assert first.shape == (8, task.LENGTH)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_short_run_reports_and_draws_but_does_not_succeed(tmp_path):
    picture = tmp_path / "run.png"
    result = run_demo("--steps", "4", "--plot", str(picture))
    assert result.returncode == 1, result.stderr
    assert "4/4" in result.stderr  # the progress bar
    for part in ("reward 0.", "refit ", " MB"):
        assert part in result.stderr
    assert "demo failed: the reward rose by" in result.stderr
    assert "refits    4, median" in result.stdout
    assert "identical in every bit" in result.stdout
    assert picture.read_bytes().startswith(PNG_SIGNATURE)


def test_missing_extras_are_named(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["demo"]) == 2
    assert 'pip install "jreshard[demo]"' in capsys.readouterr().err


def test_a_picture_without_a_place_is_refused_before_the_run(tmp_path, capsys):
    assert main(["demo", "--plot", str(tmp_path / "missing" / "run.png")]) == 2
    assert "no such directory" in capsys.readouterr().err
