import socket
from collections.abc import Iterator

import pytest

from jreshard._control.errors import FrameError
from jreshard._control.frames import Stream, encode, unwrap, wrap


@pytest.fixture
def pair() -> Iterator[tuple[Stream, Stream]]:
    left, right = socket.socketpair()
    streams = Stream(left, 1000), Stream(right, 1000)
    yield streams
    for stream in streams:
        stream.close()


def test_messages_arrive_in_order_and_whole(pair):
    left, right = pair
    left.send(encode({"a": 1}) + encode({"b": "é"}))
    right.fill()
    assert [right.message(), right.message(), right.message()] == [{"a": 1}, {"b": "é"}, None]


def test_a_message_may_arrive_byte_by_byte(pair):
    left, right = pair
    frame = encode({"a": [1, 2]})
    for i, byte in enumerate(frame):
        assert right.message() is None, i
        left.send(bytes([byte]))
        right.fill()
    assert right.message() == {"a": [1, 2]}


def test_what_the_kernel_does_not_take_is_kept_until_flushed():
    left, right = socket.socketpair()
    sender, receiver = Stream(left, 1 << 24), Stream(right, 1 << 24)
    text = "x" * (4 << 20)
    sender.send(encode({"text": text}))
    assert sender.backlog
    while (message := receiver.message()) is None:
        receiver.fill()
        sender.flush()
    assert message == {"text": text}
    assert not sender.backlog
    sender.close()
    receiver.close()


def test_a_frame_over_the_limit_is_refused_before_it_arrives(pair):
    left, right = pair
    left.send((1001).to_bytes(4, "big"))
    right.fill()
    with pytest.raises(FrameError, match="1001 bytes came; expected at most 1000"):
        right.message()


@pytest.mark.parametrize("body", [b"{", b"\xff\xff", b"[1]", b"[" * 900, b"1" * 900, b""])
def test_what_is_not_an_object_in_json_is_refused(pair, body):
    left, right = pair
    left.send(len(body).to_bytes(4, "big") + body)
    right.fill()
    with pytest.raises(FrameError):
        right.message()


def test_deep_nesting_is_refused():
    left, right = socket.socketpair()
    sender, receiver = Stream(left, 1 << 20), Stream(right, 1 << 20)
    body = b"[" * 60_000
    sender.send(len(body).to_bytes(4, "big") + body)
    while receiver.received < len(body):
        receiver.fill()
    with pytest.raises(FrameError):
        receiver.message()
    sender.close()
    receiver.close()


def test_the_other_sides_end_is_an_error(pair):
    left, right = pair
    left.close()
    with pytest.raises(ConnectionError, match="closed"):
        right.fill()


@pytest.mark.parametrize("payload", [b"", b"\x00\xff", None, 1.5, "text", [1, {"a": [None]}], {"bytes": "no"}])
def test_payloads_survive(payload):
    assert unwrap(wrap(payload)) == payload


@pytest.mark.parametrize("text", ["", "x", "b*", "j", "j[[[", "j" + "[" * 60_000])
def test_text_that_is_no_payload_is_refused(text):
    with pytest.raises(FrameError):
        unwrap(text)
