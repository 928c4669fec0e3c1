"""A job in the simulator: its processes, whoever starts them again, and what happens to them."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch

from elastic_ps.env import ProcessEnvironment
from elastic_ps.errors import ElasticPSError, Fenced, RefusalCode, Refused
from elastic_ps.job import TrainingJobSpec, parse_spec
from elastic_ps.server.patience import Patience
from elastic_ps.server.process import ParameterServer
from elastic_ps.telemetry import History, Trace
from elastic_ps.training import Compression, Consistency
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import unary
from elastic_ps.tuning import Tuning
from elastic_ps.worker.local_world import Drained
from elastic_ps.worker.session import Session
from tests.simulator.network import Network, SimConnection, SimServer, Weather
from tests.simulator.patches import Disk
from tests.simulator.world import Killed, Process, World, world

CHANGES: list[dict[str, Any]] = [
    {"mode": "sync"},
    {"mode": "sync", "backupWorkers": 1},
    {"mode": "bounded", "maxStaleness": 1},
    {"mode": "bounded", "maxStaleness": 3},
    {"mode": "async"},
    {"mode": "async", "reads": "inconsistent"},
    {"mode": "accumulate", "gradients": 3},
]
"""What a person may want of a running job that is not in mode local."""

COMPRESSIONS: list[dict[str, Any]] = [
    {},
    {"codec": "tests.unit.test_codecs:Negative"},
    {"codec": "tests.unit.test_codecs:Negative", "rules": [{"match": "*0", "codec": "none"}]},
    {"lossless": "zstd"},
]
"""Likewise, in any mode. Nothing is lost with any of them, so the model can be told from the histories."""

PARAMETERS = 4
MOMENTUM = 0.5
Role = Literal["ps", "standby", "worker"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a schedule is about; drawn from its seed, or given.

    `slice` is `follower.SLICE` in seconds, `smallest_bucket` is `partition.SMALLEST_BUCKET_BYTES`.
    """

    seed: int
    workers: int = 2
    shards: int = 1
    standby: bool = False
    slice: float = 1.0
    smallest_bucket: int = 1024
    consistency: dict[str, Any] = field(default_factory=lambda: {"mode": "sync"})
    records: int = 24
    epochs: int = 1
    batch: int = 2
    accumulate: int = 1
    skipping: float = 0.0
    assigning: float = 0.0
    overlap: bool = True
    shard_records: int = 6
    every_versions: int = 2
    faults: tuple[str, ...] = ()
    weather: Weather = field(default_factory=Weather)
    switching: float = 0.2
    stalling: float = 0.0
    stop_after: float | None = None

    def __str__(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in asdict(self).items())


