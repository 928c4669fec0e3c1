"""Checks whether a job fits in the memory and on the disk of this host, as far as its model tells.

`shortages` follows the tables of docs/guides/resources.md.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from elastic_ps.api.job import TrainingJobSpec

PROCESS = 300_000_000
"""The bytes of a process with Python, torch and its libraries."""

LATELY = 3.0
"""Seconds in which the end of a process that the kernel has killed is seen."""


class Room(NamedTuple):
    """Bytes of memory and of disk."""

    memory: float
    disk: float


def free_memory(*, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """The bytes of memory that new processes can have; infinite if the system does not tell.

    Args:
        proc: where Linux tells of the host.
        cgroup: the directory in which a container sees its own cgroup (version 2).
    """
    free = math.inf
    with contextlib.suppress(OSError, StopIteration, ValueError):
        free = _field(proc / "meminfo", "MemAvailable:") * 1024
    with contextlib.suppress(OSError, StopIteration, ValueError):  # there may be no limit
        limit, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        # The kernel frees the cache of files that were not used lately when processes need memory.
        used -= _field(cgroup / "memory.stat", "inactive_file")
        free = min(free, max(0, limit - used))
    return free


class Kills:
    """Notices that the kernel of this host kills processes because there is no memory left.

    It counts those of all containers of the host, and does not tell which.
    """

    def __init__(self, *, proc: Path = Path("/proc")) -> None:
        self._counters, self._seen = proc / "vmstat", math.inf
        self._looked = self._last = -math.inf

    def look(self, now: float) -> None:
        """Read the count, if that was not done in the last second."""
        if now - self._looked >= 1.0:
            self.lately(now)

    def lately(self, now: float) -> bool:
        """Whether it has killed one in the last seconds; false if the system does not tell.

        A process may take a while to end then, so that its end is seen later.
        """
        self._looked = now
        with contextlib.suppress(OSError, StopIteration, ValueError):
            before, self._seen = self._seen, _field(self._counters, "oom_kill ")
            self._last = now if self._seen > before else self._last
        return now - self._last < LATELY


def _field(path: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(name))


def disk_for(checkpoints: Path) -> float:
    """The bytes that checkpoints in this directory can have; infinite if that cannot be told.

    Those that lie there count as free: new ones replace them.
    """
    with contextlib.suppress(OSError):
        there = next(each for each in (checkpoints, *checkpoints.parents) if each.exists())
        old = sum(path.lstat().st_size for path in checkpoints.glob("*-*/*"))
        return shutil.disk_usage(there).free + old
    return math.inf


def needed(spec: TrainingJobSpec, values: int, state: int, *, workers: int) -> Room:
    """The room that a job needs with `workers` on this host, besides what its scripts compute.

    Args:
        values: the bytes of the model's parameters and buffers.
        state: the bytes of the optimizer's state.
    """
    server, worker, evaluator = spec.parameter_server, spec.worker, spec.evaluator
    standbys = server.durability == "standby"
    encoded = 0 if spec.compression.values == "none" else values
    servers = 2 * values + state + max(1 << 24, (values + state) // 16) + encoded
    each = 3 * values + (state if spec.steps_on_workers else 0) + (worker.processes - 1) * values
    processes = server.replicas * (1 + standbys) + workers * worker.processes + (evaluator is not None)
    beside = values if evaluator is not None else 0
    memory = (1 + standbys) * servers + workers * each + beside + processes * PROCESS
    kept = server.checkpoint.keep + 1 + (0 if evaluator is None else evaluator.backlog + 2)
    copies = 0 if spec.compression.values == "changed" else encoded
    return Room(memory, kept * (values + state + copies))


def shortages(need: Room, free: Room) -> Iterator[str]:
    """Say what a job lacks: the figures, and what to change."""
    if need.memory > free.memory:
        yield (
            f"the job needs some {_size(need.memory)} of memory on this host, besides what its scripts use; "
            f"{_size(free.memory)} were free when it started, so the system may kill processes. Lower "
            "worker.replicas, use an optimizer with less state, or use a host with more memory "
            "(docs/guides/resources.md)"
        )
    if need.disk > free.disk:
        yield (
            f"the job's checkpoints need {_size(need.disk)} of disk, and {_size(free.disk)} are free "
            "or used by older checkpoints. Lower parameterServer.checkpoint.keep, or name a directory on a "
            "larger disk in parameterServer.checkpoint.path"
        )


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.2f} GB"
