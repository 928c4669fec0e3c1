"""What a worker's training thread waits for."""

from __future__ import annotations

from typing import cast

import pytest

from elastic_ps.errors import ConnectionLost
from elastic_ps.worker.awaited import FINISH, Awaited
from elastic_ps.worker.dialogue import Step


def test_what_went_wrong_with_a_step_is_nothing_of_the_next_one() -> None:
    awaited, step = Awaited((), lambda _: None), cast("Step", None)
    awaited.begin(step)
    awaited.expect({FINISH})
    awaited.fail(ConnectionLost("reset"), awaited.generation)
    with pytest.raises(ConnectionLost):
        awaited.wait(0.0)
    awaited.begin(step)
    awaited.expect({FINISH})
    awaited.arrived(FINISH, awaited.generation)
    assert awaited.wait(0.0)
