"""The processes of one worker, and what they say to each other (`worker.processes`).

All of them run the script. Process 0 is the member of the job: it alone talks to the parameter server, and
tells the others each answer, so that all decide the same. That is a state machine that is replicated by its
inputs (Schneider 1990, "Implementing Fault-Tolerant Services Using the State Machine Approach"): what a
process does between two answers follows from them.

So all processes meet at each question, and process 0 compares where they are in the script. If they go
different ways, each gets an error that says so, and none waits for ever.

They speak over Unix sockets that the process which starts them has made, and that no other process has. A
process whose sockets close has ended, and its worker ends with it (`script`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NamedTuple, NoReturn, TypeVar

from elastic_ps.contract import exits
from elastic_ps.errors import ConnectionLost, ElasticPSError, Refused, UsageError
from elastic_ps.transport.memory import ALIGNMENT, Allocate, SharedMemory, pieces_of

DRAIN = "drain"
"""A process that was asked to leave proposes this."""

T = TypeVar("T")
M = TypeVar("M")

ENDING = timedelta(seconds=5)
"""How long a process waits to be ended with its worker before it reports that another one has ended."""


class Drained(SystemExit):
    """This worker was asked to leave and has done so; the process ends with `exits.LEFT`."""

    def __init__(self) -> None:
        super().__init__(exits.LEFT)


class Links(NamedTuple):
    """The sockets between process 0 and another one: for questions, and for gradients that are ready."""

    questions: Connection
    gradients: Connection


class _Arrival(NamedTuple):
    """A process has come to a question."""

    what: str
    mine: Any
    proposals: dict[str, str]


class _Answer(NamedTuple):
    """The message of process 0 to the others; `problem` is an exception's type and arguments."""

    value: Any
    proposals: dict[str, str]
    problem: tuple[type[ElasticPSError], tuple[Any, ...]] | None = None


