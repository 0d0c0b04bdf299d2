"""Whoever does not know the token gets nothing out of a hub, and does it no harm."""

import os
import socket
import threading

import pytest
from control.helpers import TIMEOUT, together

from jreshard._control import HandshakeError, PeerLost, auth, join
from jreshard._control.frames import MAX_FRAME, encode

PAIR = (0, 1)


def dial(hub):
    sock = socket.create_connection(hub.address, TIMEOUT)
    assert receive(sock, len(auth.GREETING)) == auth.GREETING
    return sock, receive(sock, auth.NONCE_SIZE)


def receive(sock, size):
    data = b""
    while len(data) < size and (part := sock.recv(size - len(data))):
        data += part
    return data


def is_dropped(sock):
    """Waits until the hub has closed the connection; nothing else is sent before."""
    sock.settimeout(TIMEOUT)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def admitted(hub):
    """A connection that has proved to know the token, and has not joined yet."""
    sock, hub_nonce = dial(hub)
    nonce = auth.new_nonce()
    sock.sendall(nonce + auth.proof(hub.token, b"member", hub_nonce, nonce))
    assert receive(sock, auth.PROOF_SIZE) == auth.proof(hub.token, b"hub", hub_nonce, nonce)
    return sock


def assert_serves(member):
    a, b = member((7, 8), 7), member((7, 8), 8)
    calls = [lambda g=g: g.gather("x", None, TIMEOUT) for g in (a, b)]
    assert together(*calls) == [{7: None, 8: None}] * 2
    a.close()
    b.close()


def test_another_token_is_refused(hub, member):
    with pytest.raises(HandshakeError, match="may have another token"):
        join(hub.address, auth.new_token(), PAIR, 0, timeout=TIMEOUT)
    assert_serves(member)


def test_the_token_and_an_earlier_proof_are_of_no_use_again(hub):
    sock, hub_nonce = dial(hub)
    nonce = auth.new_nonce()
    answer = nonce + auth.proof(hub.token, b"member", hub_nonce, nonce)
    sock.sendall(answer)
    theirs = receive(sock, auth.PROOF_SIZE)
    for replay in (answer, hub_nonce + theirs):  # a member's proof, and the hub's own, for another nonce
        other, _ = dial(hub)
        other.sendall(replay)
        assert is_dropped(other)
        other.close()
    sock.close()


