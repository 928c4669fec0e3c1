"""A rank waits until mpirun has read its output, before it ends all ranks."""

from __future__ import annotations

import os
import tempfile
import threading
from datetime import timedelta

import pytest

from elastic_ps.collectives.over_mpi import await_read


def test_what_was_printed_has_been_read() -> None:
    reads, prints = os.pipe()
    os.write(prints, b"ValueError: no such file\n")
    read = threading.Event()

    def slowly() -> None:
        assert not over.wait(0.1)
        os.read(reads, 100)
        read.set()

    over, reader = threading.Event(), threading.Thread(target=slowly)
    reader.start()
    await_read(prints)
    over.set()
    reader.join()
    assert read.is_set()
    os.close(reads)
    os.close(prints)


@pytest.mark.parametrize("piped", [True, False])
def test_nobody_has_to_read_it(piped: bool) -> None:
    """A pipe that nobody reads is waited for until the time is over; a file is not."""
    reads, prints = os.pipe()
    os.write(prints, b"Traceback")
    with tempfile.TemporaryFile() as file:
        await_read(prints if piped else file.fileno(), timeout=timedelta(milliseconds=50))
    assert os.read(reads, 100) == b"Traceback"
    os.close(reads)
    os.close(prints)