class LocalWorld:
    """This process among those of its worker. Belongs to the training thread, but for `propose`.

    Args:
        rank: of this process, from 0.
        links: of process 0, those to the others, in order; of another one, those to process 0. None if the
            worker has a single process.
        size: how many processes there are.
        ending: how long it waits to be ended when another process of the worker has ended.
    """

    def __init__(
        self, rank: int = 0, links: Sequence[Links] = (), size: int = 1, *, ending: timedelta = ENDING
    ) -> None:
        self.rank, self.size, self.links, self._ending = rank, size, links, ending
        self._proposals: dict[str, str] = {}
        self._agreed: dict[str, str] = {}
        self._shared: list[SharedMemory] = []

    @property
    def leads(self) -> bool:
        """Whether this is process 0."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether the worker has a single process."""
        return self.size == 1

    def propose(self, name: str, value: str) -> None:
        """Propose something; all processes know of it from the next question on.

        May be called from a signal handler.
        """
        self._proposals.setdefault(name, value)

    def agreed(self, name: str) -> str:
        """The proposal of some process, as of the last question; "" if none has made one."""
        return (self._proposals if self.alone else self._agreed).get(name, "")

    def proposed(self, name: str) -> bool:
        """Whether this process has proposed it, or all know that some process has."""
        return name in self._proposals or name in self._agreed

    def decide(self, what: str, call: Callable[[], T]) -> T:
        """Like `gather`, without contributions."""
        return self.gather(what, None, lambda _: call())

    def gather(self, what: str, mine: M, call: Callable[[list[M]], T]) -> T:
        """Call, in process 0; returns in all processes what it returns, or raises what it raises. Blocks.

        Args:
            what: where the script is, in words.
            mine: what this process contributes; `call` gets those of all processes, in order.

        Raises:
            UsageError: another process is somewhere else in the script, or has ended.
            ElasticPSError: process 0 has failed for a reason of its own.
        """
        if self.alone:
            return call([mine])
        if not self.leads:
            told: T = self.ask(what, mine)
            return told
        arrivals = [_Arrival(what, mine, self._proposals.copy())]
        arrivals += [self._receive(rank, what) for rank in range(1, self.size)]
        for arrival in reversed(arrivals):
            self._agreed |= arrival.proposals
        try:
            _check_together(arrivals)
            value = call([arrival.mine for arrival in arrivals])
        except ElasticPSError as error:
            given = (error.code, str(error)) if isinstance(error, Refused) else (str(error),)
            self._tell(_Answer(None, self._agreed, (type(error), given)))
            raise
        except BaseException:
            failed = f"process 0 of this worker has failed at {what}; its own message says why"
            self._tell(_Answer(None, self._agreed, (ElasticPSError, (failed,))))
            raise
        self._tell(_Answer(value, self._agreed))
        return value

    def allocate(self, sizes: Sequence[int]) -> Allocate:
        """Memory that all processes share, for pieces of these sizes in bytes; all call this together.

        Raises:
            UsageError: the system has no such memory, or another process has ended.
        """
        where = "session.optimizer"
        size = sum(size + ALIGNMENT for size in sizes)
        if not self.leads:
            try:
                fd = recv_handle(self.links[0].questions)
            except (EOFError, OSError):
                self.raise_ended(0, where)
            try:
                return pieces_of(memoryview(mmap.mmap(fd, os.fstat(fd).st_size)))
            finally:
                os.close(fd)
        try:
            memory = SharedMemory(size)
        except (OSError, AttributeError) as error:
            raise UsageError(
                f"worker.processes needs {size} bytes of shared memory, which this system does not give: "
                f"{error}. Use processes: 1 and more replicas"
            ) from error
        self._shared.append(memory)  # for as long as the others may use it
        for rank, link in enumerate(self.links, start=1):
            try:
                send_handle(link.questions, memory.handle.fd, None)
            except OSError:
                self.raise_ended(rank, where)
        return memory.take

    def close(self) -> None:
        """Close the sockets: a process that waits for this one learns that it has ended."""
        for each in (connection for link in self.links for connection in link):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(each.fileno())) as own:
                own.shutdown(socket.SHUT_RDWR)  # a thread may wait for it
            each.close()

    def ask(self, what: str, mine: object) -> Any:
        """Like `gather`, in another process than process 0."""
        try:
            self.links[0].questions.send(_Arrival(what, mine, self._proposals.copy()))
        except OSError:
            self.raise_ended(0, what)
        answer: _Answer = self._receive(0, what)
        self._agreed = answer.proposals
        if answer.problem is not None:
            kind, given = answer.problem
            raise kind(*given)
        return answer.value

    def _receive(self, rank: int, what: str) -> Any:
        try:
            return self.links[max(0, rank - 1)].questions.recv()
        except (EOFError, OSError, TypeError):  # TypeError: another thread has closed it between two reads
            self.raise_ended(rank, what)

    def _tell(self, answer: _Answer) -> None:
        for rank, link in enumerate(self.links, start=1):
            try:
                link.questions.send(answer)
            except OSError:
                self.raise_ended(rank, "the answer")

    def raise_ended(self, rank: int, what: str) -> NoReturn:
        """Another process has ended while this one needs it: wait to be ended, too; see `script`.

        Raises:
            Drained: the worker was asked to leave.
            ConnectionLost: this process has closed its session meanwhile.
            UsageError: nobody has ended this process, since the other one's script came to its end.
        """
        if DRAIN not in self._proposals and not self.links[0].questions.closed:
            time.sleep(self._ending.total_seconds())
        if DRAIN in self._proposals:
            raise Drained
        if self.links[0].questions.closed:
            raise ConnectionLost("this process has left the job")
        raise UsageError(
            f"process {rank} of this worker has ended its script, but process {self.rank} is at {what}. With "
            "worker.processes all processes of a worker make the same steps and end together"
        )


def _check_together(arrivals: Sequence[_Arrival]) -> None:
    """Raise UsageError if the processes are at different places of the script."""
    first = arrivals[0].what
    for rank, arrival in enumerate(arrivals):
        if arrival.what != first:
            raise UsageError(
                f"the processes of this worker have taken different paths: process 0 is at {first}, process "
                f"{rank} at {arrival.what}. With worker.processes all of them make the same steps and skip "
                "the same batches. Look for what one of them does alone: a break, a step that a GradScaler "
                "skips, or a decision that depends on the loss of its own slice"
            )
