"""Asking the driver and NVML, with stand-ins for both libraries."""

import json
from typing import Any

import pytest

from jreshard._runtime.driver import Driver, DriverError
from jreshard.doctor import examine, probe
from jreshard.doctor.facts import Link
from jreshard.doctor.nvml import Nvml, Place, lanes_between, place_of


def put(pointer: Any, value: int) -> int:
    """Writes through what `ctypes.byref` made, and returns success."""
    pointer._obj.value = value
    return 0


class FakeCuda:
    """Two GPUs of a driver."""

    def __init__(self, peers: bool = True, atomics: bool = True, init: int = 0) -> None:
        self.peers, self.atomics, self.init = peers, atomics, init

    def cuGetErrorString(self, result: int, text: Any) -> int:
        text._obj.value = b"no such device" if result == 100 else b"system not ready"
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:
        return put(version, 13000)

    def cuInit(self, flags: int) -> int:
        return self.init

    def cuDeviceGetCount(self, count: Any) -> int:
        return put(count, 2)

    def cuDeviceGetPCIBusId(self, text: Any, size: int, ordinal: int) -> int:
        text.value = f"0000:{0x1A + ordinal:02X}:00.0".encode()
        return 0

    def cuDeviceCanAccessPeer(self, value: Any, a: int, b: int) -> int:
        return put(value, self.peers)

    def cuDeviceGetP2PAttribute(self, value: Any, attribute: int, a: int, b: int) -> int:
        assert attribute == 3
        return put(value, self.atomics)


class FakeNvml:
    """Its NVLinks end where `ends` says: at a place, or at a switch."""

    def __init__(self, ends: dict[int, list[Place | None]]) -> None:
        self.ends = ends

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus_id: bytes, handle: Any) -> int:
        return put(handle, place_of(bus_id.decode())[1])

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: int, active: Any) -> int:
        return put(active, link < len(self.ends[handle.value]))

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Any, link: int, kind: Any) -> int:
        return put(kind, 2 if self.ends[handle.value][link] is None else 0)

    def nvmlDeviceGetNvLinkRemotePciInfo_v2(self, handle: Any, link: int, info: Any) -> int:
        place = self.ends[handle.value][link]
        assert place is not None
        info._obj.domain, info._obj.bus, info._obj.device = place
        return 0


SWITCHED = FakeNvml({0x1A: [None] * 18, 0x1B: [None] * 18})
DIRECT = FakeNvml({0x1A: [(0, 0x1B, 0)] * 4 + [None], 0x1B: [(0, 0x1A, 0)] * 4})
NO_LINKS = FakeNvml({0x1A: [], 0x1B: []})


@pytest.mark.parametrize(
    ("cuda", "nvml", "expected"),
    [
        (FakeCuda(), SWITCHED, Link("nvlink", 18)),
        (FakeCuda(), DIRECT, Link("nvlink", 4)),
        (FakeCuda(), None, Link("nvlink")),
        (FakeCuda(), object(), Link("nvlink")),  # an NVML without these functions
        (FakeCuda(atomics=False), NO_LINKS, Link("pcie")),
        (FakeCuda(atomics=False), None, Link("pcie")),
        (FakeCuda(peers=False), NO_LINKS, Link("none")),
    ],
)
def test_links(cuda: FakeCuda, nvml: Any, expected: Link) -> None:
    found = probe.links(Driver(cuda), None if nvml is None else Nvml(nvml), {3: 0, 5: 1})
    assert found == {(3, 5): expected}


def test_lanes_to_other_gpus_do_not_count() -> None:
    a, b, c = (0, 1, 0), (0, 2, 0), (0, 3, 0)
    assert lanes_between(a, [c, c], b, [c, c]) == 0
    assert lanes_between(a, [b, c], b, [a, c]) == 1


def test_a_driver_without_devices_and_one_that_fails() -> None:
    assert Driver(FakeCuda(init=100)).device_count() == 0
    with pytest.raises(DriverError, match=r"cuInit failed: system not ready \(802\)"):
        Driver(FakeCuda(init=802)).device_count()


def test_an_old_driver_is_named() -> None:
    with pytest.raises(DriverError, match="the NVIDIA driver has no cuDeviceGetAttribute; update it"):
        Driver(FakeCuda()).attribute(0, 102)


def test_versions_of_the_driver() -> None:
    assert Driver(FakeCuda()).api_version() == "13.0"


def test_gpus_that_jax_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "open_driver", lambda: Driver(FakeCuda()))
    monkeypatch.setattr(probe, "open_nvml", lambda: None)
    facts = probe.gather()
    if facts.devices[0].platform == "cpu":
        assert facts.unused_gpus == 2
        assert facts.versions["cuda driver api"] == "13.0"


def test_this_process() -> None:
    report, ok = examine(json=True)
    out = json.loads(report)
    assert ok is out["ok"] is True
    assert {"python", "jax", "jaxlib", "jreshard"} <= set(out["versions"])
    if out["devices"][0]["platform"] == "cpu":
        works = {(*t["pair"], t["transport"]): t["works"] for t in out["transports"]}
        assert works[0, 1, "host"] is True
        assert works[0, 1, "p2p"] is works[0, 1, "nccl"] is False
