"""A job in the simulator: its processes, whoever starts them again, and what happens to them."""

from __future__ import annotations

import random
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch

from elastic_ps.api.compression import Compression
from elastic_ps.api.consistency import Consistency
from elastic_ps.api.job import TrainingJobSpec, parse_spec
from elastic_ps.api.mutable import MutableFields
from elastic_ps.contract.env import ProcessEnvironment
from elastic_ps.core.ledger import Range
from elastic_ps.data.batches import slice_sizes
from elastic_ps.data.order import Order
from elastic_ps.data.shuffle import permutation
from elastic_ps.errors import ElasticPSError, Fenced, RefusalCode, Refused, TransportError
from elastic_ps.process.retrying import Patience
from elastic_ps.process.telemetry import History, Trace
from elastic_ps.server.limits import ServerLimits
from elastic_ps.server.process import ParameterServer
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import unary
from elastic_ps.worker.session import Session
from elastic_ps.worker.strategies.all_reduce import AllReduce
from elastic_ps.worker.wire.local_world import Drained, Links, LocalWorld
from tests.simulator.network import Network, SimConnection, SimServer, Weather
from tests.simulator.patches import Disk
from tests.simulator.pipes import End
from tests.simulator.world import Process, World, world
from tests.testing.inside import runtime_of

CHANGES: list[dict[str, Any]] = [
    {"mode": "sync"},
    {"mode": "sync", "backupWorkers": 1},
    {"mode": "bounded", "maxStaleness": 1},
    {"mode": "bounded", "maxStaleness": 3},
    {"mode": "async"},
    {"mode": "async", "reads": "inconsistent"},
    {"mode": "accumulate", "gradients": 3},
    {"mode": "bounded", "maxStaleness": 3, "stalenessScale": "inverse"},
    {"mode": "async", "maxStalenessP99": 1},
]
"""What a person may want of a running job that is not in mode local."""

COMPRESSIONS: list[dict[str, Any]] = [
    {},
    {"codec": "tests.unit.codec.test_codecs:Negative"},
    {"codec": "tests.unit.codec.test_codecs:Negative", "rules": [{"match": "*0", "codec": "none"}]},
    {"lossless": "zstd"},
]
"""Likewise, in any mode. Nothing is lost with any of them, so the model can be told from the histories."""

