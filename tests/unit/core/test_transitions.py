"""States as tables: what a table lacks is refused in words."""

from __future__ import annotations

import pytest

from elastic_ps.core import consistency
from elastic_ps.core.consistency import Phase, RoundEvent
from elastic_ps.core.transitions import ImpossibleTransition


def test_what_cannot_happen_is_refused_with_what_can() -> None:
    assert consistency.PHASES.after(Phase.DECIDED, RoundEvent.COMMIT) is Phase.COMMITTING
    with pytest.raises(
        ImpossibleTransition,
        match=r"^the round is decided, where 'restart' cannot happen; possible: 'commit', 'undecide'$",
    ):
        consistency.PHASES.after(Phase.DECIDED, RoundEvent.RESTART)
