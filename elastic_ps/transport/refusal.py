"""Runs handlers, and sends their exceptions to the client; the same for every transport."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from elastic_ps.errors import Malformed, RefusalCode, Refused, TransportError
from elastic_ps.transport import frame_pb2
from elastic_ps.transport.base import Frame, Handler, Incoming

_LOG = logging.getLogger(__name__)

MESSAGE_CHARACTERS = 2000
"""The longest message; it may quote data of the client, so longer ones are cut."""


class Blame(enum.IntEnum):
    """The side at fault. The numbers are part of the protocol (`Refusal.Kind` in frame.proto)."""

    REFUSED = 1
    MALFORMED = 2
    FAILED = 3


@dataclass(frozen=True)
class Refusal:
    """The end of a call by an exception."""

    kind: Blame
    code: RefusalCode
    message: str

    @classmethod
    def of(cls, error: Exception) -> Refusal:
        """The refusal for an exception."""
        if isinstance(error, Refused):
            return cls(Blame.REFUSED, error.code, str(error)[:MESSAGE_CHARACTERS])
        if isinstance(error, Malformed):
            return cls(Blame.MALFORMED, RefusalCode.UNSPECIFIED, str(error)[:MESSAGE_CHARACTERS])
        message = f"the server failed: {type(error).__name__}: {error}"
        return cls(Blame.FAILED, RefusalCode.UNSPECIFIED, message[:MESSAGE_CHARACTERS])

    def message_of(self) -> frame_pb2.Refusal:
        """The protobuf message."""
        return frame_pb2.Refusal(
            kind=frame_pb2.Refusal.Kind.Name(self.kind),
            code=self.code,
            message=self.message.encode(errors="replace").decode(),
        )

    def to_bytes(self) -> bytes:
        """Encoded; see `from_bytes`."""
        return self.message_of().SerializeToString()

    @classmethod
    def from_bytes(cls, content: bytes) -> Refusal:
        """Read the output of `to_bytes`. Raises Malformed if it is something else."""
        try:
            parsed = frame_pb2.Refusal.FromString(content)
        except DecodeError as error:
            raise Malformed(f"not a refusal: {error}") from error
        known = {int(kind): kind for kind in Blame}
        codes = {int(code): code for code in RefusalCode}
        return cls(
            known.get(parsed.kind, Blame.FAILED),
            codes.get(parsed.code, RefusalCode.UNSPECIFIED),
            parsed.message,
        )

    def error(self) -> Exception:
        """The exception for the client to raise."""
        if self.kind is Blame.REFUSED:
            return Refused(self.code, self.message)
        return (Malformed if self.kind is Blame.MALFORMED else TransportError)(self.message)


def answers(
    handler: Handler, method: str, incoming: Incoming, *, alive: Callable[[], bool]
) -> Generator[Frame | Refusal, None, None]:
    """Run `handler`: its frames and, if it raises, a refusal as the last item.

    Closing this iterator closes the handler's.

    Args:
        alive: whether the client is still connected. Later exceptions are not logged.
    """
    try:
        yield from handler(method, incoming)
    except (Refused, Malformed) as error:
        yield Refusal.of(error)
    except Exception as error:  # noqa: BLE001 - whatever it is, the client has to learn of it
        _LOG.log(
            logging.ERROR if alive() else logging.DEBUG, "The handler of %s failed", method, exc_info=True
        )
        yield Refusal.of(error)
