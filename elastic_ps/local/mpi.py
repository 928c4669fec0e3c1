"""A job under `mpirun`: rank 0 is the launcher, the other ranks start the workers' processes.

`mpirun -n 5 elastic-ps run job.yaml` runs the command five times. Rank 0 works as on one machine, but asks
other ranks to start workers. MPI carries these orders, the certificates, and the ends of processes. Gradients
and values use the usual transports (`transport.ways`), or MPI as well (`relays`): then the ranks relay the
workers' connections (`local.relay`). Workers may join, leave and be restarted on a rank, and they all end
with `mpirun`.

A rank polls for orders every `LOOK`, since a blocking receive would keep a core busy. On rank 0, one thread
gives orders and another one relays; a lock lets only one of them call MPI at a time. mpi4py is imported on
demand.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_ps.contract.env import PREFIX, inherited, require_ranks
from elastic_ps.errors import CannotListen, ElasticPSError, UserError
from elastic_ps.local import issuer
from elastic_ps.local.processes import PIDS, Child, Lifeline, with_threads
from elastic_ps.process.lifecycle import take_descriptors
from elastic_ps.process.listening import address_towards

if TYPE_CHECKING:
    from elastic_ps.local.relay import Relay

LOOK = timedelta(milliseconds=20)
"""How long a rank sleeps between two looks."""

ANSWER = timedelta(seconds=30)
"""How long a rank may take to start a process."""

UNTIL_ALL_LISTEN = timedelta(seconds=1)
"""How long a rank that `srun` has started sends nothing at first.

Open MPI 5 crashes when a message reaches a rank that is still in MPI_Init (open-mpi/ompi, issue 11438), and
with Slurm's PMIx the ranks do not leave that at once: 2 of 40 starts crashed on a busy machine, and none of
70 with this pause.
"""

_ORDERS, _RELAYED = 1, 2
"""The tags of messages."""


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
    """An answer: the process runs, or `problem` says why not; `errno`: the number of an OSError, else 0."""

    number: int
    pid: int
    problem: str = ""
    errno: int = 0


@dataclass(frozen=True)
class _Ended:
    """An answer: the process has ended with this status, and these were its last lines."""

    number: int
    status: int
    output: str


@dataclass(frozen=True)
class _Finish:
    """An order: the job is over. Also the answer, which is the last message of a rank."""


class World:
    """All ranks of an `mpirun`. Only one thread at a time may give orders.

    Attributes:
        lock: held by the thread that calls MPI.

    Raises:
        UserError: mpi4py is missing, or the MPI library allows calls from one thread only, or is not that of
            `mpirun`.
    """

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise UserError(
                f"this process was started by mpirun, but MPI cannot be used: {error}. Install mpi4py for "
                "this Python with `pip install 'elastic-ps[mpi]'`, and the MPI library that mpirun belongs "
                "to"
            ) from error
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise UserError(
                "the MPI library was built without threads; elastic-ps needs at least MPI_THREAD_SERIALIZED"
            )
        self.comm, self.lock = MPI.COMM_WORLD, threading.Lock()
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        require_ranks(self.size)
        if "SLURM_PROCID" in os.environ:
            time.sleep(UNTIL_ALL_LISTEN.total_seconds())
        here = socket.gethostname(), os.sched_getaffinity(0)
        ranks: list[tuple[str, set[int]]] = self.comm.allgather(here)
        self.hosts = [host for host, _ in ranks]
        # The number of ranks that may run on a core of this one.
        self.beside = sum(host == here[0] and bool(cores & here[1]) for host, cores in ranks)

    @property
    def address(self) -> str:
        """The address of this host at which the other ranks reach it; IPv6 in brackets.

        Raises:
            UserError: their hosts have no address that is known here.
        """
        others = sorted(set(self.hosts) - {self.hosts[self.rank]})
        if not others:
            return "127.0.0.1"
        try:
            address = address_towards(f"{others[0]}:9", socket.AF_INET)
        except OSError as error:
            raise UserError(
                f"rank {self.rank} finds no address of the host {others[0]} of another rank: {error}. "
                "The hosts of all ranks have to reach each other by these names"
            ) from error
        return f"[{address}]" if ":" in address else address

    def abort(self) -> None:
        """End all ranks, and this process, with status 1."""
        self.comm.Abort(1)

    def post(self, message: object, rank: int) -> Callable[[], bool]:
        """Begin to send a message. Does not block. The result tells whether it is sent."""
        with self.lock:
            request = self.comm.isend(message, dest=rank, tag=_ORDERS)

        def sent() -> bool:
            with self.lock:
                return bool(request.Test())

        return sent

    def receive(self) -> tuple[int, Any] | None:
        """The next message and the rank that has sent it; None if there is none. Does not block."""
        from mpi4py import MPI

        status = MPI.Status()
        with self.lock:
            if not self.comm.iprobe(source=MPI.ANY_SOURCE, tag=_ORDERS, status=status):
                return None
            source = status.Get_source()
            return source, self.comm.recv(source=source, tag=_ORDERS)

    def relay(self) -> Relay:
        """The relay of the workers' connections through MPI in this rank. Rank 0 has the servers."""
        from elastic_ps.local.messages import Messages
        from elastic_ps.local.relay import Relay
        from elastic_ps.transport.mpi import name_of

        target = (lambda port: name_of(f"127.0.0.1:{port}")) if self.rank == 0 else None
        return Relay(Messages(self.comm, _RELAYED, self.lock), target=target)


