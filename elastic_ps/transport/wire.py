"""Frames as the protobuf messages that frame.proto describes, and back.

Bodies are encoded and parsed by hand: a tag, a length, the bytes. That costs one copy on each side, where
protobuf's classes cost two. Small parts use the generated classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from elastic_ps.contract.identity import Identity
from elastic_ps.errors import Malformed
from elastic_ps.transport import frame_pb2
from elastic_ps.transport.base import EMPTY, Frame, Limits
from elastic_ps.transport.refusal import Refusal
from elastic_ps.transport.views import flat, target_of

CHUNK = 1024 * 1024
"""The bytes of header and body in a message.

While training keeps every core busy, this takes 1.2 to 1.7 s of CPU time for a GB, both sides together, and
256 KiB take 1.8 to 2.6 s, because threads switch more often; 2 MiB gain nothing.
"""

MESSAGE_BYTES = CHUNK + 64 * 1024
"""The longest message that is accepted."""

_OPENING, _HEADER, _BODY, _REFUSAL = 1, 2, 3, 4
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def messages(frame: Frame, method: str = "") -> Iterator[bytes]:
    """The messages of `frame`. A chunk of the body is copied when its message is requested."""
    header, body = frame.header, flat(frame.body)
    opening = frame_pb2.Opening(method=method, header_size=len(header), body_size=len(body))
    first = frame_pb2.Message(opening=opening, header=header[:CHUNK]).SerializeToString()
    if len(header) + len(body) <= CHUNK:
        yield b"".join((first, _prefix(_BODY, len(body)), body)) if body else first
        return
    yield first
    for field, content, start in ((_HEADER, memoryview(header), CHUNK), (_BODY, body, 0)):
        for at in range(start, len(content), CHUNK):
            chunk = content[at : at + CHUNK]
            yield b"".join((_prefix(field, len(chunk)), chunk))


def encode_refusal(refusal: Refusal) -> bytes:
    """The message of `refusal`."""
    return frame_pb2.Message(refusal=refusal.message_of()).SerializeToString()


def fits(frame: Frame) -> bool:
    """Whether `frame` is sent as one message."""
    return len(frame.header) + frame.body.nbytes <= CHUNK


class Receiver:
    """Reads frames from a stream of messages. For one thread only."""

    def __init__(
        self, next_message: Callable[[], bytes | None], limits: Limits, peer: Identity | None = None
    ) -> None:
        """Read from `next_message`, which blocks, and returns None at the end of the stream.

        Args:
            peer: the sender of the frames, see `Incoming`.
        """
        self._next_message = next_message
        self._limits, self._peer = limits, peer
        self._frame: ReceivedFrame | None = None

    def next(self) -> ReceivedFrame | None:
        """Wait for the next frame, after discarding the unread rest of the previous one. None at the end.

        Raises:
            Refused, TransportError: the stream ends with a refusal.
            Malformed: the stream does not follow the protocol, or the frame exceeds the limits.
        """
        if self._frame is not None:
            self._frame.discard()
            self._frame = None
        message = self._next_message()
        if message is None:
            return None
        piece = _parse(message)
        if piece.refusal is not None:
            raise piece.refusal.error()
        if piece.opening is None:
            raise Malformed("a frame does not begin with an opening")
        opening = piece.opening
        what = opening.method or "answer"
        self._limits.check(what, header=opening.header_size, body=opening.body_size)
        header, body = self._header(piece, opening.header_size)
        if len(body) > opening.body_size:
            raise Malformed("a body is longer than announced")
        self._frame = ReceivedFrame(opening.method, header, opening.body_size, body, self._next_message)
        self._frame.peer = self._peer
        return self._frame

    def _header(self, piece: _Piece, size: int) -> tuple[bytes, memoryview]:
        """The whole header of a frame that begins with `piece`, and the first bytes of its body."""
        parts, missing = [piece.header], size - len(piece.header)
        while missing > 0:
            if piece.body:
                raise Malformed("a body begins before its header is complete")
            piece = _continuation(self._next_message)
            parts.append(piece.header)
            missing -= len(piece.header)
        if missing:
            raise Malformed("a header is longer than announced")
        return b"".join(parts), piece.body


class ReceivedFrame:
    """An `Incoming` whose body is still in the stream.

    It does not refer to its receiver: a cycle would leave gRPC's objects to the garbage collector. That may
    run in a forked child, where freeing them can wait forever for threads of the parent.

    Attributes:
        method: the called method; "" in an answer.
        header, size, transport, peer: see `Incoming`.
    """

    transport = "grpc"
    peer: Identity | None = None

    def __init__(
        self,
        method: str,
        header: bytes,
        size: int,
        first: memoryview,
        next_message: Callable[[], bytes | None],
    ) -> None:
        self.method, self.header, self.size = method, header, size
        self._first = first
        self._next_message = next_message
        self._taken = False

    def view(self) -> memoryview | None:
        """None: the body is in the stream."""
        return None

    def read_into(self, target: memoryview) -> None:
        """Write the body into `target`; see `Incoming.read_into`."""
        target = target_of(target, self.size)
        if self._taken:
            raise ValueError("the body has been read or discarded already")
        at = 0
        for chunk in self._chunks():
            target[at : at + len(chunk)] = chunk
            at += len(chunk)

    def discard(self) -> None:
        """Skip the unread rest."""
        if not self._taken:
            for _ in self._chunks():
                pass

    def _chunks(self) -> Iterator[memoryview]:
        self._taken = True
        chunk, self._first = self._first, EMPTY
        missing = self.size - len(chunk)
        if chunk:
            yield chunk
        while missing > 0:
            piece = _continuation(self._next_message)
            if piece.header:
                raise Malformed("a header is longer than announced")
            missing -= len(piece.body)
            if missing < 0:
                raise Malformed("a body is longer than announced")
            yield piece.body


@dataclass(slots=True)
class _Piece:
    """A parsed `Message`; the views are slices of it."""

    header: memoryview = EMPTY
    body: memoryview = EMPTY
    opening: frame_pb2.Opening | None = None
    refusal: Refusal | None = None


def _continuation(next_message: Callable[[], bytes | None]) -> _Piece:
    """The next message of a frame that has begun."""
    message = next_message()
    if message is None:
        raise Malformed("the stream ends within a frame")
    piece = _parse(message)
    if piece.refusal is not None:
        raise piece.refusal.error()
    if piece.opening is not None:
        raise Malformed("a frame begins within another")
    if not piece.header and not piece.body:
        raise Malformed("an empty message within a frame")
    return piece


def _parse(message: bytes) -> _Piece:
    view, piece, at = memoryview(message), _Piece(), 0
    while at < len(view):
        tag, at = _read_varint(view, at)
        field, kind = tag >> 3, tag & 7
        if kind == _BYTES:
            size, at = _read_varint(view, at)
            content, at = view[at : at + size], at + size
            if field == _BODY:
                piece.body = content
            elif field == _HEADER:
                piece.header = content
            elif field == _OPENING:
                piece.opening = _opening(content)
            elif field == _REFUSAL:
                piece.refusal = Refusal.from_bytes(bytes(content))
        elif kind == _VARINT:
            _, at = _read_varint(view, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise Malformed(f"not a message: wire type {kind}")
        if not field or at > len(view):
            raise Malformed("not a message: it ends within a field" if field else "not a message: field 0")
    return piece


def _opening(content: memoryview) -> frame_pb2.Opening:
    try:
        return frame_pb2.Opening.FromString(bytes(content))
    except DecodeError as error:
        raise Malformed(f"not an opening: {error}") from error


def _prefix(field: int, size: int) -> bytes:
    """The tag and the length of a bytes field."""
    encoded = bytearray((field << 3 | _BYTES,))
    while size > 0x7F:
        encoded.append(size & 0x7F | 0x80)
        size >>= 7
    encoded.append(size)
    return bytes(encoded)


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    """The number that begins at `at`, and its end."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(view):
            raise Malformed("not a message: it ends within a number")
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise Malformed("not a message: a number of more than ten bytes")
