"""What integration tests share."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.integration.transports import TRANSPORTS, World
from tests.polling import eventually


@pytest.fixture(params=TRANSPORTS, ids=lambda transport: transport.__name__)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    before = set(threading.enumerate())
    world = World(request.param())
    yield world
    world.close()
    eventually(lambda: set(threading.enumerate()) <= before, "the threads end")
