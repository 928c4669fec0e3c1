"""The ways in which a worker's steps become versions of the model.

The runtime makes these calls alone. `push_pull` pushes gradients to the parameter server, and pulls values.
`local_group` does that for a worker of several processes, which add up their gradients. With `all_reduce`
the workers add up gradients among themselves. In mode `local` a step is an exchange, by one of the first two.
`tests/integration/test_strategies.py` runs one script with each of them.
"""

# ruff: noqa: B027 (what a strategy need not do)

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from elastic_ps.api.consistency import Consistency
from elastic_ps.codec.plan import Plan
from elastic_ps.core.ledger import Range
from elastic_ps.core.partition import Bucket
from elastic_ps.core.settings import Made, Settings
from elastic_ps.errors import UsageError
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.worker.wire.dialogue import Step

W = TypeVar("W")


@dataclass
class VersionInfo:
    """The information that came with the last version.

    Attributes:
        settings: those in force, as JSON.
        stopped: why a script has ended the training; "" if none has.
        steps: in mode `local`, how many this worker makes by itself until its next exchange; 0 if that has
            not been said.
    """

    settings: str = ""
    stopped: str = ""
    steps: int = 0


class Strategy(ABC):
    """Makes one worker's steps. Belongs to the training thread, but for `begin` and `ready`.

    Gradient hooks call those two, one at a time, while the training thread waits in backward.

    Attributes:
        version: of the values that the model has; with bounded staleness, some may be newer.
        has_newer: a value of a version after 0 has come, or begun to come. Does not change between `reset`
            and the next call that asks for values.
        info: of the last version that came.
        under_way: the step that has begun, until it is made or forgotten.
        cannot_assign: why scripts cannot assign values; "" if they can.
    """

    cannot_assign = ""

    def __init__(self) -> None:
        self.version = 0
        self.has_newer = False
        self.info = VersionInfo()
        self.under_way: Step | None = None

    @property
    def takes_drafts(self) -> bool:
        """Whether hyperparameters are of use when a step begins; see `begin`."""
        return False

    @abstractmethod
    def begin(self, step: Step, settings: str = "", *, excluded: Set[int] = frozenset()) -> None:
        """The first gradient of a step is there. Does not block.

        Args:
            settings: the hyperparameters that the step will probably end with, as JSON; "" if that is not
                known, or of no use.
            excluded: buckets that the step is not about. Nothing is there of them, and the model keeps its
                values.
        """

    @abstractmethod
    def ready(self, bucket: Bucket, present: Sequence[bool]) -> None:
        """A bucket's contribution is complete.

        Args:
            present: which of its pieces have a gradient; empty for a bucket of buffers.
        """

    def backward_ended(self) -> None:
        """The script ends the step that is under way, if one is: what is sent from now on is waited for."""

    @abstractmethod
    def finish(self, ending: pb.FinishRequest) -> bool:
        """End the step, and wait for the version that it is part of. Blocks.

        Args:
            ending: what is said of the step, but for what its pushes say.

        Returns whether the model has that version. If not, this worker computes another step on the one
        before.

        Raises:
            Refused, ConnectionLost: the step could not be taken; the model keeps its version.
        """

    def start(self, ending: pb.FinishRequest) -> Future:
        """Begin to end the step. Meanwhile the script computes. For strategies that mode `local` has."""
        raise NotImplementedError

    @abstractmethod
    def fetch(self, version: int, *, contributor: bool, excluded: Set[int] = frozenset()) -> None:
        """Get all values of (at least) `version`, but for the buckets `excluded`. Blocks.

        Args:
            contributor: this worker takes part in the round on that version, and gets no newer one.
        """

    def has(self, version: int) -> bool:
        """Whether the model has the values of this version."""
        return self.version == version

    def computes_on(self, version: int) -> None:
        """The next step is computed on the present values; to the parameter server, they are of `version`."""

    def assign(self, step: Step, attempt: int) -> None:  # noqa: ARG002
        """Push the values that the contributions hold, for the round of `step`. Blocks.

        Raises:
            UsageError: `cannot_assign` says why.
            Refused: STALE_ATTEMPT, LATE: the round has started again; ask what to do.
        """
        raise UsageError(self.cannot_assign)

    def adopt(self, consistency: Consistency, codecs: Plan | None = None) -> None:
        """Use this consistency, and these codecs unless it is None, from now on. No step is under way."""

    def reset(self) -> None:
        """Forget the step under way and what went wrong: this worker has joined again."""
        self.under_way = None

    def hand_over(self) -> None:
        """This worker makes no more rounds: give the parameter server what nobody else has. Blocks."""

    def close(self) -> None:
        """Free everything. The client must be closed before, so that no thread blocks."""