class _Relaying:
    """The thread of rank 0 that relays. If it fails, it ends all ranks."""

    def __init__(self, world: World) -> None:
        take_descriptors()  # a descriptor for each connection of each worker
        self._world, self._relay = world, world.relay()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        relay, others = self._relay, frozenset(range(1, self._world.size))
        try:
            while not self._ending.is_set():
                relay.run(time.monotonic() + LOOK.total_seconds())
            relay.close(others)
            while relay.left != others or not relay.idle:
                relay.run(time.monotonic() + LOOK.total_seconds())
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            self._world.abort()
            raise

    def close(self) -> None:
        """End all connections. Blocks until the other ranks have, too."""
        self._ending.set()
        self._thread.join()


@dataclass
class _Remote:
    """A process on another rank, for rank 0."""

    slots: Slots
    rank: int
    number: int
    pid: int = 0
    status: int | None = None
    last: str = ""
    problem: str = ""
    errno: int = 0

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
        """The last lines of its output."""
        return self.last


class Slots:
    """The other ranks, on which rank 0 starts workers. For one thread at a time.

    Args:
        relays: whether the ranks relay the workers' connections through MPI. Each rank must agree (`serve`).
    """

    def __init__(self, world: World, *, relays: bool = False) -> None:
        self.world, self.relays = world, relays
        self._processes: dict[int, _Remote] = {}
        self._numbers = itertools.count()
        self._refused = Counter[int]()  # failed starts of each rank since its last successful one
        self._finished: set[int] = set()
        self._relaying = _Relaying(world) if relays else None

    @property
    def count(self) -> int:
        """The number of ranks."""
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
            variables: the contract's variables; the others are those of the rank.
            log: the process's log, on that rank's machine.
            certificate: the files of the process's certificate, which the rank writes to the directory that
                `variables` name, on that rank's machine.

        Raises:
            OSError: that rank's system refuses to start it, or the rank does not answer.
            ElasticPSError: that rank cannot start it.
        """
        running = [remote.rank for remote in self._processes.values() if remote.status is None]
        ranks = [1 + (index + offset) % self.count for offset in range(self.count)]
        rank = min(ranks, key=lambda rank: running.count(rank) + self._refused[rank])
        remote = _Remote(self, rank, next(self._numbers))
        self._processes[remote.number] = remote
        self.send(_Start(remote.number, list(argv), dict(variables), str(log), certificate), rank)
        deadline = time.monotonic() + ANSWER.total_seconds()
        while not remote.pid:
            self.listen()
            if remote.problem:
                self._refused[rank] += 1
                del self._processes[remote.number]
                if remote.errno:
                    raise OSError(remote.errno, f"rank {rank}: {remote.problem}")
                raise ElasticPSError(f"rank {rank} cannot start worker {index}: {remote.problem}")
            if time.monotonic() > deadline:
                self._refused[rank] += 1
                remote.kill()  # the rank gets this order after the one to start it
                seconds = ANSWER.total_seconds()
                raise TimeoutError(f"rank {rank} has not started worker {index} within {seconds:g} s")
            time.sleep(0.001)
        self._refused[rank] = 0
        return remote

    def send(self, order: object, rank: int) -> None:
        """Give a rank an order. Receives meanwhile, since the rank may have to send a message before it
        receives the order."""
        sent = self.world.post(order, rank)
        while not sent():
            self.listen()
            time.sleep(0.001)

    def listen(self) -> None:
        """Handle messages of the ranks. Does not block."""
        while (found := self.world.receive()) is not None:
            rank, message = found
            if isinstance(message, _Finish):
                self._finished.add(rank)
                continue
            remote = self._processes[message.number]
            if isinstance(message, _Ended):
                remote.status, remote.last = message.status, message.output
            elif message.problem:
                remote.status, remote.problem, remote.errno = 1, message.problem, message.errno
            else:
                # Two hosts may use the same pid, and the launcher needs unique numbers.
                here = self.world.hosts[rank] == self.world.hosts[0]
                remote.pid = message.pid if here else rank * PIDS + message.pid

    def close(self) -> None:
        """End the other ranks, killing what still runs there. Blocks until they have reported all ends."""
        if self._relaying is not None:
            self._relaying.close()
        for rank in range(1, self.world.size):
            self.send(_Finish(), rank)
        while len(self._finished) < self.count:
            self.listen()
            time.sleep(0.001)


def serve(world: World, *, relays: bool = False) -> None:
    """Run a rank other than 0: start processes and report their ends until the job is over. Blocks.

    After an error, end all ranks: otherwise rank 0 would wait for ever.

    Args:
        relays: see `Slots`.
    """
    try:
        _Rank(world, relays=relays).serve()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        world.abort()
        raise


class _Rank:
    """A rank other than 0, with its processes."""

    def __init__(self, world: World, *, relays: bool) -> None:
        self._world, self._children = world, dict[int, Child]()
        self._relay = world.relay() if relays else None
        self._name = f"rank{world.rank}-{uuid.uuid4().hex}"  # this host may have ranks of other jobs, too

    def serve(self) -> None:
        """See `serve`."""
        for number in (signal.SIGINT, signal.SIGTERM):  # mpirun sends them to all ranks, and rank 0 decides
            signal.signal(number, lambda *_: None)
        with contextlib.closing(Lifeline()) as lifeline:
            try:
                while True:
                    found = self._world.receive()
                    if found is None:
                        self._tell_ends()
                        self._wait(LOOK)
                        continue
                    _, order = found
                    if isinstance(order, _Finish):
                        self._tell(order)
                        return
                    if isinstance(order, _Start):
                        self._tell(self._start(order, lifeline))
                    elif child := self._children.get(order.number):
                        (child.kill if order.kill else child.terminate)()
            finally:
                for child in self._children.values():
                    child.kill()

    def _wait(self, period: timedelta) -> None:
        """Sleep, or relay meanwhile."""
        if self._relay is None:
            time.sleep(period.total_seconds())
            return
        self._relay.run(time.monotonic() + period.total_seconds())
        if self._relay.left:
            self._relay.close([0])

    def _tell(self, message: object) -> None:
        """Send rank 0 a message. Blocks until it is received, and relayed data is sent."""
        sent = self._world.post(message, 0)
        while not sent() or (isinstance(message, _Finish) and self._relay and not self._relay.idle):
            self._wait(timedelta(milliseconds=1))

    def _start(self, order: _Start, lifeline: Lifeline) -> _Started:
        variables = {"PYTHONUNBUFFERED": "1", **inherited(), **order.variables}
        variables[f"{PREFIX}LIFELINE"] = str(lifeline.fd)
        try:
            if self._relay is not None:
                places = self._listen(variables[f"{PREFIX}ADDRESSES"].split(","), self._relay)
                variables[f"{PREFIX}ADDRESSES"] = ",".join(places)
            if order.certificate is not None:
                issuer.write(Path(variables[f"{PREFIX}TLS_DIRECTORY"]), order.certificate)
            child = Child(
                [sys.executable, *order.argv[1:]],
                variables=with_threads(variables, processes=self._world.beside),
                log=Path(order.log),
                lifeline=lifeline,
            )
        except (OSError, CannotListen) as error:
            return _Started(order.number, 0, str(error), getattr(error, "errno", None) or 0)
        self._children[order.number] = child
        return _Started(order.number, child.pid)

    def _listen(self, addresses: Sequence[str], relay: Relay) -> list[str]:
        """The addresses by which workers on this host reach the servers at `addresses`, through this rank."""
        places = [f"{self._name}:{address.rpartition(':')[2]}" for address in addresses]
        for place in places:
            relay.listen(place)
        return [f"mpi:{place}" for place in places]

    def _tell_ends(self) -> None:
        for number, child in list(self._children.items()):
            if (status := child.poll()) is not None:
                del self._children[number]
                self._tell(_Ended(number, status, child.output() if status else ""))
