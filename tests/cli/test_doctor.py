"""`python -m jreshard doctor`: what it prints and how it ends."""

import json
import os
import subprocess
import sys

import pytest

from jreshard.cli import doctor, main


def test_it_says_that_all_is_well(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    out = json.loads(capfd.readouterr().out)
    assert out["ok"] is True
    assert out["devices"]


def test_a_machine_that_jax_cannot_use() -> None:
    command = [sys.executable, "-m", "jreshard", "doctor"]
    environment = os.environ | {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "WRONG: JAX has no devices: " in done.stdout


def test_a_hang_ends(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MAX_SECONDS", 0.01)
    assert main(["doctor"]) == 1
    assert "has not ended after 0.01 s" in capfd.readouterr().err


def test_a_crash_is_said(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    died = subprocess.CompletedProcess([], -11)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: died)
    assert main(["doctor"]) == 1
    assert "died of signal 11" in capfd.readouterr().err
