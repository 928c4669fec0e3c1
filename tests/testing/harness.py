"""A whole job inside one test process: parameter servers and workers as threads, over any transport."""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Literal

import torch

from elastic_ps.api.compression import Compression
from elastic_ps.api.consistency import Consistency
from elastic_ps.api.job import TrainingJobSpec, parse_spec
from elastic_ps.api.mutable import MutableFields
from elastic_ps.contract.env import ProcessEnvironment, Resume
from elastic_ps.local.state import write_atomically
from elastic_ps.process.telemetry import History, Trace
from elastic_ps.server.limits import USUAL, ServerLimits
from elastic_ps.server.process import ParameterServer
from elastic_ps.transport import calls
from elastic_ps.transport.base import Connection, Frame, Server
from elastic_ps.worker.session import Session
from elastic_ps.worker.wire.dialogue import USUAL as USUAL_OF_WORKERS
from elastic_ps.worker.wire.dialogue import WorkerLimits
from elastic_ps.worker.wire.local_world import ENDING, Links, LocalWorld
from tests.testing.coordinator import Asked
from tests.testing.polling import LIMIT, eventually, while_moving
from tests.testing.transports import BY_NAME
from tests.testing.watched import Watched


def make_spec(**fields: Any) -> TrainingJobSpec:
    """A spec; `fields` are top-level ones, as in YAML."""
    return parse_spec({"entrypoint": "tests:main", **fields}, source="test")


