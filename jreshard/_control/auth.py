"""Proof, in both directions, that the two ends of a connection know the same token, which never crosses it.

The hub sends a greeting and a nonce; the member answers with a nonce of its own and HMAC-SHA256, keyed by the token, of
both; so does the hub. Everything has a fixed length, so that a stranger can make the hub neither parse nor keep
anything. What follows is neither encrypted nor signed: this keeps out who can connect, not who can alter packets.
"""

import hmac
import secrets
import socket
import time

from jreshard._control.errors import HandshakeError

GREETING = b"jreshard control 1\n"
NONCE_SIZE = 32
PROOF_SIZE = 32


def new_token() -> bytes:
    """A token that nobody guesses."""
    return secrets.token_bytes(32)


def new_nonce() -> bytes:
    """A number that is used once."""
    return secrets.token_bytes(NONCE_SIZE)


def proof(token: bytes, role: bytes, hub_nonce: bytes, member_nonce: bytes) -> bytes:
    """What shows that `role`, which is b"hub" or b"member", knows the token. No end can send back the other's."""
    return hmac.digest(token, role + hub_nonce + member_nonce, "sha256")


def is_member(token: bytes, hub_nonce: bytes, answer: bytes) -> bool:
    """Whether `answer` is what a member that knows the token sends."""
    member_nonce, given = answer[:NONCE_SIZE], answer[NONCE_SIZE:]
    return hmac.compare_digest(given, proof(token, b"member", hub_nonce, member_nonce))


def authenticate(sock: socket.socket, token: bytes, deadline: float) -> None:
    """The member's side of the handshake.

    Args:
        sock: a blocking socket, connected to a hub.
        token: what both know.
        deadline: when to give up, by `time.monotonic`.

    Raises:
        HandshakeError: if the other side is not a hub, or does not know the token.
        TimeoutError: at the deadline.
    """
    if _receive(sock, len(GREETING), deadline) != GREETING:
        raise HandshakeError("what answers is not a hub of this version of jreshard")
    hub_nonce, member_nonce = _receive(sock, NONCE_SIZE, deadline), new_nonce()
    sock.sendall(member_nonce + proof(token, b"member", hub_nonce, member_nonce))
    answer = _receive(sock, PROOF_SIZE, deadline)
    if not hmac.compare_digest(answer, proof(token, b"hub", hub_nonce, member_nonce)):
        raise HandshakeError("the hub does not know this job's token")


def _receive(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the hub did not complete the handshake in time")
        sock.settimeout(left)
        part = sock.recv(size - len(data))
        if not part:
            raise HandshakeError("the hub closed the connection in the handshake: it may have another token")
        data += part
    return data
