"""`python -m jreshard plan` on models and on shapes of one's own, and on requests that it must refuse."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

from jreshard import Topology, models
from jreshard.cli import main
from jreshard.cli.errors import UsageError
from jreshard.cli.paper_meshes import paper_meshes
from jreshard.cli.plan_table import LABEL_WIDTH
from jreshard.cli.rules_spec import parse_rules, read_rules
from jreshard.cli.shapes_file import read_shapes

LLAMA = ["--model", "llama-3.1-8b", "--src", "fsdp=4,tp=2", "--dst", "dp=2,tp=4"]


def facts(output: str) -> dict[str, str]:
    """The lines of the command's output by their label."""
    return {line[:LABEL_WIDTH].strip(): line[LABEL_WIDTH:].strip() for line in output.splitlines()}


def write_json(path: Path, data: Any) -> Path:
    path.write_text(json.dumps(data))
    return path


def test_a_model_on_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *LLAMA]) == 0
    captured = capsys.readouterr()
    found = facts(captured.out)
    assert captured.err == ""
    assert found["model"].startswith("llama-3.1-8b, 8,030,261,248 parameters in bfloat16")
    assert found["source mesh"] == "fsdp=4,tp=2, 8 devices"
    assert found["destination mesh"] == "dp=2,tp=4, 8 devices"
    assert found["topology"] == "h100-8"
    assert found["leaves"] == "12"