def serve_once(reply):
    """A server that is no hub: sends what `reply` makes of the member's answer."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run():
        with listener, listener.accept()[0] as sock:
            sock.settimeout(TIMEOUT)
            reply(sock)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return listener.getsockname(), thread


def test_a_hub_that_does_not_know_the_token_is_refused():
    def reply(sock):
        sock.sendall(auth.GREETING + auth.new_nonce())
        answer = receive(sock, auth.NONCE_SIZE + auth.PROOF_SIZE)
        sock.sendall(answer[auth.NONCE_SIZE :])  # the member's own proof, sent back

    address, thread = serve_once(reply)
    with pytest.raises(HandshakeError, match="does not know this job's token"):
        join(address, auth.new_token(), PAIR, 0, timeout=TIMEOUT)
    thread.join(TIMEOUT)


def test_another_kind_of_server_is_refused():
    address, thread = serve_once(lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"))
    with pytest.raises(HandshakeError, match="not a hub of this version"):
        join(address, auth.new_token(), PAIR, 0, timeout=TIMEOUT)
    thread.join(TIMEOUT)


def test_a_server_that_says_nothing_does_not_hold_a_member():
    release = threading.Event()
    address, thread = serve_once(lambda sock: release.wait(TIMEOUT))
    with pytest.raises(TimeoutError):
        join(address, auth.new_token(), PAIR, 0, timeout=0.2)
    release.set()
    thread.join(TIMEOUT)


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(ConnectionRefusedError):
        join(address, auth.new_token(), PAIR, 0, timeout=0.5)


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 63])
def test_who_does_not_complete_the_handshake_is_dropped(hasty_hub, noise):
    sock, _ = dial(hasty_hub)
    sock.sendall(noise)
    assert is_dropped(sock)
    sock.close()


def test_garbage_is_dropped_at_once_and_unread(hub, member):
    sock, _ = dial(hub)
    sock.sendall(os.urandom(4096))
    assert is_dropped(sock)
    sock.close()
    assert_serves(member)


def test_silent_connections_neither_block_nor_pile_up(hub, member, monkeypatch):
    monkeypatch.setattr("jreshard._control.hub._MAX_PENDING", 16)
    idle = [socket.create_connection(hub.address, TIMEOUT) for _ in range(60)]
    assert_serves(member)
    assert len(hub._pending) <= 16
    for sock in idle:
        sock.close()


def test_who_knows_the_token_and_does_not_join_is_dropped(hasty_hub):
    sock = admitted(hasty_hub)
    assert is_dropped(sock)
    sock.close()


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "enter", "call": 1, "what": "x", "payload": "jnull"},
        {"kind": "join", "processes": [0, 1], "process": 2, "peer": "", "silence": 1},
        {"kind": "join", "processes": [0, "1"], "process": 0, "peer": "", "silence": 1},
        {"kind": "join", "processes": [0, 1], "process": 0, "peer": "", "silence": 0},
        {"kind": "join", "processes": [0, 1], "process": 0, "peer": "", "silence": float("inf")},
        {"kind": "join", "processes": [0, 1], "process": 0, "peer": ""},
        {},
    ],
)
def test_who_joins_in_another_way_is_dropped(hub, member, message):
    sock = admitted(hub)
    sock.sendall(encode(message))
    assert is_dropped(sock)
    sock.close()
    assert_serves(member)


@pytest.mark.parametrize(
    "frame",
    [
        (MAX_FRAME + 1).to_bytes(4, "big"),
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x02no",
        encode({"kind": "enter", "call": "1", "what": "x", "payload": ""}),
        encode({"kind": "enter", "call": 1, "what": "x", "payload": {}}),
        encode({"kind": "other"}),
        encode({"kind": "join", "processes": [0, 1], "process": 1, "peer": "", "silence": 1}),
    ],
)
def test_a_member_that_talks_nonsense_is_named_and_the_hub_lives_on(hub, member, frame):
    a = member(PAIR, 0)
    sock = admitted(hub)
    sock.sendall(encode({"kind": "join", "processes": [0, 1], "process": 1, "peer": "evil", "silence": 30.0}) + frame)
    with pytest.raises(PeerLost, match=r"process 1 \(evil\) sent what jreshard does not send") as raised:
        a.gather("x", None, TIMEOUT)
    assert raised.value.process == 1
    sock.close()
    assert_serves(member)


def test_a_member_that_never_reads_does_not_hold_the_others(hub, member, monkeypatch):
    monkeypatch.setattr("jreshard._control.hub._MAX_BACKLOG", 1 << 16)
    a = member(PAIR, 0)
    sock = admitted(hub)
    sock.sendall(encode({"kind": "join", "processes": [0, 1], "process": 1, "peer": "deaf", "silence": TIMEOUT}))
    lost = threading.Event()
    a.on_failure(lambda _: lost.set())
    for _ in range(10_000):
        if lost.is_set():
            break
        a.fail("x" * 4096)
    assert lost.wait(TIMEOUT)
    with pytest.raises(PeerLost, match=r"process 1 \(deaf\) does not read what it is sent"):
        a.gather("x", None, TIMEOUT)
    sock.close()


def test_a_member_that_is_silent_is_given_up(hub, member):
    a = member(PAIR, 0)
    sock = admitted(hub)
    sock.sendall(encode({"kind": "join", "processes": [0, 1], "process": 1, "peer": "mute", "silence": 0.5}))
    with pytest.raises(PeerLost, match=r"process 1 \(mute\) has not been heard of for 0\.5 s"):
        a.gather("x", None, TIMEOUT)
    sock.close()
