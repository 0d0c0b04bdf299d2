"""Which leaves differ, where processes were about to do different transfers."""

import contextlib
from collections.abc import Mapping, Sequence

from jreshard._control import MismatchError, PeerLost, PeerTimeout
from jreshard._deadline import Deadline
from jreshard._runtime.digest import digest
from jreshard._runtime.party import Party

_SHOWN = 3  # leaves; what made one differ mostly made others differ too
_PATIENCE = 10.0  # seconds; all have just heard of the mismatch


def name_differences(error: MismatchError, leaves: Sequence[str], party: Party, deadline: Deadline) -> MismatchError:
    """The error with the first leaves that differ, of each process; every process of the party calls this.

    Args:
        error: what they have been told.
        leaves: each leaf of this process in a line.
        party: the processes.
        deadline: when the transfer fails.

    Returns:
        The error as it was, where the processes cannot be asked or all their leaves are alike.
    """
    soon = Deadline.after(min(deadline.left, _PATIENCE))
    with contextlib.suppress(MismatchError, PeerLost, PeerTimeout):  # what is known is told without
        digests = party.agree("compare leaves", list(map(digest, leaves)), soon)
        places = _places(digests)
        mine = [leaves[i] if i < len(leaves) else "no further leaf" for i in places]
        if places:
            found = party.agree("show leaves that differ", mine, soon)
            return MismatchError("\n".join([str(error), *_lines(found)]), error.said)
    return error


def _places(digests: Mapping[int, Sequence[str]]) -> list[int]:
    """The first places where not all processes have the same."""
    most = max(map(len, digests.values()))
    padded = [[*mine, *[""] * (most - len(mine))] for mine in digests.values()]
    return [i for i, same_place in enumerate(zip(*padded, strict=True)) if len(set(same_place)) > 1][:_SHOWN]


def _lines(found: Mapping[int, Sequence[str]]) -> list[str]:
    """What each process has in each place, place after place."""
    by_place = zip(*found.values(), strict=True)
    return [f"  process {process}: {leaf}" for leaves in by_place for process, leaf in zip(found, leaves, strict=True)]
