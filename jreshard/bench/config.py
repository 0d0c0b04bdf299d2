"""What a measuring process is told to do."""

from dataclasses import dataclass

#: What is measured beside the cases.
CEILINGS, SLOWDOWN, MEMORY = "ceilings", "slowdown", "memory"


@dataclass(frozen=True)
class Config:
    """What a measuring process is to do.

    Attributes:
        cases: their keys; `None` for those that suit the devices.
        beside: which of `CEILINGS` and `SLOWDOWN` are measured as well.
        done: what of these is not to be measured any more.
        skipped: for units, the contenders that hung or crashed before.
        transports: those of jreshard; none for all that fit the devices.
        rounds: how often everything is timed.
        scale: the factor on the bytes of the cases; `None` for what suits the devices.
        timeout: seconds until a transfer fails.
        until: when all should be done, in seconds of `time.time`; `None` for no haste.
        memory: measure the memory that the cases take instead of their times.
        devices: how many to use; `None` for all. Several processes have one each.
        process: this process's number.
        processes: how many there are.
        port: where those meet, on this host.
        isolated: whether each sees its own GPU only.
    """

    cases: list[str] | None
    beside: list[str]
    done: list[str]
    skipped: dict[str, list[str]]
    transports: list[str]
    rounds: int
    scale: float | None
    timeout: float
    until: float | None
    memory: bool
    devices: int | None
    process: int
    processes: int
    port: int
    isolated: bool
