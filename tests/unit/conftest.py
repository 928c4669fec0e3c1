"""What unit tests share: properties without a time limit for an example, which a busy machine would miss."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from hypothesis import settings

from elastic_ps.server import shard as shard_module

settings.register_profile("unit", deadline=None, max_examples=50)
settings.load_profile("unit")


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(12) as pool:
        yield pool


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard's blocked calls give up soon."""
    monkeypatch.setattr(shard_module, "WAIT", timedelta(milliseconds=100))
