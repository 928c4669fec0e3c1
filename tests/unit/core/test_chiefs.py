"""Who evaluates and saves at the end of an epoch."""

from __future__ import annotations

from elastic_ps.core.chiefs import Chiefs
from elastic_ps.core.membership import Member


def test_a_chief_that_leaves_its_loop_gives_up_the_epochs_that_it_was_not_told_of() -> None:
    one, other = (Member(worker, worker + 1, 0, "", 0, expires=1.0) for worker in range(2))
    chiefs, live = Chiefs(), {0: one, 1: other}
    assert chiefs.choose(one, 0, live=live, ledger=None, stopped=False)
    assert chiefs.tell(one, 0)
    assert chiefs.choose(other, 1, live=live, ledger=None, stopped=False)
    assert not chiefs.tell(other, 1)
    chiefs.resign(one)
    assert chiefs.of == {0: 0}
    assert chiefs.choose(other, 1, live={1: other}, ledger=None, stopped=False)
    assert chiefs.tell(other, 1)
