"""A process that is forked off a test, as a DataLoader does it: it has open what the test has open."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.testing.polling import LIMIT


@contextmanager
def forked() -> Iterator[None]:
    """Fork now. The process does nothing, and is killed in the end."""
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(2 * LIMIT,), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()
