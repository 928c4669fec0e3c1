from __future__ import annotations

import pytest

from elastic_ps.contract.words import amount


@pytest.mark.parametrize(("count", "said"), [(0, "0 pods"), (1, "1 pod"), (2, "2 pods")])
def test_only_one_is_singular(count: int, said: str) -> None:
    assert amount(count, "pod") == said
