"""An exchange that goes on while the script makes its next local steps: a thread awaits the version."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from elastic_ps.core.settings import Made, Settings


class Left(NamedTuple):
    """What the model was when an exchange began, and is until the version of the exchange is taken over."""

    version: int
    made: Made


class Flight:
    """The end of a step, on a thread of its own from the beginning on.

    Args:
        finish: blocks until the version of the step is there; returns whether it is.
        settings: the hyperparameters that the step ends with.
        number: of the step.
        left: the version that the model has meanwhile.
    """

    def __init__(self, finish: Callable[[], bool], settings: Settings, number: int, left: Left) -> None:
        self.settings, self.number, self.left = settings, number, left
        self._finish = finish
        self._made = False
        self._error: BaseException | None = None
        self._over = threading.Event()  # a join that Ctrl-C interrupts takes the thread for ended
        threading.Thread(target=self._run, name="flight", daemon=True).start()

    def _run(self) -> None:
        try:
            self._made = self._finish()
        except BaseException as error:  # noqa: BLE001 (raised in the thread that lands)
            self._error = error
        finally:
            self._over.set()

    def land(self) -> bool:
        """What `finish` returns. Blocks. Raises what it raises."""
        self._over.wait()
        if self._error is not None:
            raise self._error
        return self._made

    def abandon(self) -> None:
        """Block until it is over, whatever comes of it."""
        self._over.wait()
