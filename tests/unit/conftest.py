"""What unit tests share."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from elastic_ps.process import compiler
from elastic_ps.server.limits import USUAL, ServerLimits

compiler.defer()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(12) as pool:
        yield pool


@pytest.fixture
def limits() -> ServerLimits:
    """Of a parameter server; a test that needs others has a parameter of this name."""
    return USUAL