@dataclass
class Job:
    """The parameter servers of a job, and the threads that work for it."""

    spec: TrainingJobSpec
    servers: list[ParameterServer]
    open_connections: Callable[[], list[Connection]]
    history: Path
    traces: Path | None
    restart: Callable[[int], None]
    restart_standby: Callable[[int], None]
    rival: Callable[[], AbstractContextManager[ParameterServer]]
    wishes: Path
    threads: list[threading.Thread] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    worker_limits: WorkerLimits = USUAL_OF_WORKERS
    on_hung: Callable[[str], None] | None = None
    through: Callable[[int, Connection], Connection] = lambda _, connection: connection
    """What a worker's connections go through: that of each shard, of the worker of this index."""

    def change(self, generation: int, **consistency: Any) -> None:
        """Let a person want another consistency; `consistency` are its fields, as in YAML."""
        self._wish(generation, consistency=Consistency.model_validate(consistency))

    def encode(self, generation: int, **compression: Any) -> None:
        """Let a person want another compression; likewise."""
        self._wish(generation, compression=Compression.model_validate(compression))

    def _wish(self, generation: int, **update: Any) -> None:
        wanted = MutableFields.of(self.spec, generation=generation).model_copy(update=update)
        write_atomically(self.wishes, wanted.to_json())

    def changed(self, generation: int) -> bool:
        """Whether that is in force."""
        return int(self.status().tuning.generation) >= generation

    def session(self, worker: int, world: LocalWorld | None = None) -> Session:
        """A new session, to be used in the calling thread. `world`: of a worker with several processes."""
        leads = world is None or world.leads
        session = Session(
            "test",
            self.spec,
            worker,
            [self.through(worker, each) for each in self.open_connections()],
            trace=Trace(self.traces if leads else None, f"worker-{worker}"),
            history=History(self.history if leads else None, f"worker-{worker}"),
            world=world,
            limits=self.worker_limits,
            on_hung=self.on_hung,
        )
        # To be closed in this order: the other processes of a worker ask process 0.
        self.sessions.insert(len(self.sessions) if leads else 0, session)
        return session

    def start_processes(
        self, worker: int, script: Callable[[Session, int], Any], *, ending: timedelta = ENDING
    ) -> None:
        """Run `script(session, rank)` as each of a worker's processes, in threads; see `start`."""
        size = self.spec.worker.processes
        pairs = [(Pipe(), Pipe()) for _ in range(size - 1)]
        links = [[Links(*(ends[0] for ends in pair)) for pair in pairs]]
        links += [[Links(*(ends[1] for ends in pair))] for pair in pairs]
        for rank in range(size):
            self.start(worker, _of_rank(script, rank), LocalWorld(rank, links[rank], size, ending=ending))

    def start(
        self, worker: int, script: Callable[[Session], Any], world: LocalWorld | None = None
    ) -> threading.Thread:
        """Run `script(session)` as a worker in a thread; what it raises is raised by `join`."""

        def run() -> None:
            session, raised = self.session(worker, world), list[BaseException]()
            try:
                script(session)
            except SystemExit:
                pass
            except BaseException as error:  # noqa: BLE001
                raised.append(error)
            finally:
                session.close()  # before others learn of the error, who would close it, too
            self.errors += raised

        thread = threading.Thread(target=run, name=f"worker-{worker}")
        self.threads.append(thread)
        thread.start()
        return thread

    def begin_together(self, workers: int) -> None:
        """No worker gets records before all have asked for some, so that none trains all alone."""
        begin, asked = threading.Barrier(workers), set[int]()

        def through(worker: int, inner: Connection) -> Connection:
            def before(method: str, _: Frame) -> None:
                if method == calls.TAKE.name and worker not in asked:
                    asked.add(worker)
                    begin.wait(LIMIT)

            return Watched(inner, before)

        self.through = through

    def run(self, script: Callable[[Session], Any], *, workers: int) -> None:
        """Start that many workers with the same script, and wait for all of them; see `start` and `join`."""
        for worker in range(workers):
            self.start(worker, script)
        self.join()

    def join(self) -> None:
        """Wait for all workers; raises the first error of one."""

        def ended() -> bool:
            return bool(self.errors) or not any(t.is_alive() for t in self.threads)

        try:
            while_moving(ended, self._seen, "the workers end")
        except AssertionError as error:
            error.add_note(str(self.status()))
            raise
        if self.errors:
            raise self.errors[0]

    def _seen(self) -> object:
        """What changes as long as the job goes on."""
        status = self.status()
        return status.progress.version, [t.name for t in self.threads if t.is_alive()]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Poll until `condition`; fails at once when a worker does."""

        def met() -> bool:
            if self.errors:
                raise self.errors[0]
            return condition()

        try:
            eventually(met, what)
        except AssertionError as error:
            error.add_note(str(self.status()))
            raise

    def status(self) -> Any:
        return self.servers[0].status()

    @property
    def coordinator(self) -> Asked:
        """What can be asked of shard 0 as it is now."""
        zero = self.servers[0].shard_zero
        assert zero is not None
        return Asked(zero, self.servers[0].node)

    def declare_gone(self, worker: int) -> None:
        """Tell shard 0 that a worker's process has ended, as who has started it would."""
        self.coordinator.gone(worker, self.coordinator.job.state.members.live[worker].instance)

    def stop_time(self) -> None:
        """No time passes any more for shard 0: however busy the machine is, nobody is late by chance."""
        self._let_pass(timedelta(0))

    def let_fall_silent(self, *workers: int) -> None:
        """Drop these workers as if no call of theirs had come for a lease. To be called after `stop_time`."""
        guarded = self.coordinator.job
        with guarded.lock:
            self.let_a_lease_pass()
            for member in guarded.state.members.live.values():
                if member.worker not in workers:
                    guarded.state.members.check(member.worker, member.incarnation, guarded.clock())
            guarded.drop_silent_and_hung(frozenset())
        zero = self.servers[0].shard_zero
        assert zero is not None
        zero.commit.drive()

    def let_a_lease_pass(self) -> None:
        """More than `leaseDuration` passes. To be called after `stop_time`."""
        self._let_pass(1.25 * self.spec.worker.lease_duration)

    def let_hang(self, worker: int) -> None:
        """More than `progressTimeout` passes in each round in which this worker alone keeps others waiting.

        Waits until it is declared hung. To be called after `stop_time`.
        """
        zero, rounds = self.servers[0].shard_zero, set[tuple[int, int]]()
        assert zero is not None
        job = zero.job

        def declared() -> bool:
            with job.lock:
                state, queued = job.state, zero.commit.queued
                alone = state.hung(job.clock(), timedelta(-1), queued=queued).keys() == {worker}
                round_ = state.rounds.version, state.rounds.attempt
            if alone and round_ not in rounds:
                rounds.add(round_)
                self._let_pass(1.25 * self.spec.worker.progress_timeout)
            return any(m.worker == worker and m.state == "hung" for m in self.status().members)

        self.until(declared, f"worker {worker} is declared hung")

    def _let_pass(self, time: timedelta) -> None:
        guarded = self.coordinator.job
        now = guarded.clock() + time.total_seconds()
        guarded.clock = lambda: now

    @property
    def version(self) -> int:
        return int(self.status().progress.version)

    @property
    def followed(self) -> bool:
        """Whether every shard's standby has every round."""
        return bool(self.status().standbys) and all(self.status().standbys)

    def commits(self) -> list[dict[str, Any]]:
        """The rounds that the parameter server has recorded as committed, in order."""
        return [e for e in events(self.history, "ps-0") if e["event"] == "commit"]


def _of_rank(script: Callable[[Session, int], Any], rank: int) -> Callable[[Session], Any]:
    return lambda session: script(session, rank)


