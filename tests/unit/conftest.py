"""What unit tests share."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from elastic_ps.server import shard as shard_module


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(12) as pool:
        yield pool


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard's blocked calls give up soon."""
    monkeypatch.setattr(shard_module, "WAIT", timedelta(milliseconds=100))