def test_the_example_of_the_documentation() -> None:
    """In a process of its own, with many devices, and with stages of uneven length."""
    command = "plan --model deepseek-v3 --src pp=8,ep=16 --dst dp=16,tp=8 --topology gb200-72"
    done = subprocess.run(
        [sys.executable, "-m", "jreshard", *command.split()], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    note = "note: --src: 61 layers do not divide among pp=8: the stages get 8, 8, 8, 8, 8, 7, 7, 7\n"
    assert done.stderr == note
    assert facts(done.stdout)["devices"] == "256"


def test_one_array_a_weight(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", *LLAMA, "--unstacked", "--json", str(path)]) == 0
    data = json.loads(path.read_text())
    assert len(data["leaves"]) == 291
    assert data["leaves"][0]["path"] == "['embed']"


def test_progress_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert main(["plan", *LLAMA]) == 0
    assert "figures (2 of 3 done" in terminal.getvalue()


def test_nothing_beyond_jax_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    for extra in ("tqdm", "safetensors", "matplotlib", "flax", "optax"):
        monkeypatch.setitem(sys.modules, extra, None)
    assert main(["plan", *LLAMA]) == 0


def test_leaf_paths_may_be_written_with_dots(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *LLAMA, "--unstacked", "--explain", "layers.3.mlp.up"]) == 0
    dotted = capsys.readouterr().out
    assert main(["plan", *LLAMA, "--unstacked", "--explain", "['layers'][3]['mlp']['up']"]) == 0
    assert capsys.readouterr().out == dotted
    assert "['layers'][3]['mlp']['up']" in dotted


@pytest.mark.parametrize(("name", "start"), [("plan.png", b"\x89PNG"), ("plan.pdf", b"%PDF")])
def test_a_picture(tmp_path: Path, name: str, start: bytes) -> None:
    path = tmp_path / name
    assert main(["plan", *LLAMA, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(start)


def test_a_broken_matplotlib_is_told_before_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plan", *LLAMA, "--plot", "plan.png"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--plot: matplotlib is installed, and cannot be imported: import of matplotlib.figure" in captured.err


def test_outputs_that_cannot_be_written_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "plan.png"
    folder.mkdir()
    for option in ("--json", "--plot"):
        assert main(["plan", *LLAMA, option, str(folder)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert f"{option} {folder}: is a directory; expected a file" in captured.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_disk_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *LLAMA, "--json", "/dev/full"]) == 2
    assert "error: --json /dev/full: No space left on device" in capsys.readouterr().err


def test_axes_that_split_nothing_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama-3.1-8b", "--src", "ep=4,tp=2", "--dst", "dp=2,tp=4"]) == 0
    assert capsys.readouterr().err == "note: --src: no array is split along ep=4; its ranks hold copies\n"


@pytest.mark.parametrize("form", [[], ["--unstacked"]])
def test_axes_along_which_arrays_lie_on_some_devices_split_them(
    form: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", "gpt-oss-120b", "--src", "pp=2,ep=4", "--dst", "ep=8", *form]) == 0
    assert capsys.readouterr().err == ""


def test_rules_may_name_an_axis_that_only_one_mesh_has(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "llama-3.1-8b", "--src", "shard=2", "--dst", "tp=2", "--rules", "embed=shard+fsdp"]
    assert main(["plan", *arguments]) == 0
    assert capsys.readouterr().err == ""


def test_a_safetensors_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": np.zeros((16, 8), np.float32), "b": np.zeros((8,), np.int64)}, path)
    assert main(["plan", "--shapes", str(path), "--src", "fsdp=2,tp=2", "--dst", "dp=2,tp=2"]) == 0
    found = facts(capsys.readouterr().out)
    assert found["shapes"] == str(path)
    assert found["leaves"] == "2"
    assert found["bytes on destination"] == "1.15 kB"  # 2 x (16 x 8 x 4 + 8 x 8): copies along dp


def test_shapes_with_and_without_axes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = {
        "with": {"shape": [64, 32], "axes": ["embed", "mlp"]},
        "without": {"shape": [64, 32], "dtype": "float32"},
    }
    out = tmp_path / "plan.json"
    shapes = write_json(tmp_path / "shapes.json", entries)
    rules = ["--src-rules", "embed=tp,mlp=none", "--dst-rules", "mlp=tp"]
    arguments = ["plan", "--shapes", str(shapes), "--src", "tp=2", "--dst", "dp=2,tp=4", "--json", str(out), *rules]
    assert main(arguments) == 0
    leaves = {leaf["path"]: leaf for leaf in json.loads(out.read_text())["leaves"]}
    assert leaves["['with']"]["dtype"] == "bfloat16"
    assert leaves["['with']"]["src"] == str(P("tp", None))
    assert leaves["['with']"]["dst"] == str(P(None, "tp"))
    assert leaves["['without']"]["dtype"] == "float32"
    assert leaves["['without']"]["src"] == str(P(None, "tp"))
    assert capsys.readouterr().err == ""


def test_rules_for_shapes_without_axes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_json(tmp_path / "shapes.json", {"w": {"shape": [64, 32]}})
    assert main(["plan", "--shapes", str(path), "--src", "tp=2", "--dst", "tp=4", "--dst-rules", "mlp=tp"]) == 2
    assert "no array has logical axes, which rules are for" in capsys.readouterr().err


def test_shapes_are_read_as_they_are_written(tmp_path: Path) -> None:
    shapes = read_shapes(write_json(tmp_path / "s.json", {"a": {"shape": [2, 3], "axes": [None, "mlp"]}}))
    assert shapes.structs == {"a": jax.ShapeDtypeStruct((2, 3), "bfloat16")}
    assert shapes.weights == {"a": models.Weight((2, 3), (None, "mlp"))}


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("embed=fsdp", [("embed", ("fsdp",))]),
        (" embed = fsdp , mlp=tp+ep", [("embed", ("fsdp",)), ("mlp", ("tp", "ep"))]),
        ("norm=none", [("norm", None)]),
    ],
)
def test_rules_as_text(text: str, rules: list[models.Rule]) -> None:
    assert parse_rules(text) == rules


def test_rules_replace_the_default_ones_for_the_same_axis() -> None:
    rules = read_rules("mlp=none,embed=tp")
    assert rules[:2] == (("mlp", None), ("embed", ("tp",)))
    assert [logical for logical, _ in rules].count("mlp") == 1
    assert {logical for logical, _ in rules} == {logical for logical, _ in models.DEFAULT_RULES}


def test_rules_as_a_file(tmp_path: Path) -> None:
    path = write_json(tmp_path / "rules.json", [["embed", "fsdp"], ["mlp", ["tp", "ep"]], ["norm", None]])
    assert read_rules(str(path))[:3] == (("embed", "fsdp"), ("mlp", ("tp", "ep")), ("norm", None))


@pytest.mark.parametrize("text", ["embed=", "=tp", "embed=tp,", "embed=tp+", "mlp,embed=tp"])
def test_bad_rules_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"expected LOGICAL=MESH.*; found '"):
        read_rules(text)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"embed": "fsdp"}, "expected a JSON list"),
        ([["embed"]], r'found \["embed"\]'),
        ([["embed", []]], r'found \["embed", \[\]\]'),
        ([[1, "tp"]], r'found \[1, "tp"\]'),
    ],
)
def test_bad_rule_files_are_refused(tmp_path: Path, data: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_rules(str(write_json(tmp_path / "rules.json", data)))


def test_separate_meshes_share_no_domain() -> None:
    topology = Topology.preset("gb200-72")
    src, dst, placed = paper_meshes({"tp": 80}, {"tp": 8}, topology, colocated=False)
    devices = [*src.devices.flat, *dst.devices.flat]
    assert [device.id for device in dst.devices.flat] == list(range(144, 152))
    domain = placed.place(devices, 80).domain
    assert set(domain[:80]).isdisjoint(domain[80:])


def test_domains_follow_the_devices_in_whatever_order_a_plan_ranks_them() -> None:
    src, _, placed = paper_meshes({"tp": 16}, {"dp": 16}, Topology.preset("h100-8"), colocated=True)
    devices = list(src.devices.flat)[::2] + list(src.devices.flat)[1::2]
    assert placed.place(devices, 16).domain.tolist() == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4


def test_colocated_meshes_share_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *LLAMA, "--colocated"]) == 0
    assert facts(capsys.readouterr().out)["devices"] == "8"
    assert main(["plan", *LLAMA]) == 0
    assert facts(capsys.readouterr().out)["devices"] == "16"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model", "llama-3-8b", "--src", "tp=2", "--dst", "tp=2"],
            "no model 'llama-3-8b': did you mean 'llama-3.1-8b'",
        ),
        (["--model", "qwen3-32b", "--src", "tp=2", "--dst", "tq=2"], "--dst: no rule names the mesh axis 'tq'"),
        (["--model", "qwen3-32b", "--src", "tp=2", "--dst", "tp=7"], "--dst: the weights do not fit the mesh tp=7"),
        (["--model", "qwen3-32b", "--src", "tp", "--dst", "tp=7"], "mesh 'tp': expected AXIS=SIZE"),
        (["--model", "qwen3-32b", "--src", "pp=65", "--dst", "tp=8"], "has 64 layers; they do not make 65"),
        ([*LLAMA, "--rules", "head=tp"], "no logical axis 'head' (did you mean 'heads'"),
        ([*LLAMA, "--rules", "none.json"], "rules 'none.json': no such file"),
        (
            [*LLAMA, "--rules", "embed=fdsp"],
            "embed=fdsp: there is no mesh axis 'fdsp' (did you mean 'fsdp' or 'dp'?); the",
        ),
        ([*LLAMA, "--rules", "embed=tp+tp"], "--src: the rule for 'embed' names a mesh axis twice: tp, tp"),
        ([*LLAMA, "--plot", "plan.gif"], "--plot plan.gif: expected a file that ends in .png, .pdf, .svg"),
        (
            ["--model", "qwen3-32b", "--src", ",".join(f"a{i}=1" for i in range(33)), "--dst", "tp=8"],
            "a32=1' has 33 axes; expected at most 32",
        ),
        (
            ["--model", "qwen3-32b", "--src", "dp=1000000000000", "--dst", "tp=8"],
            "mesh 'dp=1000000000000' has 1,000,000,000,000 devices; expected at most 1,048,576",
        ),
        (
            ["--model", "qwen3-32b", "--src", "tp=4", "--dst", "tp=8", "--colocated"],
            "--colocated: the source mesh has 4 devices and the destination mesh 8; expected equally many",
        ),
        ([*LLAMA, "--src-rules", "layers=fsdp+tp"], "--src: layers are split along fsdp and tp; expected one"),
        ([*LLAMA, "--explain", "layers.mlp.ups"], "no leaf 'layers.mlp.ups' among 12; there are layers.mlp.up"),
        ([*LLAMA, "--json", "no/such/place.json"], "--json no/such/place.json: no such directory: no/such"),
        ([*LLAMA, "--plot", "no/such/place.png"], "--plot no/such/place.png: no such directory: no/such"),
        (["--shapes", "model.gguf", "--src", "tp=2", "--dst", "tp=2"], "ends in .safetensors or .json"),
        (["--shapes", "none.json", "--src", "tp=2", "--dst", "tp=2"], "none.json: no such file"),
        (["--shapes", "x.json", "--src", "tp=2", "--dst", "tp=2", "--strict"], "are for a --model"),
    ],
)
def test_bad_requests_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("python -m jreshard plan: error: ")
    assert message in captured.err


