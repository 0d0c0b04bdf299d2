"""The command line as a whole."""

import subprocess
import sys

import pytest

from jreshard.cli import main


def test_without_arguments_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: python -m jreshard")
    assert "demo" in out
    assert "try" in out


def test_python_m_jreshard_prints_the_version() -> None:
    done = subprocess.run([sys.executable, "-m", "jreshard", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("jreshard ")


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["teleport"])
    assert caught.value.code == 2
    assert "invalid choice: 'teleport'" in capsys.readouterr().err


def test_a_missing_extra_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert main(["try", "any.safetensors", "--src", "tp=1", "--dst", "tp=1"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert 'safetensors; run: pip install "jreshard[demo]"' in error
