"""What a measuring process is told to do."""

from dataclasses import dataclass

#: What is measured beside the cases.
CEILINGS, SLOWDOWN = "ceilings", "slowdown"


@dataclass(frozen=True)
class Config:
    """What a measuring process is to do.

    Attributes:
        units: the cases, by key, and `CEILINGS` and `SLOWDOWN`, in order.
        skipped: for units, the contenders that hung or crashed before.
        transports: those of jreshard; none for all that fit the devices.
        rounds: how often everything is timed.
        scale: the factor on the bytes of the cases; `None` for what suits the devices.
        timeout: seconds until a transfer fails.
        process: this process's number.
        processes: how many there are.
        port: where those meet, on this host.
        isolated: whether each sees its own GPU only.
    """

    units: list[str]
    skipped: dict[str, list[str]]
    transports: list[str]
    rounds: int
    scale: float | None
    timeout: float
    process: int
    processes: int
    port: int
    isolated: bool