def events(directory: Path, process: str, pid: int | None = None) -> list[dict[str, Any]]:
    """Return the events that processes with this name have recorded; with `pid`, only those of that process.

    The last line is left out while it is being written.
    """
    files = sorted(directory.glob(f"{process}-{pid or '*'}.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().rpartition("\n")[0].splitlines()]


@contextmanager
def running_job(
    tmp_path: Path,
    *,
    transport: str = "inproc",
    checkpoints: Path | None = None,
    resume: Resume = "no",
    traces: Path | None = None,
    run: str = "",
    crowded: bool = False,
    limits: ServerLimits = USUAL,
    **fields: Any,
) -> Iterator[Job]:
    """A job with its parameter servers and their standbys running; everything is closed at the end.

    Args:
        transport: of `transports.BY_NAME`.
        run, crowded: see `ProcessEnvironment`.
        limits: of the parameter servers.
    """
    worker = {"leaseDuration": "60s", **fields.pop("worker", {})}  # a busy machine is late by 10 s
    spec = make_spec(worker=worker, **fields)
    shards = spec.parameter_server.replicas
    history, wishes = tmp_path / "history", tmp_path / "tuning.json"
    roles: list[Literal["ps", "standby"]] = ["ps"]
    if spec.parameter_server.durability == "standby":
        roles.append("standby")
    way = BY_NAME[transport]()
    listeners = {role: [way.listen() for _ in range(shards)] for role in roles}
    servers: dict[str, list[ParameterServer]] = {"ps": [], "standby": []}

    def to(role: Literal["ps", "standby"]) -> Callable[[int], Connection]:
        return lambda shard: way.connect(listeners[role][shard])

    def start_server(
        role: Literal["ps", "standby"], shard: int, resume: Resume, listener: Server
    ) -> ParameterServer:
        environment = ProcessEnvironment(
            job="test",
            spec=spec,
            role=role,
            index=shard,
            addresses=tuple(listener.address for listener in listeners["ps"]),
            checkpoints=checkpoints,
            resume=resume,
            history=history if (role, shard) == ("ps", 0) else None,
            tuning=wishes if (role, shard) == ("ps", 0) else None,
            trace=traces,
            run=run,
            crowded=crowded,
        )
        to_standby = to("standby") if "standby" in roles else None
        return ParameterServer(environment, listener, to("ps"), to_standby, limits=limits)

    @contextmanager
    def rival() -> Iterator[ParameterServer]:
        """Another shard 0 on the same checkpoints and standbys, which no worker knows."""
        server = start_server("ps", 0, "auto", way.listen())
        try:
            yield server
        finally:
            server.close(keep=False)

    def restart(role: Literal["ps", "standby"], shard: int) -> None:
        """Lose a parameter server with all that it knows, and start it again at the same address.

        A script may ask for that, too: nothing of it runs on the caller's thread.
        """

        def run() -> None:
            servers[role][shard].close(keep=False)
            listeners[role][shard] = way.listen(again=listeners[role][shard])
            servers[role][shard] = start_server(role, shard, "auto", listeners[role][shard])

        with ThreadPoolExecutor(1, "restart") as thread:
            thread.submit(run).result()

    job: Job | None = None
    try:
        for role in reversed(roles):
            for shard in reversed(range(shards)):  # shard 0 configures the others when it resumes
                servers[role].insert(0, start_server(role, shard, resume, listeners[role][shard]))
        job = Job(
            spec,
            servers["ps"],
            lambda: [to("ps")(shard) for shard in range(shards)],
            history,
            traces,
            lambda shard: restart("ps", shard),
            lambda shard: restart("standby", shard),
            rival,
            wishes,
        )
        yield job
    finally:
        if job is not None:
            for session in job.sessions:
                session.close()
            for thread in job.threads:
                thread.join(LIMIT)
        for server in [*servers["ps"], *servers["standby"]]:
            server.close()


class Numbers(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A small regression data set, the same for the same arguments."""

    def __init__(self, records: int, features: int = 6, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(records, features, generator=generator)
        self.y = torch.sin(self.x.sum(1, keepdim=True))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class Indexes(torch.utils.data.Dataset[int]):
    """Records that are their own numbers."""

    def __init__(self, records: int) -> None:
        self._records = records

    def __len__(self) -> int:
        return self._records

    def __getitem__(self, index: int) -> int:
        return index


class Tally(torch.nn.Module):
    """Its loss is the sum of the weights of a batch of `Indexes`.

    With SGD of learning rate 1 and a single worker, each weight is minus the times its record was trained.
    """

    def __init__(self, records: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(records))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.weight[batch].sum()


def make_mlp(widths: Sequence[int] = (6, 16, 16, 1), seed: int = 0) -> torch.nn.Sequential:
    """A multi-layer perceptron; the same seed gives the same values, whatever other threads draw."""
    random = torch.Generator().manual_seed(seed)
    layers: list[torch.nn.Module] = []
    for a, b in itertools.pairwise(widths):
        linear = torch.nn.Linear(a, b)
        torch.nn.init.kaiming_uniform_(linear.weight, a=math.sqrt(5), generator=random)
        torch.nn.init.uniform_(linear.bias, -1 / math.sqrt(a), 1 / math.sqrt(a), generator=random)
        layers += [linear, torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1])
