"""What integration tests share."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.testing.certificates import remove_pair
from tests.testing.polling import eventually
from tests.testing.transports import TRANSPORTS, World


@pytest.fixture(scope="session")
def certificates_of_transports() -> Iterator[None]:
    """Not by `atexit`, which the processes of pytest-xdist leave out."""
    yield
    remove_pair()


@pytest.fixture(params=TRANSPORTS, ids=lambda transport: transport.__name__)
def world(request: pytest.FixtureRequest, certificates_of_transports: None) -> Iterator[World]:
    before = set(threading.enumerate())
    world = World(request.param())
    yield world
    world.close()
    eventually(lambda: set(threading.enumerate()) <= before, "the threads end")
