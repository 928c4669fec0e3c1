"""The processes of a worker have the shares in its gradient that the script says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from elastic_ps.core.weights import shares_of
from elastic_ps.errors import UsageError


@pytest.mark.parametrize(
    ("said", "total", "shares"),
    [
        ([None, None, None], None, [0.5, 0.5, 0.0]),
        ([3.0, 1.0, None], 4.0, [0.75, 0.25, 0.0]),
        ([3.0, 1.0, 0.0], 4.0, [0.75, 0.25, 0.0]),
        ([0.0, 2.0, 0.0], 2.0, [0.0, 1.0, 0.0]),
    ],
)
def test_a_share_is_what_was_said_of_all_that_was_said(
    said: Sequence[float | None], total: float | None, shares: Sequence[float]
) -> None:
    assert shares_of(said, [0.5, 0.5, 0.0]) == (total, shares)


def test_a_process_that_says_nothing_is_not_one_that_says_0() -> None:
    with pytest.raises(UsageError, match=r"in only some of this worker's processes.*: 0 if"):
        shares_of([2.0, None], [0.5, 0.5])
    with pytest.raises(UsageError, match="got 0 in each process"):
        shares_of([0.0, 0.0, None], [0.5, 0.5, 0.0])
