"""The messages encoded by hand are those of frame.proto, and nothing else is taken for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ps.errors import ElasticPSError, Malformed, RefusalCode, Refused
from elastic_ps.transport import frame_pb2
from elastic_ps.transport.base import Frame, Limits
from elastic_ps.transport.refusal import Blame, Refusal
from elastic_ps.transport.wire import CHUNK, MESSAGE_BYTES, Receiver, encode_refusal, fits, messages

SIZES = [0, 1, 127, 128, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7]


def receiver(stream: list[bytes], limits: Limits | None = None) -> Receiver:
    """Reads `stream`."""
    remaining: Iterator[bytes] = iter(stream)
    return Receiver(lambda: next(remaining, None), limits or Limits())


def opening(*, header_size: int = 0, body_size: int = 0) -> bytes:
    """A message that opens a frame and has nothing of it."""
    content = frame_pb2.Opening(header_size=header_size, body_size=body_size)
    return frame_pb2.Message(opening=content).SerializeToString()


@pytest.mark.parametrize("header_size", SIZES)
@pytest.mark.parametrize("body_size", SIZES)
def test_frames_are_the_messages_of_the_schema(header_size: int, body_size: int) -> None:
    frame = Frame(b"h" * header_size, memoryview(b"b" * body_size))
    encoded = list(messages(frame, "push"))
    parsed = [frame_pb2.Message.FromString(message) for message in encoded]
    assert parsed[0].opening == frame_pb2.Opening(method="push", header_size=header_size, body_size=body_size)
    assert not any(message.HasField("opening") for message in parsed[1:])
    assert b"".join(message.header for message in parsed) == frame.header
    assert b"".join(message.body for message in parsed) == bytes(frame.body)
    assert max(map(len, encoded)) <= MESSAGE_BYTES
    assert fits(frame) == (len(encoded) == 1)


@pytest.mark.parametrize("header_size", SIZES)
@pytest.mark.parametrize("body_size", SIZES)
def test_messages_of_the_schema_are_frames(header_size: int, body_size: int) -> None:
    header, body, step = b"h" * header_size, b"b" * body_size, 100_000
    stream = [opening(header_size=header_size, body_size=body_size)]
    for field, content in (("header", header), ("body", body)):
        for at in range(0, len(content), step):
            message = frame_pb2.Message()
            setattr(message, field, content[at : at + step])
            stream.append(message.SerializeToString())
    source = receiver(stream)
    frame = source.next()
    assert frame is not None
    target = bytearray(frame.size)
    frame.read_into(memoryview(target))
    assert (frame.header, bytes(target)) == (header, body)
    assert source.next() is None


@pytest.mark.parametrize("kind", list(Blame))
def test_refusals_are_messages_of_the_schema(kind: Blame) -> None:
    refusal = Refusal(kind, RefusalCode.STALE_TERM, "no")
    parsed = frame_pb2.Message.FromString(encode_refusal(refusal))
    assert parsed.refusal == frame_pb2.Refusal(kind=frame_pb2.Refusal.Kind.Name(kind), code=1, message="no")
    with pytest.raises(type(refusal.error()), match="no"):
        receiver([encode_refusal(refusal)]).next()


def test_a_code_of_a_newer_server_is_still_a_refusal() -> None:
    message = frame_pb2.Message(refusal=frame_pb2.Refusal(kind="REFUSED", code=999, message="new"))
    with pytest.raises(Refused, match="new") as caught:
        receiver([message.SerializeToString()]).next()
    assert caught.value.code is RefusalCode.UNSPECIFIED


def test_fields_of_a_newer_sender_are_skipped() -> None:
    unknown = b"\x28\x05" + b"\x32\x01x" + b"\x39" + bytes(8) + b"\x45" + bytes(4)
    (message,) = messages(Frame(b"header"))
    frame = receiver([unknown + message + unknown]).next()
    assert frame is not None
    assert frame.header == b"header"


BODY_2 = frame_pb2.Message(body=b"12").SerializeToString()
HEADER_2 = frame_pb2.Message(header=b"12").SerializeToString()


@pytest.mark.parametrize(
    "stream",
    [
        [b""],
        [BODY_2],
        [HEADER_2],
        [opening(body_size=2)],
        [opening(body_size=2), b""],
        [opening(body_size=2), opening()],
        [opening(body_size=2), HEADER_2],
        [opening(body_size=1), BODY_2],
        [opening(body_size=3), BODY_2],
        [opening(body_size=1) + BODY_2],
        [opening(header_size=2)],
        [opening(header_size=1), HEADER_2],
        [opening(header_size=3), HEADER_2],
        [opening(header_size=2), BODY_2],
        [opening(header_size=1001)],
        [opening(body_size=1001)],
        [opening(body_size=2**64 - 1)],
        [opening(body_size=2), b"\x1a\x05ab"],
        [b"\x0a"],
        [b"\x0a\x02\xff\xff"],
        [b"\xff" * 11],
        [b"\x00\x00"],
        [b"\x0b"],
        [b"\x09\x00"],
    ],
)
def test_what_does_not_follow_the_schema_is_malformed(stream: list[bytes]) -> None:
    source = receiver(stream, Limits(header_bytes=1000, body_bytes=1000))

    def consume() -> None:
        while (frame := source.next()) is not None:
            frame.read_into(memoryview(bytearray(frame.size)))

    with pytest.raises(Malformed):
        consume()


@given(
    st.lists(st.binary(max_size=64) | st.sampled_from([BODY_2, HEADER_2, opening(body_size=4)]), max_size=6)
)
def test_any_bytes_give_frames_or_an_error_of_ours(stream: list[bytes]) -> None:
    source = receiver(stream, Limits(header_bytes=100, body_bytes=100))
    try:
        while (frame := source.next()) is not None:
            assert len(frame.header) <= 100
            frame.read_into(memoryview(bytearray(frame.size)))
    except ElasticPSError:
        pass
