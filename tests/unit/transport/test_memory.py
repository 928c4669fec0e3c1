"""Memory that processes of a host share."""

from __future__ import annotations

import os

from elastic_ps.transport.memory import SharedMemory, place_of


def test_what_a_forked_child_writes_is_its_own_and_its_childrens() -> None:
    memory = SharedMemory(1).take(1)
    memory[0] = 1
    assert place_of(memory) is not None
    reading, writing = os.pipe()
    if not (child := os.fork()):
        memory[0] = 2
        shared = place_of(memory) is not None  # its place would be that of what the parent has
        if not os.fork():
            os.write(writing, bytes([memory[0], shared]))
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    assert os.read(reading, 2) == bytes([2, False])  # the end of it, if no child has written
    os.close(reading)
    assert memory[0] == 1
