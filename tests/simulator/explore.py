"""Schedules from seeds: draw a plan, run it, judge it."""

from __future__ import annotations

import importlib
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from elastic_ps.api.consistency import OUTER_RULES, Consistency
from elastic_ps.checkpoint import store
from elastic_ps.collectives import groups
from elastic_ps.core.ledger import Range
from elastic_ps.core.objective import Objective
from elastic_ps.data.batches import Batches
from elastic_ps.errors import NoCheckpoint
from elastic_ps.server.job import reconfiguration
from elastic_ps.server.job.guarded import Guarded
from elastic_ps.worker.runtime import membership
from tests.simulator.cluster import Cluster, Plan, halved, pid_of, scratch
from tests.simulator.collectives import Collectives, Store
from tests.simulator.faults import FAULTS
from tests.simulator.judge import HARMLESS, checkpoint_sight, judge
from tests.simulator.network import Weather
from tests.simulator.patches import Disk, contextlib_stack, simulated
from tests.simulator.world import Killed, Stuck, World, world


@dataclass
class Outcome:
    """What became of a schedule; `problems` is empty if every promise was kept."""

    plan: Plan
    problems: list[str]
    cluster: Cluster
    log: list[str] = field(default_factory=list)
    turns: int = 0
    points: int = 0
    seconds: float = 0.0


PORTIONS: list[dict[str, Any]] = [{}, {"deterministic": True}, {"balance": "speed"}]
"""How the records of a version may be cut, where their number is constant."""


def _local(chance: random.Random) -> dict[str, Any]:
    """Mode local, with any of what it has."""
    outer = chance.choice(sorted(OUTER_RULES))
    rule = OUTER_RULES[outer]
    fragments = chance.choice([1, 1, 2])
    steps = chance.choice([1, 2, 4]) * fragments
    given: dict[str, Any] = {"mode": "local", "steps": steps, "outer": outer, "fragments": fragments}
    # The replay knows neither how stale an exchange is nor how many there were before.
    if rule.warms:
        given["outerMomentum"] = rule.momentum
    if rule.divided:
        given["outerLearningRate"] = rule.learning_rate
    between = steps // fragments
    if not rule.elastic and between > 1:
        given["overlap"] = chance.choice([0, 0, 1, between - 1])
    if rule.waits:
        quorum = {"quorum": chance.choice([1, 1, 2]), "grace": chance.choice(["0s", "500ms", "auto"])}
        given |= chance.choice([{}, {}, quorum, {"balance": "speed"}])
    return given


def _all_reduce(plan: Plan) -> Plan:
    """The same, as far as it can be, with workers that add up gradients among themselves."""
    return replace(
        plan,
        strategy="all-reduce",
        consistency={"mode": "sync"},
        shards=1,
        standby=False,
        processes=1,
        assigning=0.0,
        faults=tuple(fault for fault in plan.faults if fault != "change"),
    )


def _staleness(chance: random.Random, plan: Plan) -> Plan:
    """What modes with stale steps may have besides: less weight for them, and an objective."""
    given = {**plan.consistency}
    stale = given["mode"] in ("bounded", "async")
    if stale:
        scales = ["none", "damped", "inverse", f"{halved.__module__}:{halved.__name__}"]
        given["stalenessScale"] = chance.choice(scales)
    plain = given == {"mode": "sync"} and plan.strategy != "all-reduce" and not plan.assigning
    if (stale or plain) and chance.random() < 0.5:
        given["maxStalenessP99"] = chance.choice([0, 1, 2])
        # Long enough for decisions, of which there are no more than four in a second.
        long: dict[str, Any] = {"records": 12, "epochs": 2, "batch": plan.processes, "computing": 0.3}
        plan = replace(plan, workers=max(plan.workers, 2), window=chance.choice([2, 4]), **long)
        if chance.random() < 0.6:  # so that nothing excuses the parameter server
            harmless = tuple(fault for fault in plan.faults if fault in HARMLESS)
            plan = replace(plan, faults=harmless, weather=Weather(), stalling=0.0)
    return replace(plan, consistency=given)


