"""Made-up facts, and what follows from them."""

from dataclasses import replace

import pytest

from jreshard.doctor.facts import Device, Facts, Link
from jreshard.doctor.report import as_text
from jreshard.doctor.verdicts import findings, verdicts


def gpu(i: int, process: int = 0, exports: bool | None = True) -> Device:
    return Device(f"cuda:{i}", "gpu", "NVIDIA H200", process, 1 << 36, exports)


def refuse(**reasons: str) -> dict[tuple[tuple[int, int], str], str]:
    return {((0, 1), transport): reason for transport, reason in reasons.items()}


TWO_CPUS = Facts(
    {},
    devices=(Device("cpu:0", "cpu", "cpu", 0), Device("cpu:1", "cpu", "cpu", 0)),
    refusals=refuse(p2p="is for GPUs", nccl="is for GPUs"),
)
TWO_GPUS = Facts(
    {},
    hosts={0: "here"},
    devices=(gpu(0), gpu(1)),
    links={(0, 1): Link("nvlink", 18)},
    refusals=refuse(host="is for CPU devices"),
)
TWO_PROCESSES = replace(
    TWO_GPUS, hosts={0: "here", 1: "here"}, machines={0: "m", 1: "m"}, devices=(gpu(0), gpu(1, 1, None)), links={}
)
TWO_MACHINES = replace(TWO_PROCESSES, hosts={0: "here", 1: "there"}, machines={0: "m", 1: "n"})


def judge(facts: Facts) -> dict[str, bool | None]:
    return {verdict.transport: verdict.works for verdict in verdicts(facts)}


def reasons(facts: Facts) -> dict[str, str]:
    return {verdict.transport: verdict.reason for verdict in verdicts(facts)}


def faults(facts: Facts) -> list[str]:
    return [finding.text for finding in findings(facts, verdicts(facts)) if finding.fault]


def notes(facts: Facts) -> list[str]:
    return [finding.text for finding in findings(facts, verdicts(facts)) if not finding.fault]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (TWO_CPUS, {"host": True, "p2p": False, "nccl": False}),
        (TWO_GPUS, {"host": False, "p2p": True, "nccl": True}),
        (TWO_PROCESSES, {"host": False, "p2p": None, "nccl": True}),
        (replace(TWO_GPUS, links={(0, 1): Link("none")}), {"host": False, "p2p": False, "nccl": True}),
        (replace(TWO_GPUS, nccl_fault="is missing"), {"host": False, "p2p": True, "nccl": False}),
        (TWO_MACHINES, {"host": False, "p2p": False, "nccl": True}),
        (replace(TWO_PROCESSES, machines={0: "m"}), {"host": False, "p2p": None, "nccl": True}),
        (replace(TWO_PROCESSES, allocator="cuda_async"), {"host": False, "p2p": False, "nccl": True}),
        (replace(TWO_PROCESSES, devices=(gpu(0, 0, False), gpu(1, 1))), {"host": False, "p2p": False, "nccl": True}),
    ],
)  # fmt: skip
def test_which_transports_work(facts: Facts, expected: dict[str, bool | None]) -> None:
    assert judge(facts) == expected
    assert faults(facts) == []


def test_the_reason_is_said() -> None:
    assert "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async" in reasons(replace(TWO_PROCESSES, allocator="cuda_async"))["p2p"]
    assert "here and there" in reasons(TWO_MACHINES)["p2p"]
    assert "cuDeviceCanAccessPeer" in reasons(replace(TWO_GPUS, links={(0, 1): Link("none")}))["p2p"]
    assert reasons(replace(TWO_GPUS, nccl_fault="is missing"))["nccl"] == "is missing"


def test_a_pair_without_a_transport_is_a_fault() -> None:
    facts = replace(TWO_GPUS, links={(0, 1): Link("none")}, nccl_fault="NCCL is missing")
    assert faults(facts) == ["no transport works between cuda:0 and cuda:1"]
    cpus = replace(TWO_CPUS, devices=(TWO_CPUS.devices[0], replace(TWO_CPUS.devices[1], process=1)))
    hosts = {0: "here", 1: "there"}
    assert faults(replace(cpus, hosts=hosts, machines={0: "m", 1: "n"})) == [
        "no transport works between cpu:0 and cpu:1"
    ]
    assert faults(replace(cpus, hosts=hosts, machines={0: "m", 1: "m"})) == []


def test_only_pairs_of_this_process_are_judged() -> None:
    facts = replace(TWO_GPUS, devices=tuple(gpu(i, i // 2) for i in range(200)))
    assert {verdict.pair for verdict in verdicts(facts)} == {(i, j) for i in (0, 1) for j in range(i + 1, 200)}


@pytest.mark.parametrize(
    "facts",
    [
        Facts({}, jax_fault="no CUDA"),
        replace(TWO_CPUS, native_fault="it is not there"),
        replace(TWO_GPUS, nccl_fault="the process has 2 copies of NCCL: a and b", nccl_copies=True),
    ],
)
def test_what_is_a_fault_of_its_own(facts: Facts) -> None:
    [text] = faults(facts)
    assert text.endswith(str(facts.jax_fault or facts.native_fault or facts.nccl_fault))
    assert "WRONG: " in as_text(facts, verdicts(facts), findings(facts, verdicts(facts)))


def test_what_could_be_better() -> None:
    assert notes(TWO_GPUS) == notes(TWO_CPUS) == []
    assert "2 GPU(s) that JAX does not use" in notes(replace(TWO_CPUS, unused_gpus=2))[0]
    assert notes(replace(TWO_GPUS, links={(0, 1): Link("pcie")})) == [
        "linked by PCIe, much slower than NVLink: cuda:0 and cuda:1"
    ]
    assert "unset it" in notes(replace(TWO_GPUS, allocator="cuda_async"))[0]
    assert notes(replace(TWO_GPUS, nccl_fault="NCCL is missing")) == ["no transfers by nccl: NCCL is missing"]


def test_the_page() -> None:
    text = as_text(TWO_GPUS, verdicts(TWO_GPUS), findings(TWO_GPUS, verdicts(TWO_GPUS)))
    lines = {line[:22].strip(): line[22:] for line in text.splitlines()}
    assert lines["devices"] == "2 x NVIDIA H200 (gpu), cuda:0 to cuda:1, of process 0 on here, 68.7 GB each for JAX"
    assert lines["link"] == "cuda:0 - cuda:1: NVLink x 18"
    assert lines["allocator"] == "default; can export memory to other processes"
    assert lines["transport p2p"] == "works (every pair)"
    assert lines["transport host"] == "no (every pair): is for CPU devices"
    assert text.splitlines()[-1] == "All well: a transport works between all devices."
    alone = replace(TWO_GPUS, devices=(gpu(0),), links={}, refusals={})
    *_, transports, conclusion = as_text(alone, verdicts(alone), findings(alone, verdicts(alone))).splitlines()
    assert "fewer than two devices" in transports
    assert conclusion == "All well: nothing is wrong, and there is nothing to move between."
