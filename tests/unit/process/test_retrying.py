"""What may pass is tried again, and nothing else; a parameter server waits for its checkpoint directory."""

from __future__ import annotations

from datetime import timedelta

import pytest

from elastic_ps.errors import (
    AskedToEnd,
    CheckpointCorrupt,
    ConnectionLost,
    DeadlineExceeded,
    RefusalCode,
    Refused,
    StorageUnavailable,
)
from elastic_ps.process.retrying import Patience, Pauses, retry

FULL = StorageUnavailable("no space left")
AWAY = Refused(RefusalCode.NOT_READY, "shard 1 cannot read its part")
LATE = DeadlineExceeded("shard 1 still reads its part")
GONE = ConnectionLost("shard 1 is not there yet")


class Flaky:
    """An action that raises these errors first; it keeps what `patience` said meanwhile."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.told = list(errors), [""]
        self.patience = Patience(lambda: len(self.told) > 9, pause=timedelta(milliseconds=1))

    def __call__(self) -> int:
        self.told.append(self.patience.problem)
        if self.errors:
            raise self.errors.pop(0)
        return 7


def test_it_tries_again_until_there_is_room_and_says_what_it_waits_for() -> None:
    action, cleared = Flaky(FULL, FULL, AWAY, LATE, GONE), []
    assert action.patience.until_done(action, between=lambda: cleared.append(1)) == 7
    assert action.told[1:] == ["", *map(str, (FULL, FULL, AWAY, LATE, GONE))]
    assert action.patience.problem == ""
    assert len(cleared) == 5


def test_it_ends_when_it_is_asked_to() -> None:
    action = Flaky(*[FULL] * 100)
    with pytest.raises(AskedToEnd, match="no space left"):
        action.patience.until_done(action)


@pytest.mark.parametrize(
    "error", [CheckpointCorrupt("broken"), Refused(RefusalCode.STALE_TERM, "old"), OSError("unforeseen")]
)
def test_what_waiting_cannot_mend_is_raised(error: Exception) -> None:
    action = Flaky(error)
    with pytest.raises(type(error)):
        action.patience.until_done(action)


def test_pauses_grow_up_to_the_longest_and_begin_again() -> None:
    pauses = Pauses(1.0, 3.0)
    assert [pauses.next() for _ in range(4)] == [1.0, 2.0, 3.0, 3.0]
    pauses.reset()
    assert pauses.next() == 1.0


def test_a_refusal_that_does_not_pass_is_not_retried() -> None:
    refusals = [Refused(RefusalCode.INVALID, "wrong"), AWAY]

    def refuse() -> None:
        raise refusals.pop()

    with pytest.raises(Refused, match="wrong"):
        retry(refuse, Refused, patience=timedelta(minutes=1), pause=timedelta(0))
    assert not refusals
