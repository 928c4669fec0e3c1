"""Virtual time, and whose turn it is."""

from __future__ import annotations

import _thread
import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

TICK = 1e-6
"""Virtual seconds that a turn takes at least, so that no two events have the same time."""


class Killed(BaseException):
    """The process that the thread belongs to was killed."""


class Stuck(Exception):
    """Nobody can go on, or nobody comes to an end."""


@dataclass(eq=False)
class Process:
    """Threads that live and die together.

    Attributes:
        name: such as `worker-1#2`, the second process that is worker 1.
        dead: it was killed, or has ended.
        thaws: virtual time until which none of its threads runs.
        yields: how often one of its threads has come to where the turn may pass.
        doom: what happens at which of these.
    """

    name: str
    dead: bool = False
    thaws: float = 0.0
    yields: int = 0
    doom: dict[int, Callable[[], None]] = field(default_factory=dict)
    on_death: list[Callable[[], None]] = field(default_factory=list)


@dataclass(eq=False)
class Task:
    """A thread of a process."""

    name: str
    process: Process
    number: int
    turn: Any
    priority: float
    runnable: bool = True
    wait: int = 0  # counts its waits; a timer of an earlier one is void
    timed_out: bool = False
    done: bool = False
    joiners: list[Task] = field(default_factory=list)
    error: BaseException | None = None


class _Carrier:
    """A thread of the operating system that runs one task after the other."""

    idle: list[_Carrier] = []

    def __init__(self) -> None:
        self.work = _thread.allocate_lock()
        self.work.acquire()
        self.run: Callable[[], None] | None = None
        _thread.start_new_thread(self._loop, ())

    def _loop(self) -> None:
        while True:
            self.work.acquire()
            assert self.run is not None
            self.run()

    @classmethod
    def start(cls, run: Callable[[_Carrier], None]) -> None:
        carrier = cls.idle.pop() if cls.idle else cls()
        carrier.run = lambda: run(carrier)
        carrier.work.release()