def test_uneven_stages_can_be_refused(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "gpt-oss-120b", "--src", "pp=8", "--dst", "tp=8"]
    assert main(["plan", *arguments, "--strict"]) == 2
    assert "36 layers do not divide among pp=8; pp of 1, 2, 3, 4, 6, 9, 12, 18, 36 would" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "expected an object like"),
        ({}, "expected an object like"),
        ({"w": [2]}, "w: expected an object with shape, dtype and axes, found [2]"),
        ({"w": {"shape": [2], "sharding": "tp"}}, "w: expected an object with shape, dtype and axes"),
        ({"w": {"dtype": "float32"}}, "w: shape is null; expected a list of sizes"),
        ({"w": {"shape": [2, -1]}}, "w: shape is [2, -1]"),
        ({"w": {"shape": [True]}}, "w: shape is [true]"),
        ({"w": {"shape": [2], "dtype": "float31"}}, 'w: dtype is "float31"; expected one that JAX arrays have'),
        ({"w": {"shape": [2], "dtype": "U8"}}, 'w: dtype is "U8"'),
        ({"w": {"shape": [2], "dtype": None}}, "w: dtype is null"),
        ({"w": {"shape": [2], "dtype": "complex256"}}, 'w: dtype is "complex256"'),
        ({"w": {"shape": [2], "dtype": "(2,f4"}}, 'w: dtype is "(2,f4"'),
        ({"w": {"shape": [10**20]}}, "w: shape is [100000000000000000000]; expected at most 9,223,372,036,854,775,807"),
        ({"w": {"shape": [0, 2**62]}}, "w: shape is [0, 4611686018427387904]; expected at most"),
        ({"v": {"shape": [2**61]}, "w": {"shape": [2**61]}}, "would hold 18,446,744,073,709,551,616 bytes; expected"),
        ({"w": {"shape": [[2] * 100]}}, "2, ...; expected a list of sizes"),
        ({"w": {"shape": [1] * 33}}, "expected a list of sizes, at most 32"),
        ({"w": {"shape": [2], "axes": ["embde"]}}, "w: no rule names the axis 'embde' (did you mean 'embed'?); the"),
        ({"w": {"shape": [2], "axes": ["embed", "mlp"]}}, "w: axes is"),
        ({"w": {"shape": [2], "axes": "embed"}}, "expected a list of 1 names or null"),
        ({"w": {"shape": [3], "axes": ["mlp"]}}, "--src: the weights do not fit the mesh tp=2"),
    ],
)
def test_bad_shapes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], data: Any, message: str) -> None:
    path = write_json(tmp_path / "shapes.json", data)
    assert main(["plan", "--shapes", str(path), "--src", "tp=2", "--dst", "tp=2"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ("[" * 100_000, "the JSON is nested too deeply"),
        ('{"w": {"shape": [2]}, "w": {"shape": [4]}}', "'w' is there twice in one object"),
    ],
)
def test_text_that_is_no_good_json_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "shapes.json"
    path.write_text(text)
    assert main(["plan", "--shapes", str(path), "--src", "tp=2", "--dst", "tp=2"]) == 2
    assert f"{path}: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (["embed", "mlp"], "--src: pp=2 is for layers, and no array of"),
        (["layers", "mlp"], "--src: w: 3 layers do not divide among pp=2"),
    ],
)
def test_stages_for_shapes_are_refused_in_the_commands_own_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], axes: list[str], message: str
) -> None:
    path = write_json(tmp_path / "shapes.json", {"w": {"shape": [3, 4], "axes": axes}})
    assert main(["plan", "--shapes", str(path), "--src", "pp=2", "--dst", "tp=2"]) == 2
    assert message in (told := capsys.readouterr().err)
    assert "stage_axis" not in told
