"""What can go wrong between processes."""

from collections.abc import Iterable, Mapping


def seconds(timeout: float) -> str:
    """For messages: what was left of a timeout when it was handed on is the timeout, as good as.

    Example:
        >>> seconds(5.99731), seconds(299.998)
        ('6 s', '300 s')
    """
    return f"{timeout:.3g} s" if timeout < 100 else f"{timeout:.0f} s"


class MismatchError(ValueError):
    """The processes of a group were about to do different things; each of them gets this error.

    Attributes:
        said: what each process was about to do.
    """

    def __init__(self, message: str, said: Mapping[int, str]) -> None:
        super().__init__(message)
        self.said = dict(said)


class PeerTimeout(TimeoutError):
    """Processes did not come in time.

    Attributes:
        processes: those that did not.
    """

    def __init__(self, message: str, processes: Iterable[int]) -> None:
        super().__init__(message)
        self.processes = tuple(processes)


class PeerLost(ConnectionError):
    """A process of the group has died, cannot be reached any more, or has left; the group is of no use any more.

    Attributes:
        process: the one that is gone.
    """

    def __init__(self, message: str, process: int) -> None:
        super().__init__(message)
        self.process = process


class HandshakeError(ConnectionError):
    """Whoever is at the other end of a connection could not prove that it belongs to this job."""


class FrameError(ConnectionError):
    """What came over a connection is not what jreshard sends."""
