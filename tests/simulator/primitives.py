"""`threading`, `queue` and `time` as the simulator's threads have them.

The classes have those methods of the standard library's that the program uses, with the same meaning. Each
of them is a place where the turn may pass.
"""

from __future__ import annotations

import queue as real_queue
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from tests.simulator.world import Task, world


class Lock:
    """Held by one thread; `reentrant`, as often as that wants."""

    reentrant = False

    def __init__(self) -> None:
        self._owner: Task | None = None
        self.count = 0
        self._waiters: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        here = world()
        here.preempt()
        me = here.task
        if self.reentrant and self._owner is me:
            self.count += 1
            return True
        deadline = None if timeout < 0 else here.now + timeout
        while self._owner is not None and not self._owner.done:
            if not blocking or (deadline is not None and here.now >= deadline):
                return False
            self._waiters.append(me)
            here.block(None if deadline is None else deadline - here.now)
            if me in self._waiters:
                self._waiters.remove(me)
        self._owner, self.count = me, 1
        return True

    def release(self) -> None:
        here = world()
        if self._owner is not here.task:
            raise RuntimeError("release of a lock of somebody else")
        self.count -= 1
        if self.count:
            return
        self.free()
        if not here.process.dead:
            here.preempt()

    def free(self) -> None:
        self._owner = None
        for task in self._waiters:
            world().wake(task)
        self._waiters.clear()

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_exception: object) -> None:
        if self._owner is world().task:  # a killed thread may have lost it while it waited on a condition
            self.release()


class RLock(Lock):
    reentrant = True


class Condition:
    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or RLock()
        self._waiters: list[Task] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.__exit__(kind, error, trace)

    def wait(self, timeout: float | None = None) -> bool:
        here = world()
        me = here.task
        count, self._lock.count = self._lock.count, 0
        self._lock.free()
        self._waiters.append(me)
        try:
            woken = here.block(timeout)
        finally:
            if me in self._waiters:
                self._waiters.remove(me)
        self._lock.acquire()
        self._lock.count = count
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        deadline = None if timeout is None else world().now + timeout
        while not (result := predicate()):
            left = None if deadline is None else deadline - world().now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        for task in self._waiters[:n]:
            self._waiters.remove(task)
            world().wake(task)

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class Event:
    def __init__(self) -> None:
        self._changed = Condition()
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        with self._changed:
            self._set = True
            self._changed.notify_all()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._set, timeout))


class Thread:
    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name, self.daemon = name or "thread", daemon
        self._target, self._args, self._kwargs = target, tuple(args), dict(kwargs or {})
        self._task: Task | None = None

    @property
    def native_id(self) -> int:
        return self._task.number if self._task else 0

    ident = native_id

    def start(self) -> None:
        here = world()
        self._task = here.spawn(here.process, self.name, self.run)
        here.preempt()

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done

    def join(self, timeout: float | None = None) -> None:
        here = world()
        task = self._task
        if task is None or task.done:
            here.preempt()
            return
        task.joiners.append(here.task)
        here.block(timeout)
        if here.task in task.joiners:
            task.joiners.remove(here.task)


class _Current:
    def __init__(self, task: Task) -> None:
        self.name, self.native_id, self.ident = task.name, task.number, task.number


class Threading:
    """What stands in a module's `threading`."""

    Lock, RLock, Condition, Event, Thread = Lock, RLock, Condition, Event, Thread

    @staticmethod
    def current_thread() -> _Current:
        return _Current(world().task)

    @staticmethod
    def get_ident() -> int:
        return world().task.number


class SimpleQueue:
    def __init__(self) -> None:
        self._changed = Condition()
        self._items: deque[Any] = deque()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        with self._changed:
            if block:
                self._changed.wait_for(lambda: self._items, timeout)
            if not self._items:
                raise real_queue.Empty
            return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)

    @classmethod
    def __class_getitem__(cls, _item: Any) -> type[Self]:
        return cls


class Queue:
    """What stands in a module's `queue`."""

    SimpleQueue = Queue = SimpleQueue
    Empty = real_queue.Empty


class Time:
    """What stands in a module's `time`."""

    @staticmethod
    def monotonic() -> float:
        world().now += 1e-7
        return world().now

    @staticmethod
    def monotonic_ns() -> int:
        return round(Time.monotonic() * 1e9)

    @staticmethod
    def time() -> float:
        return 1.7e9 + world().now

    @staticmethod
    def sleep(seconds: float) -> None:
        world().sleep(seconds)
