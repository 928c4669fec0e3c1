"""What `collectives.groups` has of `torch.distributed`: operations of processes that may die meanwhile.

An operation is done when all of a group have begun it, for each of them at another moment; only then are the
tensors read. If one dies, each of the others' operations is still done, or fails, as chance will have it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.simulator.primitives import Condition
from tests.simulator.world import Process, World, world


class Store:
    """A worker's store: others find it by the name of its process."""

    def __init__(self, host: str) -> None:
        self.host, self.address = host, f"{world().process.name}:1"


@dataclass(eq=False)
class _Work:
    """A process's part in an operation."""

    process: Process
    tensor: torch.Tensor
    begun: float
    changed: Condition = field(default_factory=Condition)
    over: bool = False
    error: str = ""

    def is_completed(self) -> bool:
        return self.over

    def end(self, error: str = "") -> None:
        if not self.over:
            self.over, self.error = True, error
            self.changed.notify_all()

    def wait(self, timeout: timedelta) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.over, timeout.total_seconds())
        if self.error or not self.over:
            raise RuntimeError(self.error or "timed out")


class Collectives:
    """All groups of a schedule. `network` is the process that messages belong to."""

    def __init__(self, here: World, network: Process) -> None:
        self.here, self.network = here, network
        self._groups: dict[tuple[str, str], _Group] = {}

    def module(self) -> SimpleNamespace:
        """What stands in `groups._c10d`."""

        def backend(place: tuple[str, str], rank: int, size: int, options: Any) -> _Backend:
            group = self._groups.setdefault(place, _Group(self, size))
            return _Backend(group, rank, options._timeout)  # noqa: SLF001  torch's name

        backend._Options = SimpleNamespace  # type: ignore[attr-defined]  # noqa: SLF001  likewise
        backend.create_device = lambda hostname: hostname  # type: ignore[attr-defined]
        return SimpleNamespace(
            TCPStore=lambda there, *_: there,
            PrefixStore=lambda name, there: (there, name),
            ProcessGroupGloo=backend,
        )


class _Group:
    """The processes that have come, by their ranks, and their operations in order."""

    def __init__(self, all_groups: Collectives, size: int) -> None:
        self.here, self.network, self.size = all_groups.here, all_groups.network, size
        self.there: dict[int, Process] = {}
        self.changed = Condition()
        self.operations: list[dict[int, _Work]] = []

    def come(self, rank: int, timeout: timedelta) -> None:
        process = self.here.process
        process.on_death.append(self._lost)
        with self.changed:
            self.there[rank] = process
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(self.there) == self.size, timeout.total_seconds())
        if len(self.there) < self.size or self._broken:
            raise RuntimeError("not all have come")

    @property
    def _broken(self) -> bool:
        return any(process.dead for process in self.there.values())

    def _lost(self) -> None:
        for works in self.operations:
            for work in works.values():
                if len(works) < self.size or self.here.random.random() < 0.5:
                    work.end("connection closed by peer")

    def begin(self, number: int, rank: int, work: _Work, result: Callable[[list[Any]], Any]) -> None:
        if len(self.operations) == number:
            self.operations.append({})
        works = self.operations[number]
        works[rank] = work
        if self._broken:
            work.end("connection closed by peer")
        elif len(works) == self.size:
            self.here.spawn(self.network, "operation", lambda: self._do(works, result))

    def _do(self, works: dict[int, _Work], result: Callable[[list[Any]], Any]) -> None:
        random = self.here.random
        self.here.sleep(random.uniform(0.0001, 0.002))
        found = result([works[rank].tensor for rank in range(self.size)]).clone()
        for work in random.sample([*works.values()], self.size):
            self.here.sleep(random.uniform(0, 0.001))
            if not (work.over or work.process.dead):
                work.tensor.copy_(found)
                work.end()


class _Backend:
    """What one process has of a group."""

    def __init__(self, group: _Group, rank: int, timeout: timedelta) -> None:
        self._group, self._rank, self._timeout, self._begun = group, rank, timeout, 0
        group.come(rank, timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> _Work:
        whole = torch.sum if options.reduceOp == dist.ReduceOp.SUM else torch.amax
        return self._begin(tensors[0], lambda given: whole(torch.stack(given), dim=0))

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> _Work:
        return self._begin(tensors[0], lambda given: given[options.rootRank])

    def _begin(self, tensor: torch.Tensor, result: Callable[[list[Any]], Any]) -> _Work:
        here = world()
        here.preempt()
        work = _Work(here.process, tensor, here.now)
        self._group.begin(self._begun, self._rank, work, result)
        self._begun += 1
        return work
