"""Which copy of NCCL is found, with small libraries in the place of NCCL."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jreshard._runtime import nccl

COMPILER = shutil.which("cc") or shutil.which("c++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")

#: Loads the module alone, since importing the package takes seconds.
FIND = f"""
import ctypes, importlib.util, json, sys
spec = importlib.util.spec_from_file_location("nccl", {nccl.__file__!r})
nccl = sys.modules["nccl"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(nccl)
for path in json.loads(sys.argv[1]):
    ctypes.CDLL(path)
prepare(nccl)
try:
    found = nccl.find()
    print(json.dumps([found.path, found.version, found.loaded]))
except nccl.NcclUnavailable as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


def build(folder: Path, version: int, soname: str = "libnccl.so.2", symbol: str = "ncclGetVersion") -> str:
    folder.mkdir(parents=True)
    source, library = folder / "nccl.c", folder / "libnccl.so.2"
    source.write_text(f"int {symbol}(int* version) {{ *version = {version}; return 0; }}\n")
    assert COMPILER is not None
    command = [COMPILER, "-shared", "-fPIC", f"-Wl,-soname,{soname}", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=60)
    return str(library)


def find(*loaded: str, site: Path | None = None, prepare: str = "pass") -> list[Any]:
    """What a fresh process finds that has loaded these libraries.

    Args:
        loaded: their files.
        site: stands for the folder of installed packages.
        prepare: a statement that runs before; `nccl` is the module.
    """
    code = f"import sys\nsys.path.insert(0, {str(site)!r})\ndef prepare(nccl): {prepare}\n{FIND}"
    command = [sys.executable, "-c", code, json.dumps(loaded)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    out: list[Any] = json.loads(done.stdout)
    return out


def test_the_copy_of_the_process_wins_over_the_installed_one(tmp_path: Path) -> None:
    build(tmp_path / "site" / "nvidia" / "nccl" / "lib", 23000)
    loaded = build(tmp_path / "other", 22809)
    assert find(loaded, site=tmp_path / "site") == [loaded, [2, 28, 9], True]


def test_the_installed_one_is_loaded_where_there_is_none(tmp_path: Path) -> None:
    installed = build(tmp_path / "site" / "nvidia" / "nccl" / "lib", 22707)
    assert find(site=tmp_path / "site") == [installed, [2, 27, 7], False]


def test_one_file_by_two_names_is_one_copy(tmp_path: Path) -> None:
    loaded = build(tmp_path / "one", 22809)
    link = tmp_path / "libnccl.so.2"
    link.symlink_to(loaded)
    assert find(loaded, str(link))[1:] == [[2, 28, 9], True]


def test_two_copies_are_refused(tmp_path: Path) -> None:
    # Another soname, or the loader would take the second for the first.
    two = [build(tmp_path / "a", 22809), build(tmp_path / "b", 22809, soname="libnccl.so")]
    assert find(*two) == [
        "TwoCopies",
        f"the process has 2 copies of NCCL: {two[0]} and {two[1]}; let only one be loaded",
    ]


@pytest.mark.parametrize(("code", "text"), [(22706, "2.27.6"), (2804, "2.8.4")])
def test_an_old_one_is_refused(tmp_path: Path, code: int, text: str) -> None:
    loaded = build(tmp_path / "old", code)
    kind, message = find(loaded)
    assert kind == "NcclUnavailable"
    assert message.startswith(f"NCCL {text} at {loaded} is too old: 2.27.7 or newer is needed")


def test_a_replaced_file_is_refused(tmp_path: Path) -> None:
    loaded = build(tmp_path / "gone", 22809)
    kind, message = find(loaded, prepare=f"import os; os.remove({loaded!r})")
    assert kind == "NcclUnavailable"
    assert message == f"the process's copy of NCCL was replaced on disk: {loaded} (deleted); start the process anew"


def test_what_is_no_nccl_is_refused(tmp_path: Path) -> None:
    loaded = build(tmp_path / "other", 22809, symbol="somethingElse")
    assert find(loaded) == ["NcclUnavailable", f"{loaded} is no NCCL: it has no ncclGetVersion"]


def test_a_missing_one_says_what_to_install() -> None:
    kind, message = find(prepare="sys.modules['nvidia.nccl'] = None; nccl.SONAME = 'libnccl-none.so'")
    assert kind == "NcclUnavailable"
    assert 'pip install "jreshard[cuda13]"' in message
