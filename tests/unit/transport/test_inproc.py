from __future__ import annotations

import gc
import threading
from typing import Any

from elastic_ps.transport.base import Frame
from elastic_ps.transport.inproc import InprocServer, connect
from tests.testing.polling import LIMIT
from tests.testing.transports import LONG, echo


def test_who_reads_a_request_may_collect_the_answers_as_garbage() -> None:
    """Dropping them ends the call, and that waits until nobody reads."""
    read, dropped, collected = threading.Event(), threading.Event(), threading.Event()

    class Late(Frame):
        @property
        def body(self) -> memoryview:
            read.set()
            dropped.wait(LIMIT)
            gc.collect()
            collected.set()
            return memoryview(b"late")

        @body.setter
        def body(self, _: memoryview) -> None:
            pass

    server = InprocServer()
    server.serve(echo)
    garbage: list[Any] = [connect(server).call("echo", Late(b""), timeout=LONG)]
    garbage.append(garbage)
    assert read.wait(LIMIT)
    del garbage
    dropped.set()
    assert collected.wait(LIMIT)
    server.close()
