"""States as tables: what a table lacks is refused in words, and the docs show what it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_ps.core import consistency, stages, working
from elastic_ps.core.consistency import Event, Phase
from elastic_ps.core.transitions import ImpossibleTransition, Transitions
from elastic_ps.data import states

DOCS = Path(__file__).parents[3] / "docs" / "design" / "architecture.md"


def test_what_cannot_happen_is_refused_with_what_can() -> None:
    assert consistency.PHASES.after(Phase.DECIDED, Event.COMMIT) is Phase.COMMITTING
    with pytest.raises(
        ImpossibleTransition,
        match=r"^the round is decided, where 'restart' cannot happen; what can is 'commit', 'undecide'$",
    ):
        consistency.PHASES.after(Phase.DECIDED, Event.RESTART)


TABLES = [
    consistency.PHASES,
    stages.STAGES,
    stages.COURSES,
    stages.ORDER_STATES,
    stages.STANDBY_STATES,
    working.WORKER,
    states.PARTS,
    states.LOOPS,
    states.HANDS,
]


@pytest.mark.parametrize("table", TABLES)
def test_the_docs_show_the_table_as_it_is(table: Transitions[Any, Any]) -> None:
    assert table.picture() in DOCS.read_text(), (
        f"docs/design/architecture.md needs this picture:\n{table.picture()}"
    )
