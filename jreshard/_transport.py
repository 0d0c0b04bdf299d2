"""Which transport carries a transfer."""

from collections.abc import Sequence
from typing import Any

TRANSPORTS = ("auto", "nccl", "p2p", "host")


def choose_transport(transport: str, devices: Sequence[Any]) -> str:
    """The transport that `transport` stands for between these devices: `"host"`, `"p2p"` or `"nccl"`.

    Raises:
        ValueError: it is unknown, or does not reach all of the devices.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport is {transport!r}; expected one of {', '.join(map(repr, TRANSPORTS))}")
    if any(isinstance(device, str) for device in devices):
        raise ValueError("the plan was made for meshes without devices; make one for meshes that have them")
    platforms = {device.platform for device in devices}
    several = len({device.process_index for device in devices}) > 1
    if platforms == {"gpu"}:
        return _between_gpus(transport, several)
    if platforms != {"cpu"} and devices:
        names = " and ".join(sorted(platforms))
        raise ValueError(f"the devices are of platform {names}; expected all to be CPUs, or all to be GPUs")
    if transport in ("nccl", "p2p"):
        raise ValueError(f"transport {transport!r} needs GPUs; the devices are CPUs: use 'auto' or 'host'")
    return "host"


def _between_gpus(transport: str, several: bool) -> str:
    if transport == "host":
        raise ValueError("transport 'host' moves arrays between CPUs; the devices are GPUs: use 'auto'")
    return ("nccl" if several else "p2p") if transport == "auto" else transport