class Records(torch.utils.data.Dataset[int]):
    """Records that are their own numbers."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index


class Tally(torch.nn.Module):
    """Equal parameters, each with a place for every record of every epoch.

    The gradient of a record is one at its place, so that the parameters tell which records went into which
    version; and as all parameters get the same, so do all buckets on all shards. They begin with a value of
    the process's own, so that they also tell who initialised the model.
    """

    def __init__(self, places: int, first: float) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(
            torch.nn.Parameter(torch.full((places,), first, dtype=torch.float64)) for _ in range(PARAMETERS)
        )

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        return torch.stack([part[places].sum() for part in self.parts]).sum()


@dataclass
class Sight:
    """Values that somebody saw: `values` has a row for each parameter."""

    what: str
    term: int
    version: int
    values: torch.Tensor


class Cluster:
    """Runs one plan in a world; `judge` looks at what it leaves."""

    def __init__(self, plan: Plan, here: World, disk: Disk, directory: Path) -> None:
        self.plan, self.here, self.disk, self.directory = plan, here, disk, directory
        self.network = Network(here, plan.weather)
        self.spec = self._spec()
        self.checkpoints = directory / "checkpoints"
        self.history = directory / "history"
        self.wishes = directory / "tuning.json"
        self.changes = 0
        disk.root = self.checkpoints
        self.processes: dict[tuple[Role, int], Process] = {}
        self.wanted = plan.workers
        self.finished: set[int] = set()
        self.chiefs: list[tuple[int, int]] = []
        self.sights: list[Sight] = []
        self.assigned: list[float] = []
        self.problems: list[str] = []
        self.committed = False  # there is a whole checkpoint
        self.stopping = False
        self.stopped_early = False
        self.stopped_well = False
        self.servers: dict[str, ParameterServer] = {}
        self._starts: dict[tuple[Role, int], int] = {}

    def _spec(self) -> TrainingJobSpec:
        plan = self.plan
        return parse_spec(
            {
                "entrypoint": "tests:main",
                "worker": {"replicas": plan.workers, "leaseDuration": "10s", "progressTimeout": "5m"},
                "parameterServer": {
                    "replicas": plan.shards,
                    "bucketBytes": 1024,
                    "durability": "standby" if plan.standby else "checkpoint",
                    "checkpoint": {"interval": "1h", "everyVersions": plan.every_versions, "keep": 2},
                },
                "consistency": plan.consistency,
                "data": {"shardRecords": plan.shard_records},
            },
            source="simulator",
        )

    # --- addresses

    def address(self, role: Role, index: int) -> str:
        return f"{role}-{index}"

    def _connect(self, role: Role) -> Callable[[int], SimConnection]:
        return lambda index: SimConnection(self.network, self.address(role, index))

    # --- processes

    def start(self, role: Role, index: int) -> Process:
        """Start a process; it is started again when it dies, as long as it is wanted."""
        key = (role, index)
        self._starts[key] = self._starts.get(key, 0) + 1
        process = Process(f"{role}-{index}#{self._starts[key]}")
        self.processes[key] = process
        target = self._work if role == "worker" else self._serve
        self.here.note(f"start {process.name}")
        self.here.spawn(process, "main", lambda: self._live(process, role, index, target))
        return process

    def _live(self, process: Process, role: Role, index: int, target: Any) -> None:
        """A process from its start to its end."""
        again = False
        try:
            again = target(role, index)
        except Killed:
            raise
        except ElasticPSError as error:
            if self.stopping:
                return
            self.problems.append(f"{process.name} ended: {type(error).__name__}: {error}")
            self.here.note(self.problems[-1])
        self.here.note(f"end {process.name}")
        again = again and self.processes.get((role, index)) is process
        if again:
            self.later(lambda: self.start(role, index) if not self.stopping else None, 0.5, 3)
        self.here.kill(process)

    def kill(self, role: Role, index: int, *, again: bool = True, tell: bool = False) -> None:
        """SIGKILL."""
        process = self.processes.get((role, index))
        if process is None or process.dead:
            return
        self.here.note(f"kill {process.name}")
        if again:
            self.later(lambda: self._start_again(role, index, process), 0.5, 3)
        if tell:
            self.later(lambda: self._gone(index, process.name), 0.01, 0.3)
        self.here.kill(process)

    def _start_again(self, role: Role, index: int, after: Process) -> None:
        if not self.stopping and self.processes.get((role, index)) is after:
            self.start(role, index)

    def later(self, action: Callable[[], Any], least: float, most: float) -> None:
        """Do it after a while, as somebody outside of all processes."""
        delay = self.here.random.uniform(least, most)

        def wait() -> None:
            self.here.sleep(delay)
            action()

        self.here.spawn(self.network.process, "later", wait)

    def _gone(self, worker: int, instance: str) -> None:
        """Whoever started the worker tells that it has ended."""
        request = pb.GoneRequest(job="job", worker=worker, instance=instance)
        with suppress(ElasticPSError):
            unary(self._connect("ps")(0), "Gone", request.SerializeToString(), timeout=timedelta(seconds=5))

    def _environment(self, role: Role, index: int) -> ProcessEnvironment:
        count = range(self.plan.shards)
        return ProcessEnvironment(
            job="job",
            spec=self.spec,
            role=role,
            index=index,
            addresses=tuple(self.address("ps", i) for i in count),
            standbys=tuple(self.address("standby", i) for i in count) if self.plan.standby else (),
            checkpoints=self.checkpoints,
            resume="auto",
            history=self.history,
            tuning=self.wishes if (role, index) == ("ps", 0) else None,
        )

    def change(self) -> None:
        """A person wants another consistency or compression; whoever starts the processes hands it over."""
        given, chance = self.plan.consistency, self.here.random
        if self.plan.assigning:
            return
        self.changes += 1
        if given.get("deterministic") or chance.random() < 0.4:
            update: dict[str, Any] = {"compression": Compression.model_validate(chance.choice(COMPRESSIONS))}
        else:
            update = {"consistency": self._other_consistency()}
        self.spec = self.spec.model_copy(update=update)
        self.here.note(f"change {self.changes} to {update}")
        self.wishes.write_text(Tuning.of(self.spec, generation=self.changes).to_json())

    def _other_consistency(self) -> Consistency:
        given = self.plan.consistency
        least = (given.get("fragments") or 1) * ((given.get("overlap") or 0) + 1)
        steps = max(self.here.random.choice([1, 2, 5]), least)
        others = CHANGES
        if given.get("mode") == "local":
            others = [{**given, "steps": steps}]
        elif "globalBatchSize" in given:
            others = [{**given, "balance": balance} for balance in ("even", "speed")]
        return Consistency.model_validate(self.here.random.choice(others))

    def _serve(self, role: Role, index: int) -> bool:
        process = self.here.process
        listener = SimServer(self.network, self.address(role, index))
        try:
            server = ParameterServer(
                self._environment(role, index),
                listener,
                self._connect("ps"),
                self._connect("standby") if self.plan.standby else None,
                patience=Patience(lambda: self.stopping),
            )
        except Fenced:
            return True
        self.servers[process.name] = server
        while not (self.stopping or server.fenced):
            self.here.sleep(0.05)
        fenced = server.fenced
        self.here.note(f"{process.name} {'is fenced' if fenced else 'is asked to end'}")
        server.close()
        return fenced

    def _work(self, role: Role, index: int) -> bool:
        session = Session(
            "job",
            self.spec,
            index,
            [self._connect("ps")(shard) for shard in range(self.plan.shards)],
            trace=Trace(None, ""),
            history=History(self.history, f"worker-{index}"),
            instance=self.here.process.name,
        )
        try:
            self._script(session)
        except Drained:
            return index < self.wanted
        except Refused as refusal:
            if refusal.code is RefusalCode.SUPERSEDED:
                return True
            raise
        finally:
            session.close()
        self.finished.add(index)
        return False

    def _script(self, session: Session) -> None:
        plan = self.plan
        model = Tally(plan.records * plan.epochs, first=pid_of(self.here.process.name) % 1000)
        # The server's momentum; in mode local a worker's would go with the worker, and be in no history.
        momentum = 0.0 if session.spec.consistency.mode == "local" else MOMENTUM
        optimizer = session.optimizer(
            torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum), model, overlap=plan.overlap
        )
        loader = session.loader(Records(plan.records), batch_size=plan.batch, epochs=plan.epochs)
        for _ in loader.epochs():
            held = 0
            for batch in loader:
                if self._skips(session, held):
                    continue
                if not held:
                    self._may_assign(session, model)
                held += 1
                loss = model(batch + loader.epoch * plan.records)
                if held < plan.accumulate:
                    with optimizer.no_sync():
                        loss.backward()
                    continue
                loss.backward()
                if self._skips(session, held):
                    optimizer.skip()
                    held = 0
                    continue
                optimizer.step()
                optimizer.zero_grad()
                held = 0
                self.seen("step", session, model)
            if held:
                optimizer.step()
                optimizer.zero_grad()
            self._may_assign(session, model)
        self.seen("end", session, model)
        if session.is_chief:
            self.chiefs.append((session.worker, session.version))

    def _skips(self, session: Session, held: int) -> bool:
        """Whether the script leaves a batch out, or a step with those that it has computed on.

        Not the first ones: a job that skips everything fails.
        """
        return (
            bool(session.version)
            and held in (0, self.plan.accumulate)
            and self.here.random.random() < self.plan.skipping
        )

    def _may_assign(self, session: Session, model: Tally) -> None:
        """Now and then the script gives all parameters a value that nothing else gives them."""
        if self.plan.assigning and self.here.random.random() < self.plan.assigning:
            value = 64.0 * (len(self.assigned) + 1)
            self.assigned.append(value)
            with torch.no_grad():
                for part in model.parts:
                    part.fill_(value)
            session.assign(model)
            self.seen("assignment", session, model)

    def seen(self, what: str, session: Session, model: Tally) -> None:
        values = torch.stack([part.detach().clone() for part in model.parts])
        self.sights.append(Sight(f"{what} of worker {session.worker}", 0, session.version, values))

    # --- the run

    def run(self) -> None:
        """Start everything, let the faults happen, wait for the end, ask the servers to end."""
        plan, here = self.plan, self.here
        for index in reversed(range(plan.shards)):
            if plan.standby:
                self.start("standby", index)
            self.start("ps", index)
        for index in range(plan.workers):
            self.later(lambda index=index: self.start("worker", index), 0, 0.5)  # type: ignore[misc]
        for name in plan.faults:
            self._plan_fault(name)
        started = here.now
        limit = here.now + 600
        while not self._over():
            here.sleep(0.25)
            if here.now > limit:
                self.problems.append("the job does not come to its end within ten minutes")
                break
            if self.problems:
                break
            if plan.stop_after is not None and here.now > started + plan.stop_after:
                self._stop_early()
                break
        self.network.weather = Weather()
        self.network.cut.clear()
        self.disk.full_until = self.disk.unreadable_until = 0.0
        self.stopping = True
        for (role, _), process in self.processes.items():
            if role != "worker" and process.name not in self.servers:
                self.here.kill(process)  # one that starts ends at once when it is asked to
        limit = here.now + 300
        while any(not p.dead for (role, _), p in self.processes.items() if role != "worker"):
            here.sleep(0.1)
            if here.now > limit:
                self.problems.append("a parameter server does not end within five minutes")
                break

    def _stop_early(self) -> None:
        """Somebody stops the job while it trains: its workers end, then all servers at once."""
        self.here.note("the job is stopped")
        self.stopped_early = True
        shards = [self.processes["ps", index] for index in range(self.plan.shards)]
        running = all(not p.dead and p.thaws <= self.here.now for p in shards) and self._calm
        terms = {self.servers[p.name].node.term for p in shards if p.name in self.servers}
        self.stopped_well = running and all(p.name in self.servers for p in shards) and len(terms) == 1
        for index in range(self.wanted):
            self.kill("worker", index, again=False)

    @property
    def _calm(self) -> bool:
        """Whether no message is under way for so long that a server ends before it arrives."""
        return not self.plan.weather.late and "storm" not in self.plan.faults

    def _over(self) -> bool:
        return all(index in self.finished for index in range(self.wanted)) and all(
            p.dead for (role, _), p in self.processes.items() if role == "worker"
        )

    # --- faults

    def _plan_fault(self, name: str) -> None:
        from tests.simulator.faults import FAULTS

        action = FAULTS[name]
        self.here.at_point(
            self.here.random.randrange(200, 6000),
            lambda: self._strike(name, action),
        )

    def _strike(self, name: str, action: Any) -> None:
        if not (self.stopping or self.stopped_early):
            self.here.spawn(self.network.process, name, lambda: action(self))


def pid_of(name: str) -> int:
    """A number for a process, by its name."""
    return zlib.crc32(name.encode()) % 1_000_000 + 1


@contextmanager
def scratch(base: Path, seed: int) -> Iterator[Path]:
    directory = base / f"schedule-{seed}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


__all__ = ["Cluster", "Plan", "scratch", "world"]