class World:
    """One schedule. Everything in it happens in tasks, one at a time.

    Args:
        seed: of all decisions.
        switching: probability that the turn passes to somebody else where it may.
        stalling: probability that a thread is held up for a while where the turn may pass.
        most_turns: after so many turns the schedule counts as stuck.
    """

    current: World | None = None

    def __init__(
        self, seed: int, *, switching: float = 0.2, stalling: float = 0.0, most_turns: int = 2_000_000
    ) -> None:
        self.random = random.Random(seed)
        self.now = 1000.0
        self.turns = 0
        self.points = 0
        self.failures: list[tuple[str, BaseException]] = []
        self.log: list[str] = []
        self._switching, self._stalling, self._most_turns = switching, stalling, most_turns
        self._by_priority = self.random.random() < 0.3
        self._numbers = itertools.count()
        self._tasks: list[Task] = []
        self._runnable: list[Task] = []
        self._timers: list[tuple[float, int, Task, int]] = []
        self._task: Task | None = None
        self._over = _thread.allocate_lock()
        self._over.acquire()
        self._ending = False
        self._problem: Stuck | None = None
        self._at: list[tuple[int, int, Callable[[], None]]] = []

    # --- from outside

    def run(self, main: Callable[[], None]) -> None:
        """Run `main` as the first task, until it ends; then everything else is killed. Raises Stuck."""
        World.current = self
        try:
            process = Process("world")
            first = self.spawn(process, "main", lambda: self._main(main))
            self._task = first
            first.turn.release()
            self._over.acquire()
        finally:
            World.current = None
        if self._problem is not None:
            raise self._problem
        for name, error in self.failures:
            if name == "world main":
                raise error

    def _main(self, main: Callable[[], None]) -> None:
        try:
            main()
        finally:
            self._end()

    def _end(self) -> None:
        """Kill all tasks: each runs once more, to unwind."""
        self._ending = True
        for task in self._tasks:
            task.process.dead = True
            task.process.thaws = 0.0
            self._wake(task)

    # --- tasks

    @property
    def task(self) -> Task:
        """Whose turn it is."""
        assert self._task is not None
        return self._task

    @property
    def process(self) -> Process:
        return self.task.process

    def spawn(self, process: Process, name: str, target: Callable[[], None]) -> Task:
        """A new thread; it gets its turn later."""
        turn = _thread.allocate_lock()
        turn.acquire()
        task = Task(name, process, next(self._numbers), turn, self.random.random())
        self._tasks.append(task)
        self._runnable.append(task)

        def run(carrier: _Carrier) -> None:
            task.turn.acquire()
            try:
                if not process.dead:
                    target()
            except Killed:
                pass
            except BaseException as error:  # noqa: BLE001
                task.error = error
                if not process.dead:
                    self.failures.append((f"{process.name} {name}", error))
            self._finish(task, carrier)

        _Carrier.start(run)
        return task

    def _finish(self, task: Task, carrier: _Carrier) -> None:
        task.done = True
        task.runnable = False
        self._tasks.remove(task)
        if task in self._runnable:
            self._runnable.remove(task)
        for joiner in task.joiners:
            self._wake(joiner)
        _Carrier.idle.append(carrier)
        if not self._tasks:
            self._over.release()
            return
        following = self._pick()
        self._task = following
        following.turn.release()

    def kill(self, process: Process) -> None:
        """The process is gone at this moment."""
        if process.dead:
            return
        process.dead = True
        process.thaws = 0.0
        for callback in process.on_death:
            callback()
        for task in self._tasks:
            if task.process is process:
                self._wake(task)
        if self.process is process:
            raise Killed

    def freeze(self, process: Process, seconds: float) -> None:
        """None of its threads runs for that long."""
        process.thaws = max(process.thaws, self.now + seconds)

    # --- turns

    def preempt(self) -> None:
        """Here the turn may pass to somebody else."""
        task = self._yields()
        self.points += 1
        while self._at and self._at[0][0] <= self.points:
            heapq.heappop(self._at)[2]()
        self.now += TICK
        if self._stalling and self.random.random() < self._stalling:
            self.sleep(10 ** self.random.uniform(-3, 1))
        elif task.process.thaws > self.now:
            self._pass(task)
        elif len(self._runnable) > 1 and self.random.random() < self._switching:
            if self._by_priority:
                task.priority = self.random.random()
            self._pass(task)

    def _yields(self) -> Task:
        """The current task comes to where it may lose its turn, or its life."""
        task, process = self.task, self.process
        process.yields += 1
        if (doom := process.doom.pop(process.yields, None)) is not None:
            doom()
        if process.dead:
            raise Killed
        return task

    def at_point(self, number: int, action: Callable[[], None]) -> None:
        """Do something at the `number`-th possible change of turns from now on. `action` runs in any task."""
        heapq.heappush(self._at, (self.points + number, next(self._numbers), action))

    def sleep(self, seconds: float) -> None:
        self.block(max(0.0, seconds))

    def block(self, timeout: float | None) -> bool:
        """The current task waits until `wake`, or for `timeout` seconds; returns False after the latter."""
        task = self._yields()
        task.runnable = False
        task.timed_out = False
        task.wait += 1
        self._runnable.remove(task)
        if timeout is not None:
            self._timer(self.now + timeout, task)
        self._pass(task)
        return not task.timed_out

    def wake(self, task: Task) -> None:
        """`task` need not wait any longer."""
        self._wake(task)

    def _wake(self, task: Task) -> None:
        if not task.runnable and not task.done:
            task.runnable = True
            self._runnable.append(task)

    def _timer(self, when: float, task: Task) -> None:
        heapq.heappush(self._timers, (when, next(self._numbers), task, task.wait))

    def _pass(self, task: Task) -> None:
        following = self._pick()
        if following is not task:
            self._task = following
            following.turn.release()
            task.turn.acquire()
        if task.process.dead:
            raise Killed

    def _pick(self) -> Task:
        self.turns += 1
        if self.turns > self._most_turns and not self._ending:
            self._problem = Stuck(f"no end after {self.turns} turns, at {self.now - 1000:.1f} s")
            self._end()
        while True:
            self._fire()
            ready = [t for t in self._runnable if t.process.thaws <= self.now]
            if ready:
                if self._by_priority:
                    return max(ready, key=lambda t: t.priority)
                return ready[self.random.randrange(len(ready))]
            if not self._advance():
                waiting = sorted(f"{t.process.name} {t.name}" for t in self._tasks)
                self._problem = Stuck(f"everybody waits for ever: {', '.join(waiting)}")
                self._end()

    def _fire(self) -> None:
        while self._timers and self._timers[0][0] <= self.now:
            _, _, task, wait = heapq.heappop(self._timers)
            if not task.done and not task.runnable and task.wait == wait:
                task.timed_out = True
                self._wake(task)

    def _advance(self) -> bool:
        """Nobody can run: time moves to when somebody can."""
        times = [t.process.thaws for t in self._runnable]
        while self._timers:
            when, _, task, wait = self._timers[0]
            if task.done or task.runnable or task.wait != wait:
                heapq.heappop(self._timers)
                continue
            times.append(when)
            break
        if not times:
            return False
        self.now = max(self.now, min(times))
        return True

    def note(self, text: str) -> None:
        """For whoever looks at the schedule afterwards."""
        self.log.append(f"{self.now - 1000:10.6f} {text}")


def world() -> World:
    """The world of the thread that asks."""
    assert World.current is not None, "this runs in the simulator only"
    return World.current
