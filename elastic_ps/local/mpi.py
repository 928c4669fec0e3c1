"""A job under `mpirun`: rank 0 is the launcher, the other ranks start the workers' processes.

`mpirun -n 5 elastic-ps run job.yaml` runs the command five times. Rank 0 does what it does on one machine;
where it would start a worker, it asks another rank to. MPI carries these orders, with the process's
certificate, and what becomes of the processes; gradients and values travel as they always do
(`transport.ways`). So workers may join, leave and be started again on a rank, and whatever ends `mpirun` ends
all of them.

A rank looks for messages every `LOOK`, since a receive that waits would keep a core busy. mpi4py is imported
only when it is used.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from elastic_ps.env import PREFIX, inherited
from elastic_ps.errors import ElasticPSError, UserError
from elastic_ps.local import issuer
from elastic_ps.local.processes import Child, Lifeline, with_threads

LOOK = timedelta(milliseconds=20)
"""How long a rank sleeps between two looks."""

ANSWER = timedelta(seconds=30)
"""How long a rank may take to start a process."""


@dataclass(frozen=True)
class _Start:
    """An order: start a process."""

    number: int
    argv: Sequence[str]
    variables: Mapping[str, str]
    log: str
    certificate: Mapping[str, bytes] | None = field(repr=False)


@dataclass(frozen=True)
class _Signal:
    """An order: end a process, or kill it at once."""

    number: int
    kill: bool


@dataclass(frozen=True)
class _Started:
    """An answer: the process runs, or `problem` says why not."""

    number: int
    pid: int
    problem: str = ""


@dataclass(frozen=True)
class _Ended:
    """An answer: the process has ended with this status, and these were its last lines."""

    number: int
    status: int
    output: str


@dataclass(frozen=True)
class _Finish:
    """An order: the job is over. The answer is the same, and the last message of a rank."""


class World:
    """All ranks of an `mpirun`. Belongs to one thread at a time.

    Raises:
        UserError: mpi4py is missing, or the MPI library allows calls from one thread only.
    """

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise UserError(
                f"this process was started by mpirun, but MPI cannot be used: {error}. Install mpi4py for "
                "this Python with `pip install 'elastic-ps[mpi]'`, and an MPI library: that of mpirun"
            ) from error
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise UserError(
                "the MPI library was built without threads; elastic-ps needs MPI_THREAD_SERIALIZED at least"
            )
        self.comm = MPI.COMM_WORLD
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.hosts: list[str] = self.comm.allgather(socket.gethostname())

    @property
    def address(self) -> str:
        """The address of this host at which the other ranks reach it.

        Raises:
            UserError: their hosts have no address that is known here.
        """
        others = sorted(set(self.hosts) - {self.hosts[self.rank]})
        if not others:
            return "127.0.0.1"
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.connect((others[0], 9))  # sends nothing, but chooses an address of this host
                address: str = sock.getsockname()[0]
        except OSError as error:
            text = f"rank {self.rank} does not know an address of {others[0]}, where another rank is: {error}"
            raise UserError(text) from error
        return address

    def abort(self) -> None:
        """End all ranks, and this process, with status 1."""
        self.comm.Abort(1)

    def send(self, message: object, rank: int) -> None:
        """Send a message. Blocks until the rank receives it, if it is not a small one."""
        self.comm.send(message, dest=rank)

    def post(self, message: object, rank: int) -> Callable[[], bool]:
        """Begin to send a message. Does not block; what is returned tells whether it is sent."""
        sent: Callable[[], bool] = self.comm.isend(message, dest=rank).Test
        return sent

    def receive(self) -> tuple[int, Any] | None:
        """The next message and the rank that has sent it; None if there is none. Does not block."""
        from mpi4py import MPI

        status = MPI.Status()
        if not self.comm.iprobe(source=MPI.ANY_SOURCE, status=status):
            return None
        source = status.Get_source()
        return source, self.comm.recv(source=source)


@dataclass
class _Remote:
    """A process on another rank, as rank 0 knows it."""

    slots: Slots
    rank: int
    number: int
    pid: int = 0
    status: int | None = None
    last: str = ""
    problem: str = ""

    def poll(self) -> int | None:
        """Its exit status once it has ended."""
        self.slots.listen()
        return self.status

    def terminate(self) -> None:
        """Ask it to end."""
        self._signal(kill=False)

    def kill(self) -> None:
        """Kill it and everything it has started."""
        self._signal(kill=True)

    def _signal(self, *, kill: bool) -> None:
        if self.status is None:
            self.slots.send(_Signal(self.number, kill), self.rank)

    def output(self) -> str:
        """The last lines that it wrote."""
        return self.last


@dataclass
class Slots:
    """The other ranks, on which rank 0 starts workers. Belongs to one thread at a time."""

    world: World
    _processes: dict[int, _Remote] = field(default_factory=dict)
    _finished: set[int] = field(default_factory=set)

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return self.world.size - 1

    def start(
        self,
        index: int,
        argv: Sequence[str],
        *,
        variables: Mapping[str, str],
        log: Path,
        certificate: Mapping[str, bytes] | None = None,
    ) -> _Remote:
        """Start worker `index` on the rank that has the fewest processes. Blocks until it runs.

        Args:
            variables: the contract's; all others are those of the rank.
            log: where the process writes, on that rank's machine.
            certificate: the files of the process's certificate, which the rank writes where `variables` says,
                on that rank's machine.

        Raises:
            ElasticPSError: it cannot be started.
        """
        running = [remote.rank for remote in self._processes.values() if remote.status is None]
        ranks = [1 + (index + offset) % self.count for offset in range(self.count)]
        rank = min(ranks, key=running.count)
        remote = _Remote(self, rank, len(self._processes))
        self._processes[remote.number] = remote
        self.send(_Start(remote.number, list(argv), dict(variables), str(log), certificate), rank)
        deadline = time.monotonic() + ANSWER.total_seconds()
        while not remote.pid:
            self.listen()
            if remote.problem:
                raise ElasticPSError(f"rank {rank} cannot start worker {index}: {remote.problem}")
            if time.monotonic() > deadline:
                raise ElasticPSError(f"rank {rank} has not started worker {index} within {ANSWER}")
            time.sleep(0.001)
        return remote

    def send(self, order: object, rank: int) -> None:
        """Give a rank an order. Listens meanwhile: the rank may be about to tell something, and has to be
        rid of that before it receives an order."""
        sent = self.world.post(order, rank)
        while not sent():
            self.listen()
            time.sleep(0.001)

    def listen(self) -> None:
        """Note what the ranks have told. Does not block."""
        while (found := self.world.receive()) is not None:
            rank, message = found
            if isinstance(message, _Finish):
                self._finished.add(rank)
                continue
            remote = self._processes[message.number]
            if isinstance(message, _Ended):
                remote.status, remote.last = message.status, message.output
            elif message.problem:
                remote.status, remote.problem = 1, message.problem
            else:
                # Two hosts may use the same number for a process; the launcher tells processes apart by it.
                here = self.world.hosts[rank] == self.world.hosts[0]
                remote.pid = message.pid if here else (rank << 22) + message.pid

    def close(self) -> None:
        """Let the other ranks end; what still runs there is killed. Blocks until they have told all."""
        for rank in range(1, self.world.size):
            self.send(_Finish(), rank)
        while len(self._finished) < self.count:
            self.listen()
            time.sleep(0.001)


def serve(world: World) -> None:
    """What a rank but 0 does: start processes and say what becomes of them, until the job is over. Blocks.

    If that fails, it ends all ranks: rank 0 would wait for ever to be told.
    """
    try:
        _serve(world)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        world.abort()
        raise


def _serve(world: World) -> None:
    beside = sum(host == world.hosts[world.rank] for host in world.hosts)
    children: dict[int, Child] = {}
    for number in (signal.SIGINT, signal.SIGTERM):  # mpirun sends them to all ranks, and rank 0 decides
        signal.signal(number, lambda *_: None)
    with contextlib.closing(Lifeline()) as lifeline:
        try:
            while True:
                found = world.receive()
                if found is None:
                    _tell_ends(world, children)
                    time.sleep(LOOK.total_seconds())
                    continue
                _, order = found
                if isinstance(order, _Finish):
                    world.send(order, 0)
                    return
                if isinstance(order, _Start):
                    world.send(_start(order, children, lifeline, beside), 0)
                elif child := children.get(order.number):
                    (child.kill if order.kill else child.terminate)()
        finally:
            for child in children.values():
                child.kill()


def _start(order: _Start, children: dict[int, Child], lifeline: Lifeline, beside: int) -> _Started:
    variables = {"PYTHONUNBUFFERED": "1", **inherited(), **order.variables}
    variables[f"{PREFIX}LIFELINE"] = str(lifeline.fd)
    try:
        if order.certificate is not None:
            issuer.write(Path(variables[f"{PREFIX}TLS_DIRECTORY"]), order.certificate)
        Path(order.log).parent.mkdir(parents=True, exist_ok=True)
        child = Child(
            [sys.executable, *order.argv[1:]],
            variables=with_threads(variables, processes=beside),
            log=Path(order.log),
            lifeline=lifeline,
        )
    except OSError as error:
        return _Started(order.number, 0, str(error))
    children[order.number] = child
    return _Started(order.number, child.pid)


def _tell_ends(world: World, children: dict[int, Child]) -> None:
    for number, child in list(children.items()):
        if (status := child.poll()) is not None:
            del children[number]
            world.send(_Ended(number, status, child.output() if status else ""), 0)
