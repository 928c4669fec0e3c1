"""What the training thread waits for: the pushes of one step, and the buckets of a version.

The threads that send and receive say here what has arrived, or what has gone wrong. What was begun before a
`reset` means nothing after it: each of their calls says in which generation it was begun.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from elastic_ps.errors import ConnectionLost
from elastic_ps.worker.dialogue import Ending, Step

FINISH = -1
"""Among the missing buckets' indexes: the acknowledgement of the step's end."""


def end_of(shard: int) -> int:
    """Among the missing buckets' indexes: the end of a shard's answer to a pull."""
    return FINISH - 1 - shard


class Awaited:
    """One step, and what of a version has not arrived. Thread-safe.

    Who reads several attributes, or changes one, holds `lock`.

    Attributes:
        lock: that of `changed`; without that it is entered in a third of the time.
        changed: notified when nothing is missing any more, when something goes wrong, and by who sends.
        closing: set when everything is to end.
        generation: of what is under way.
        step: whose pushes have begun.
        attempt: of the round that the step is pushed for.
        ending: how the script has ended the step; None before it has.
        missing: the buckets that have not arrived, `FINISH`, and `end_of` shards.
        versions: of the buckets that have arrived; not of those that never change.
        error: what has gone wrong.
        at_restart: called, with the lock held, when the round starts again.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.closing = threading.Event()
        self.generation = 0
        self.step: Step | None = None
        self.attempt = 0
        self.ending: Ending | None = None
        self.missing: set[int] = set()
        self.versions: dict[int, int] = {}
        self.error: BaseException | None = None
        self.at_restart: list[Callable[[], object]] = []

    def begin(self, step: Step) -> None:
        """A step begins; the lock is held."""
        self.generation += 1  # a call for the step before may still be under way, if that was given up
        self.step, self.attempt, self.ending, self.error = step, 0, None, None

    def reset(self) -> None:
        """Forget the step under way and what went wrong."""
        with self.lock:
            self.generation += 1
            self.step, self.error, self.ending = None, None, None
            self.missing.clear()
            self.changed.notify_all()

    def close(self) -> None:
        """Everything is to end."""
        with self.lock:
            self.closing.set()
            self.changed.notify_all()

    def expect(self, what: Collection[int]) -> None:
        """Nothing of it has arrived. The lock is held."""
        self.missing = set(what)

    def arrived(self, what: int, generation: int, *, version: int | None = None) -> None:
        """A bucket, of this version if it has one, or the end of something."""
        with self.lock:
            if generation == self.generation:
                if version is not None:
                    self.versions[what] = version
                self.missing.discard(what)
                if not self.missing:
                    self.changed.notify_all()

    def fail(self, error: BaseException, generation: int) -> None:
        """Something has gone wrong; the first counts."""
        with self.lock:
            if generation == self.generation:
                self.error = self.error or error
                self.changed.notify_all()

    def restart(self, attempt: int, generation: int) -> None:
        """The round starts again: everything is to be pushed once more, for another attempt."""
        with self.lock:
            if generation == self.generation and attempt > self.attempt:
                self.attempt = attempt
                for call in self.at_restart:
                    call()
                self.changed.notify_all()

    def goes_on(self, generation: int) -> bool:
        """Whether what was begun in this generation is of use."""
        return generation == self.generation and not self.closing.is_set()

    def wait(self, seconds: float) -> bool:
        """Block until nothing is missing any more. Returns False if something still is.

        Raises:
            BaseException: what has gone wrong.
        """
        with self.lock:
            over = self.changed.wait_for(
                lambda: not self.missing or self.error is not None or self.closing.is_set(), timeout=seconds
            )
            if self.error is not None:
                raise self.error
            if self.missing and self.closing.is_set():
                raise ConnectionLost("this worker has left the job")
            return over