class Queue(Generic[W]):
    """A strategy's work in the background, and the threads that begin it in order."""

    def __init__(self, name: str, work: Callable[[W], object]) -> None:
        self._name, self._work = name, work
        self._queue: queue.SimpleQueue[W | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.grow(1)

    def grow(self, count: int) -> None:
        """Have so many threads, at least."""
        while len(self._threads) < count:
            self._threads.append(threading.Thread(target=self._run, name=self._name, daemon=True))
            self._threads[-1].start()

    def _run(self) -> None:
        while (each := self._queue.get()) is not None:
            self._work(each)

    def put(self, each: W) -> None:
        """Add work. Does not block."""
        self._queue.put(each)

    def close(self) -> None:
        """End the threads. Blocks until all work is done."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()


class Future:
    """The end of a step, which goes on in a thread of its own from the beginning.

    Args:
        work: called in that thread; blocks until the step's version is there, and returns whether it is.
        give_up: lets `work` end soon, with an error.
        agree: called with what waits for `work`, to tell other processes of this worker of its end.
    """

    def __init__(
        self,
        work: Callable[[], bool],
        *,
        give_up: Callable[[], object] = lambda: None,
        agree: Callable[[Callable[[], bool]], bool] = lambda wait: wait(),
    ) -> None:
        self._work, self._give_up, self._agree = work, give_up, agree
        self._made = False
        self._error: BaseException | None = None
        self._over = threading.Event()  # a join that Ctrl-C interrupts takes the thread for ended
        threading.Thread(target=self._run, name="exchange", daemon=True).start()

    def _run(self) -> None:
        try:
            self._made = self._work()
        except BaseException as error:  # noqa: BLE001 (raised in the thread that waits)
            self._error = error
        finally:
            self._over.set()

    def wait(self) -> None:
        """Block until it is over, whatever comes of it."""
        self._over.wait()

    def _result(self) -> bool:
        self.wait()
        if self._error is not None:
            raise self._error
        return self._made

    def finish(self) -> bool:
        """Whether the version is there, in flat memory; the caller gives it to the model. Blocks.

        Raises as `Strategy.finish`.
        """
        return self._agree(self._result)

    def cancel(self) -> None:
        """Give the version up. Blocks until nothing of it is under way."""
        if not self._over.is_set():
            self._give_up()
        self.wait()


class Started(NamedTuple):
    """An exchange that goes on by itself.

    Attributes:
        settings: the hyperparameters that it ends with.
        number, ranges: of its step, and the records of that.
        version, made: what the model has meanwhile, and what that was made of.
    """

    future: Future
    settings: Settings
    number: int
    ranges: Sequence[Range]
    version: int
    made: Made


class LocalGradients(Protocol):
    """The gradients that the model's parameters have on this worker; see `gradients.Gradients`."""

    def void(self) -> None: ...
    def finite(self) -> bool: ...
    @property
    def may_make_a_step(self) -> bool: ...
    def note_by_hand(self) -> bool: ...


class LocalTraining(Protocol):
    """The steps that this worker makes by itself; see `local_steps.LocalSteps`."""

    made: int
    on_version: int
    started: Started | None

    def exchange(self) -> None: ...
    def void(self) -> None: ...
    def cancel(self) -> None: ...
