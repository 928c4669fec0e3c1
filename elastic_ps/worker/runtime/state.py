"""Values that scripts keep with the job: see `Session.state`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from typing import Any

from elastic_ps.core import script_state
from elastic_ps.errors import RefusalCode, Refused, UsageError
from elastic_ps.transport import calls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.worker.runtime.membership import Membership
from elastic_ps.worker.wire.client import expelled

logger = logging.getLogger(__name__)


class ScriptState(MutableMapping[str, Any]):
    """The job's own small state; each use asks the parameter server. Belongs to the training thread.

    Values that were read cannot be changed in place: lists come as tuples, and dicts are read-only. To change
    a value, assign it. `update` changes several at once.
    """

    def __init__(self, member: Membership) -> None:
        self._member, self._client, self._world = member, member.client, member.world
        self._said: tuple[int, str] | None = None  # what this worker has written last, and at which version
        self._unsaid: str | None = None  # what it writes as soon as it has joined again

    def __getitem__(self, key: str) -> Any:
        return self._read()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __repr__(self) -> str:
        return f"ScriptState({self._read()!r})"

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def __delitem__(self, key: str) -> None:
        state = self._read()
        del state[key]
        self._write(state)

    def update(self, other: Any = (), /, **values: Any) -> None:
        """Update it like a dict, written in one call. Blocks.

        Raises:
            UsageError: this worker is not the chief; JSON cannot have a value; or it would be too large.
        """
        self._write({**self._read(), **dict(other, **values)})

    def repeat(self) -> None:
        """Write again, after joining again, what may be lost. Blocks. Raises Refused.

        If the job has gone back to a version before that, the state has gone back, too.
        """
        self._world.decide("session.state", self._say_again)

    def _say_again(self) -> None:
        self._unsaid = None
        if self._said is not None and self._said[0] > self._member.version:
            self._said = None
        if self._said is not None:
            self._say(self._said[1], again=True)

    def _read(self) -> dict[str, Any]:
        if not self._world.leads:
            raise UsageError(
                "session.state is read and written by process 0 of a worker: use it where session.is_chief "
                "is true, or where LOCAL_RANK is 0"
            )
        if self._unsaid is not None:
            return script_state.from_text(self._unsaid)
        return script_state.from_text(self._client.ask(calls.READ_STATE, pb.ReadStateRequest()).text)

    def _write(self, state: dict[str, Any]) -> None:
        if not self._member.entered:
            raise UsageError("call session.optimizer(...) before writing session.state")
        text = script_state.to_text(state)
        before, self._said = self._said, (self._member.version, text)
        with self._member.rejoining():  # a worker that joins again there writes again, by `repeat`
            try:
                self._say(text, again=False)
            except UsageError:
                self._said = before
                raise
            except Refused as refusal:
                if self._world.alone or not expelled(refusal):
                    raise
                self._unsaid = text  # all processes have to join again: at their next common call

    def _say(self, text: str, *, again: bool) -> None:
        try:
            self._client.ask(calls.WRITE_STATE, pb.WriteStateRequest(text=text, again=again))
        except Refused as refusal:
            if refusal.code is not RefusalCode.INVALID:
                raise
            self._said = None
            if not self._member.has_been_chief:
                raise UsageError(str(refusal)) from refusal
            logger.warning("the job ignores what this worker has written into session.state: %s", refusal)