PARAMETERS = 4
MOMENTUM = 0.5
Role = Literal["ps", "standby", "worker"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a schedule is about; drawn from its seed, or given.

    `deaths` are those of processes by their names, at one of their yields (`Process.yields`).
    `window` is `ServerLimits.window`, and a looser way is tried after one such window, not `objective.CALM`.
    `slice` is `ServerLimits.slice` in seconds, `smallest_bucket` is `ServerLimits.smallest_bucket`. Backward
    computes for `computing` seconds at most before each of its gradients.
    """

    seed: int
    strategy: str = "parameter-server"
    workers: int = 2
    processes: int = 1
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
    blocks: int = 1
    every_versions: int = 2
    faults: tuple[str, ...] = ()
    deaths: tuple[tuple[str, int], ...] = ()
    weather: Weather = field(default_factory=Weather)
    switching: float = 0.2
    stalling: float = 0.0
    stop_after: float | None = None
    computing: float = 0.0
    window: int = 4

    @property
    def limits(self) -> ServerLimits:
        """Of the parameter servers."""
        piece = timedelta(seconds=self.slice)
        return ServerLimits(slice=piece, smallest_bucket=self.smallest_bucket, window=self.window)

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

    def even(self, ranges: Iterable[Range], own: int) -> float:
        """So that each record of a step counts the same, whichever process's slices have it.

        Gradients that are there already, of `own` records, are made larger by the factor that is returned.
        """
        factor = sum(each.records for each in ranges) / own if own else 0.0
        for part in self.parts:
            if part.grad is not None and factor != 1:
                part.grad *= factor
        return factor


@dataclass
class Sight:
    """Values that somebody saw: `values` has a row for each parameter."""

    what: str
    term: int
    version: int
    values: torch.Tensor


@dataclass(eq=False)
class Crew:
    """The processes of one worker, as whoever has started them knows them: see `elastic_ps.worker.processes`.

    Attributes:
        members: all of them; the first one's name is the worker's.
        links: of each to the others; see `LocalWorld`.
        running: those that have not ended by themselves.
        left: one of them has ended because the worker was asked to leave, or was replaced.
    """

    members: list[Process]
    links: list[list[Links]]
    running: set[Process] = field(default_factory=set)
    left: bool = False

    @classmethod
    def of(cls, first: Process, size: int) -> Crew:
        members = [first, *(Process(f"{first.name}.{rank}") for rank in range(1, size))]
        links: list[list[Links]] = [[]]
        for other in members[1:]:
            questions, gradients = End.pair(first, other), End.pair(first, other)
            ours, theirs = (Links(*cast(Any, ends)) for ends in zip(questions, gradients, strict=True))
            links[0].append(ours)
            links.append([theirs])
        return cls(members, links, set(members))


@dataclass
class LocalStep:
    """In mode local: process 0 of a worker, named by its `instance`, is about to make a step.

    Attributes:
        before: the values of one parameter.
        after: what the step makes of them.
        then: what the worker has after the call, which may have exchanged them; None if it was killed, had to
            join again, or made the last step of a loop.
    """

    time: float
    worker: int
    instance: str
    before: torch.Tensor
    after: torch.Tensor
    ranges: list[Range]
    then: torch.Tensor | None = None


class Cluster:
    """Runs one plan in a world; `judge` looks at what it leaves."""

    def __init__(self, plan: Plan, here: World, disk: Disk, directory: Path) -> None:
        self.plan, self.here, self.disk, self.directory = plan, here, disk, directory
        self.network = Network(here, plan.weather)
        self.spec = self._spec()
        self.checkpoints = directory / "checkpoints"
        self.history = directory / "history"
        self.desired = directory / "tuning.json"
        self.changes = 0
        disk.root = self.checkpoints
        self.processes: dict[tuple[Role, int], Process] = {}
        self.born: list[Process] = []  # all that there ever were
        self.crews: dict[Process, Crew] = {}
        self.sessions: dict[Process, Session] = {}
        self.batches: dict[Process, list[Range]] = {}  # of which each has been handed a slice
        self.local_steps: list[LocalStep] = []
        self.wanted = plan.workers
        self.finished: set[int] = set()
        self.chiefs: list[tuple[int, int]] = []
        self.sights: list[Sight] = []
        self.assigned: list[float] = []
        self.problems: list[str] = []
        self.committed: tuple[int, int] | None = None  # the term and version of the newest whole checkpoint
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
                "strategy": plan.strategy,
                "worker": {
                    "replicas": plan.workers,
                    "minReplicas": plan.consistency.get("quorum", 1),
                    "processes": plan.processes,
                    "leaseDuration": "10s",
                    "progressTimeout": "5m",
                },
                "parameterServer": {
                    "replicas": plan.shards,
                    "bucketBytes": 1024,
                    "durability": "standby" if plan.standby else "checkpoint",
                    "checkpoint": {"interval": "1h", "everyVersions": plan.every_versions, "keep": 2},
                },
                "consistency": plan.consistency,
                "data": {"shardRecords": plan.shard_records, "order": {"blocks": plan.blocks}},
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
        """Start a process; it is started again when it dies, as long as it is wanted.

        Returns the first one, if it is a worker of several.
        """
        key = (role, index)
        self._starts[key] = self._starts.get(key, 0) + 1
        process = Process(f"{role}-{index}#{self._starts[key]}")
        self.processes[key] = process
        self.here.note(f"start {process.name}")
        if role == "worker":
            self.crews[process] = crew = Crew.of(process, self.plan.processes)
            for rank in range(len(crew.members)):
                self._spawn(crew.members[rank], partial(self._work, crew, rank, index))
        else:
            self._spawn(process, lambda: self._serve(process, role, index))
        for rank, member in enumerate(self.members(process)):
            for at in (at for name, at in self.plan.deaths if name == member.name):
                member.doom[at] = partial(self._die, role, index, process, rank, tell=at % 2 > 0)
            self.born.append(member)
        return process

    def _die(self, role: Role, index: int, first: Process, rank: int, *, tell: bool) -> None:
        if not (self.stopping or self.stopped_early):
            self.kill(role, index, process=first, member=rank if role == "worker" else None, tell=tell)

    def _spawn(self, process: Process, target: Callable[[], None]) -> None:
        self.here.spawn(process, "main", lambda: self._live(process, target))

    def _live(self, process: Process, target: Callable[[], None]) -> None:
        """A process from its start to its end."""
        try:
            target()
        except ElasticPSError as error:
            if self.stopping:
                return
            self.problems.append(f"{process.name} ended: {type(error).__name__}: {error}")
            self.here.note(self.problems[-1])
        self.here.note(f"end {process.name}")
        self.here.kill(process)

    def kill(
        self,
        role: Role,
        index: int,
        *,
        process: Process | None = None,
        member: int | None = None,
        again: bool = True,
        tell: bool = False,
    ) -> None:
        """SIGKILL, of one process of a worker, or of all; of the newest one, or of `process`."""
        process = process or self.processes.get((role, index))
        if process is None:
            return
        members = self.members(process)
        killed = [each for each in (members if member is None else [members[member]]) if not each.dead]
        if not killed:
            return
        self.here.note(f"kill {', '.join(each.name for each in killed)}")
        if again:
            self.later(lambda: self._start_again(role, index, process), 0.5, 3)
        if tell and role == "worker":
            self.later(lambda: self._gone(index, process.name), 0.01, 0.3)
        if member is not None:
            self._end_others(members)
        for each in sorted(killed, key=lambda each: each is self.here.process):  # whoever kills itself, last
            self.here.kill(each)

    def drain(self, process: Process) -> None:
        """SIGTERM of a worker's process that has joined."""
        session = self.sessions.get(process)
        if session is not None and session.started and not process.dead:
            session.drain()

    def members(self, process: Process) -> list[Process]:
        """The processes of a worker of which this is the first; else this one alone."""
        return self.crews[process].members if process in self.crews else [process]

    def _end_others(self, members: Iterable[Process]) -> None:
        """Whoever has started a worker's processes has seen one die, and ends the others."""

        def end() -> None:
            for each in members:
                self.here.kill(each)

        self.later(end, 0.001, 0.1)

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
            tuning=self.desired if (role, index) == ("ps", 0) else None,
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
        self.desired.write_text(MutableFields.of(self.spec, generation=self.changes).to_json())

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

    def _serve(self, process: Process, role: Role, index: int) -> None:
        listener = SimServer(self.network, self.address(role, index))
        try:
            server = ParameterServer(
                self._environment(role, index),
                listener,
                self._connect("ps"),
                self._connect("standby") if self.plan.standby else None,
                patience=Patience(lambda: self.stopping),
                limits=self.plan.limits,
            )
        except Fenced:
            self.later(lambda: self._start_again(role, index, process), 0.5, 3)
            return
        self.servers[process.name] = server
        while not (self.stopping or server.fenced):
            self.here.sleep(0.05)
        fenced = server.fenced
        self.here.note(f"{process.name} {'is fenced' if fenced else 'is asked to end'}")
        server.close()
        if fenced:
            self.later(lambda: self._start_again(role, index, process), 0.5, 3)

    def _work(self, crew: Crew, rank: int, index: int) -> None:
        """One process of a worker."""
        process, first = crew.members[rank], crew.members[0]
        leads = rank == 0
        self.sessions[process] = session = Session(
            "job",
            self.spec,
            index,
            [self._connect("ps")(shard) for shard in range(self.plan.shards)] if leads else [],
            trace=Trace(None, ""),
            history=History(self.history if leads else None, f"worker-{index}"),
            instance=first.name,
            world=LocalWorld(rank, crew.links[rank], len(crew.members)),
        )
        try:
            self._script(session, crew, process)
        except Drained:
            crew.left = True
        except TransportError:  # see `elastic_ps.worker.script`
            if not session.asked_to_leave:
                raise
            crew.left = True
        except Refused as refusal:
            replaced = refusal.code is RefusalCode.MODEL_LOST and self.committed is None
            if refusal.code is not RefusalCode.SUPERSEDED and not replaced:
                raise
            crew.left = True
            crew.running.clear()
            self._end_others(each for each in crew.members if each is not process)
        finally:
            session.close()
        crew.running.discard(process)
        if crew.running:
            return
        if not crew.left:
            self.finished.add(index)
        elif index < self.wanted:
            self.later(lambda: self._start_again("worker", index, first), 0.5, 3)

    def _script(self, session: Session, crew: Crew, process: Process) -> None:
        plan = self.plan
        model = Tally(plan.records * plan.epochs, first=pid_of(process.name) % 1000)
        for part in model.parts if plan.computing else ():
            part.register_hook(lambda _: self.here.sleep(self.here.random.uniform(0, plan.computing)))
        chance = random.Random(f"{plan.seed} {session.worker} {process.name.partition('.')[0]}")
        # The server's momentum; in mode local a worker's would go with the worker, and be in no history.
        momentum = 0.0 if session.spec.consistency.mode == "local" else MOMENTUM
        optimizer = session.optimizer(
            torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum), model, overlap=plan.overlap
        )
        loader = session.loader(Records(plan.records), batch_size=plan.batch, epochs=plan.epochs)
        for _ in loader.epochs():
            held, own, ranges, generation = 0, 0, list[Range](), session.generation
            for batch in loader:
                if session.generation != generation:  # what was computed on before it joined again is void
                    held, own, ranges, generation = 0, 0, [], session.generation
                if self._skips(session, held, chance):
                    continue
                if not held:
                    self._may_assign(session, model)
                whole = self.batches[process]
                # Of a small batch some processes have no record, and are handed one that has no weight.
                sizes = slice_sizes(sum(each.records for each in whole), plan.processes)
                weighs = sizes[crew.members.index(process)] > 0
                held, own, ranges = held + 1, own + weighs * len(batch), ranges + whole
                loss = model(batch + loader.epoch * plan.records) * weighs
                if held < plan.accumulate:
                    with optimizer.no_sync():
                        loss.backward()
                    continue
                (loss * model.even(ranges, own)).backward()
                if self._skips(session, held, chance):
                    optimizer.skip()
                    held, own, ranges = 0, 0, []
                    continue
                step = self._note_step(session, process, model, ranges)
                optimizer.step()
                if step is not None and generation == session.generation:
                    step.then = model.parts[0].detach().clone()
                optimizer.zero_grad()
                held, own, ranges = 0, 0, []
                self.seen("step", session, model)
            if held:
                model.even(ranges, own)
                self._note_step(session, process, model, ranges)
                optimizer.step()
                optimizer.zero_grad()
            self._may_assign(session, model)
        self.seen("end", session, model)
        if session.is_chief:
            self.chiefs.append((session.worker, session.version))

    def _note_step(
        self, session: Session, process: Process, model: Tally, ranges: list[Range]
    ) -> LocalStep | None:
        if session.spec.consistency.mode != "local" or process not in self.crews:
            return None
        before = model.parts[0].detach().clone()
        after = before.clone()
        after[places(ranges, self.plan)] -= 1
        self.local_steps.append(LocalStep(self.here.now, session.worker, process.name, before, after, ranges))
        return self.local_steps[-1]

    def _skips(self, session: Session, held: int, chance: random.Random) -> bool:
        """Whether the script leaves a batch out, or a step with those that it has computed on.

        Not the first ones: a job that skips everything fails. All processes of a worker do the same.
        """
        return (
            bool(session.version)
            and held in (0, self.plan.accumulate)
            and chance.random() < self.plan.skipping
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
        runtime = runtime_of(session)
        if isinstance(runtime.strategy, AllReduce) and not runtime.strategy.has(session.version):
            return  # it has joined, and copies the version with its first batch
        values = torch.stack([part.detach().clone() for part in model.parts])
        term = runtime.client.term
        self.sights.append(Sight(f"{what} of worker {session.worker}", term, session.version, values))

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
        running &= self.plan.strategy != "all-reduce"  # where the workers have the values, and are killed
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
            member.dead
            for (role, _), process in self.processes.items()
            if role == "worker"
            for member in self.members(process)
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


def halved(staleness: int) -> float:
    """A `stalenessScale` of the user's own: with each version, half of the rate."""
    return 0.5**staleness


def places(ranges: Iterable[Range], plan: Plan) -> list[int]:
    """Where the records of these ranges leave their marks."""
    order = Order(plan.records, plan.blocks)

    def of_epoch(epoch: int) -> Sequence[int]:
        if plan.blocks > 1:
            return order.of_epoch(epoch)
        return permutation(plan.records, epoch, shuffle=True, seed=0)

    return [r.epoch * plan.records + index for r in ranges for index in of_epoch(r.epoch)[r.start : r.stop]]


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


__all__ = ["Cluster", "LocalStep", "Plan", "places", "scratch", "world"]
