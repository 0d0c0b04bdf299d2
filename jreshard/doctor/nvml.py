"""NVLink connections and the driver's version, from NVML through `ctypes`.

Names and numbers are those of nvml.h.
"""

import ctypes
from typing import Any

_MAX_LINKS = 18  # NVML_NVLINK_MAX_LINKS
_REMOTE_GPU = 0  # NVML_NVLINK_DEVICE_TYPE_GPU

#: Where a device sits: PCI domain, bus and device.
Place = tuple[int, int, int]


class _PciInfo(ctypes.Structure):
    _fields_ = (
        ("busIdLegacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pciDeviceId", ctypes.c_uint),
        ("pciSubSystemId", ctypes.c_uint),
        ("busId", ctypes.c_char * 32),
    )


class Nvml:
    """NVML of this machine.

    Args:
        library: libnvidia-ml.so.1, or what stands in for it.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def _call(self, name: str, *args: Any) -> bool:
        function = getattr(self._library, name, None)
        return function is not None and function(*args) == 0

    def driver_version(self) -> str | None:
        """The version of the NVIDIA driver, such as `580.159.04`."""
        text = ctypes.create_string_buffer(80)
        return text.value.decode() if self._call("nvmlSystemGetDriverVersion", text, len(text)) else None

    def nvlinks(self, bus_id: str) -> list[Place | None]:
        """The far end of each active NVLink of a GPU: the GPU there, or `None` for a switch or an unknown one."""
        handle = ctypes.c_void_p()
        if not self._call("nvmlDeviceGetHandleByPciBusId_v2", bus_id.encode(), ctypes.byref(handle)):
            return []
        active = ctypes.c_int()
        return [
            self._far_end(handle, link)
            for link in range(_MAX_LINKS)
            if self._call("nvmlDeviceGetNvLinkState", handle, link, ctypes.byref(active)) and active.value
        ]

    def _far_end(self, handle: ctypes.c_void_p, link: int) -> Place | None:
        kind, info = ctypes.c_int(), _PciInfo()
        known = (
            self._call("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link, ctypes.byref(kind))
            and kind.value == _REMOTE_GPU
            and self._call("nvmlDeviceGetNvLinkRemotePciInfo_v2", handle, link, ctypes.byref(info))
        )
        return (info.domain, info.bus, info.device) if known else None


def open_nvml() -> Nvml | None:
    """NVML, or `None` where it is not installed or does not start."""
    try:
        nvml = Nvml(ctypes.CDLL("libnvidia-ml.so.1"))
    except OSError:
        return None
    return nvml if nvml._call("nvmlInit_v2") else None


def place_of(bus_id: str) -> Place:
    """The place that a text such as `0000:1B:00.0` names."""
    domain, bus, device = bus_id.split(":")
    return int(domain, 16), int(bus, 16), int(device.split(".")[0], 16)


def lanes_between(a: Place, links_of_a: list[Place | None], b: Place, links_of_b: list[Place | None]) -> int:
    """The NVLinks between two GPUs: the direct ones, or as many as both have to switches."""
    direct = links_of_a.count(b)
    return direct or min(links_of_a.count(None), links_of_b.count(None))
