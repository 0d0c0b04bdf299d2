"""How processes agree before they move anything, and learn of each other's failures.

The processes that take part in transfers together are a *group*. Its *hub*, a small TCP server in the process with the
lowest index, tells who is there; each process has one connection to it.

    group = connect((0, 1), timeout=60)            # through jax.distributed; cached for each set of processes
    unsubscribe = group.on_failure(exchange.abort)  # reason: str; on the group's reader thread
    said = group.gather("transfer of 291 leaves, fingerprint 7451ad8b", {"rank": 0}, timeout=60)  # {0: ..., 1: ...}
    group.fail("out of memory")                     # the others' callbacks: "process 0: out of memory"

`gather` returns when all have called it, with what each has handed over. It raises `MismatchError` in every process if
they are about to do different things, `PeerTimeout` where the deadline passes (the group remains usable; who has left a
round is not counted), and `PeerLost` as soon as a process has died or left. The group is broken then, and `connect`
makes a new one. The callbacks hear of deaths, and not of processes that leave when they have done their part of what is
under way (`in_call`). Subscribe before gathering, so that no failure falls between.

`Hub` and `join` do the same without JAX, where address and token come by another way.
"""

from jreshard._control.errors import FrameError as FrameError
from jreshard._control.errors import HandshakeError as HandshakeError
from jreshard._control.errors import MismatchError as MismatchError
from jreshard._control.errors import PeerLost as PeerLost
from jreshard._control.errors import PeerTimeout as PeerTimeout
from jreshard._control.group import Group as Group
from jreshard._control.group import join as join
from jreshard._control.hub import Hub as Hub
from jreshard._control.rendezvous import connect as connect