def draw(seed: int, **fixed: Any) -> Plan:
    """The plan of a seed; `fixed` overrides what is drawn."""
    chance = random.Random(seed)
    workers = chance.choice([1, 2, 2, 3])
    modes: list[Mapping[str, Any]] = [
        {"mode": "sync"},
        {"mode": "sync"},
        {"mode": "sync", "deterministic": True},
        {"mode": "sync", "backupWorkers": 1},
        {"mode": "bounded", "maxStaleness": chance.choice([1, 3])},
        {"mode": "async"},
        {"mode": "async", "reads": "inconsistent"},
        {"mode": "accumulate", "gradients": chance.choice([1, 2, 4])},
        {"mode": "sync", "globalBatchSize": chance.choice([3, 4, 6]), **chance.choice(PORTIONS)},
        *(_local(chance) for _ in range(6)),
    ]
    consistency = dict(chance.choice(modes))
    faults = tuple(chance.choice(sorted(FAULTS)) for _ in range(chance.choice([0, 1, 2, 3, 5])))
    if Consistency.model_validate(consistency).fixed_workers:
        faults = tuple(f for f in faults if f != "grow")
    wind = Weather(lost_request=0.01, lost_answer=0.01, twice=0.02, late=0.02)
    weather = wind if chance.random() < 0.5 else Weather()
    plan = Plan(
        seed=seed,
        workers=workers,
        shards=chance.choice([1, 2, 2, 3]),
        standby=chance.random() < 0.35,
        consistency=consistency,
        records=chance.choice([6, 12]),
        epochs=chance.choice([1, 2]),
        batch=chance.choice([1, 2, 3]),
        accumulate=chance.choice([1, 1, 1, 2]),
        skipping=chance.choice([0.0, 0.0, 0.1, 0.3]),
        overlap=chance.random() < 0.8,
        shard_records=chance.choice([2, 6]),
        every_versions=chance.choice([1, 2, 3]),
        faults=faults,
        weather=weather,
        switching=chance.choice([0.02, 0.1, 0.3]),
        stalling=chance.choice([0.0, 0.0, 0.0005, 0.003]),
        stop_after=chance.choice([None, None, None, None, 0.5 + chance.random()]),
        slice=chance.choice([0.0, 0.0, 0.003, 1.0]),
        smallest_bucket=chance.choice([64, 1024]),
        assigning=chance.choice([0.0, 0.05, 0.2]) if consistency == {"mode": "sync"} else 0.0,
    )
    if "globalBatchSize" in consistency:
        plan = replace(plan, accumulate=1)
    if (quorum := consistency.get("quorum", 1)) > workers:
        plan = replace(plan, workers=quorum)
    if (processes := chance.choice([1, 1, 1, 2, 3])) > 1:  # each has a slice of every batch
        batch = max(plan.batch, processes)
        plan = replace(plan, processes=processes, batch=batch, assigning=0.0)
    if most := consistency.get("gradients"):
        steps = -(-plan.records // plan.batch) * plan.epochs
        plan = replace(plan, consistency={**consistency, "gradients": min(most, steps)})
    plan = replace(plan, computing=chance.choice([0.0, 0.0, 0.01, 1.0]))
    if chance.random() < 0.15:
        plan = _all_reduce(plan)
    plan = replace(plan, deaths=tuple(_death(chance, plan) for _ in range(chance.choice([0, 0, 1, 2]))))
    plan = replace(_staleness(chance, plan), blocks=chance.choice([1, 1, 2, 5]))
    return replace(plan, **fixed)


def _death(chance: random.Random, plan: Plan) -> tuple[str, int]:
    """Some process, and at which of its yields it dies: while it begins, as often as later."""
    role = chance.choice(["ps", "ps", "worker", "worker", "standby" if plan.standby else "worker"])
    index = chance.randrange(plan.workers if role == "worker" else plan.shards)
    member = chance.randrange(plan.processes) if role == "worker" else 0
    name = f"{role}-{index}#{chance.choice([1, 1, 2])}" + (f".{member}" if member else "")
    return name, round(10 ** chance.uniform(0, 3.5))


def calm(seed: int) -> Plan:
    """The plan of a seed, without anything that goes wrong."""
    return draw(seed, faults=(), deaths=(), weather=Weather(), stalling=0.0, stop_after=None)


def each_death(seed: int, base: Path, *, first: int = 1, every: int) -> Iterator[Plan]:
    """A calm plan with one death: of each of its processes, at every so many of its yields."""
    plan = calm(seed)
    for process in run(plan, base).cluster.born:
        for at in range(first, process.yields + 1, every):
            yield replace(plan, deaths=((process.name, at),))


def run(plan: Plan, base: Path, arrange: Callable[[Cluster], None] | None = None) -> Outcome:
    """Run a plan and judge it. `arrange` may prepare mishaps, before anything starts."""
    here = World(plan.seed, switching=plan.switching, stalling=plan.stalling)
    disk = Disk(here)
    torch.manual_seed(plan.seed)
    with scratch(base, plan.seed) as directory, simulated(disk), contextlib_stack() as patch:
        cluster = Cluster(plan, here, disk, directory)
        _Notes.here = here
        client = importlib.import_module("elastic_ps.worker.wire.client")
        patch(client, "os", SimpleNamespace(getpid=lambda: pid_of(world().process.name)))
        session = importlib.import_module("elastic_ps.worker.session")
        parent = SimpleNamespace(getpid=os.getpid, getppid=lambda: pid_of(world().process.name))
        patch(session, "os", parent)
        patch(membership, "Store", Store)
        patch(groups, "_c10d", Collectives(here, cluster.network.process).module())
        patch(reconfiguration, "Objective", partial(Objective, needed=1))
        patch(Batches, "add", _noted(cluster))
        patch(store.Store, "commit", _watched(cluster))
        patch(store.Store, "newest", _found(cluster))
        patch(Guarded, "drop", _dropped(cluster))
        if arrange is not None:
            arrange(cluster)
        problems: list[str] = []
        try:
            here.run(cluster.run)
        except Stuck as error:
            problems.append(f"stuck: {error}")
        problems += [f"{name} died: {error!r}" for name, error in here.failures]
        problems += judge(cluster)
        return Outcome(plan, problems, cluster, here.log, here.turns, here.points, here.now - 1000)


def _noted(cluster: Cluster) -> Any:
    """`Batches.add`, and a look at the batch that a script is handed a slice of."""
    real = Batches.add

    def add(self: Batches, ranges: Sequence[Range]) -> None:
        real(self, ranges)
        cluster.batches[cluster.here.process] = list(ranges)

    return add


def _dropped(cluster: Cluster) -> Any:
    """`Guarded.drop`, and a problem if a worker has kept the others waiting: no script here does so."""
    real = Guarded.drop

    def drop(self: Guarded, worker: int, outcome: str, reason: str = "") -> None:
        if outcome == "hung":
            cluster.problems.append(f"hung: worker {worker}: {reason}")
        real(self, worker, outcome, reason)

    return drop


def _found(cluster: Cluster) -> Any:
    """`Store.newest`, and a look at what it found: its writer may have been killed before the look."""
    real = store.Store.newest

    def newest(self: store.Store, *arguments: Any) -> Any:
        committed = cluster.committed
        try:
            manifest, problems = real(self, *arguments)
        except NoCheckpoint:
            if committed is not None:
                cluster.problems.append("begun anew: there is a checkpoint, and none was found")
            raise
        if committed is not None and (manifest.term, manifest.version) < committed:
            cluster.problems.append(f"went back too far: to {manifest.version}; on disk was {committed[1]}")
        with cluster.disk.judged():
            cluster.sights.append(checkpoint_sight(self, manifest.version, manifest.term))
        return manifest, problems

    return newest


def _watched(cluster: Cluster) -> Any:
    """`Store.commit`, and a look at what it wrote."""
    real = store.Store.commit

    def commit(self: store.Store, manifest: Any, **options: Any) -> Path:
        path = real(self, manifest, **options)
        cluster.here.note(f"checkpoint of version {manifest.version} in term {manifest.term}")
        cluster.committed = max(cluster.committed or (0, 0), (manifest.term, manifest.version))
        with cluster.disk.judged():
            cluster.sights.append(checkpoint_sight(self, manifest.version, manifest.term))
        return path

    return commit


class _Notes(logging.Handler):
    """What processes log is noted, with the virtual time and the process."""

    here: World | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.here is not None and World.current is self.here:
            self.here.note(f"{self.here.process.name}: {record.getMessage()}")


def listen(*, loudly: bool) -> None:
    """What processes log is kept with the outcome, if wanted, and printed nowhere."""
    logger = logging.getLogger("elastic_ps")
    logger.setLevel(logging.INFO if loudly else logging.CRITICAL)
    logger.propagate = False
    logger.handlers = [_Notes()]
    sys.unraisablehook = lambda _: None  # generators of killed threads
    torch.set_num_threads(1)


__all__ = ["Killed", "Outcome", "draw", "listen", "run"]
