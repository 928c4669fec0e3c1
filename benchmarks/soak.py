"""Hours of faults on real processes, with counts of records that do not rely on the library's own histories.

`python -m benchmarks.soak` (`make soak`) trains one job after the other, in every mode, with one and two
shards, with and without standbys. Meanwhile it kills and freezes processes, resets connections and changes
the number of workers, at moments that follow from a seed. A fault may strike while the job still recovers
from another.

The model itself keeps the accounts. It has a float64 for each worker, epoch and record, and each batch's
gradient is nonzero for exactly its own. RMSprop with alpha 0 divides a gradient by its own size, so a number
moves by exactly 1 for each version that contains its record, however the mean is weighted. At the end each
record of each epoch must have moved by 1 in all, for one worker. Another parameter moves in every step: its
elements are in buckets of every shard, so a model that is torn between two versions shows.

Where tables that grow are trained, each record of each epoch has a row, too. Adagrad moves it by 1, against
the gradient's sign, when it is trained first, and by less when it is trained again.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import psutil
import torch

from benchmarks.goodput_machines import signal_to
from benchmarks.soak_modes import MODES
from elastic_ps.api.consistency import Consistency
from elastic_ps.api.job import TrainingJob, parse_job
from elastic_ps.contract.env import Role
from elastic_ps.contract.schemes import Scheme
from elastic_ps.drill.history import Data, check
from elastic_ps.drill.recorded import read
from elastic_ps.drill.wire import Wires
from elastic_ps.embedding import Adagrad, constant
from elastic_ps.embedding.module import Embedding
from elastic_ps.local import Launcher, Options

WORKERS, MOST_WORKERS, EPOCHS, BATCH = 3, 4, 2, 4
CLOCK = 4096
"""Elements of the parameter that moves in every step: more than a bucket holds."""
LEASE = 2.0
STALLED = 120.0
"""Seconds without a new version, term or process after which a job counts as stuck."""
LEAST = 1e-9
"""What a number has at least whose record was trained."""
QUIET = 85.0
"""Per cent of the records from which on nothing more is broken, so that the job can end."""

TRANSPORTS: tuple[Scheme, ...] = ("shm", "tcp", "grpc")

Kind: TypeAlias = Literal[
    "kill-worker", "kill-ps", "kill-standby", "freeze-worker", "freeze-ps", "reset", "rescale", "change"
]


class Accounts(torch.nn.Module):
    """The parameters: how often each worker has trained each record, by epoch; and a clock.

    Args:
        rows: whether each record of each epoch has a row, too.
    """

    def __init__(self, records: int, *, rows: bool = False) -> None:
        super().__init__()
        rate = Adagrad(lr=1.0, eps=0.0)
        options: dict[str, Any] = {"init": constant(0.0), "optimizer": rate, "dtype": torch.float64}
        self.rows = Embedding("rows", 1, **options) if rows else None
        zeros = [torch.zeros(EPOCHS, records, dtype=torch.float64) for _ in range(MOST_WORKERS)]
        self.trained = torch.nn.ParameterList(torch.nn.Parameter(each) for each in zeros)
        self.clock = torch.nn.Parameter(torch.zeros(CLOCK, dtype=torch.float64))


def make_optimizer(accounts: Accounts) -> torch.optim.Optimizer:
    """Each element with a gradient other than 0 moves by 1, against the gradient's sign."""
    return torch.optim.RMSprop(accounts.parameters(), lr=1.0, alpha=0.0, eps=1e-30)


def train(records: int, seconds: float, results: str, rows: bool = False) -> None:
    """What a worker runs; a batch takes `seconds`. The chief saves the model in the directory `results`."""
    import elastic_ps

    torch.set_num_threads(1)
    accounts = Accounts(records, rows=rows)
    session = elastic_ps.connect()
    optimizer = session.optimizer(make_optimizer(accounts), accounts)
    loader = session.loader(list(range(records)), BATCH, epochs=EPOCHS)
    for batch in loader:
        optimizer.zero_grad()
        own = accounts.trained[session.worker][loader.epoch, batch]
        time.sleep(seconds * random.random() * 2)
        moved = own.sum() + accounts.clock.sum()
        if accounts.rows is not None:
            moved = moved + accounts.rows(torch.as_tensor(batch) + loader.epoch * records).sum()
        (-moved).backward()
        optimizer.step()
    if session.is_chief:
        part = Path(results) / f"{os.getpid()}.part"
        state = accounts.state_dict()
        if accounts.rows is not None:
            state["rows"] = accounts.rows(torch.arange(EPOCHS * records)).detach()
        torch.save(state, part)
        part.rename(part.with_suffix(".pt"))


@dataclass(frozen=True)
class Plan:
    """One job of a soak; everything follows from the seed and the number."""

    seed: int
    number: int
    mode: str
    shards: int
    standbys: bool
    transport: Scheme

    @property
    def relayed(self) -> bool:
        """Whether workers reach the parameter server through relays, so that connections can be reset."""
        return self.transport != "shm"

    @property
    def servers(self) -> str:
        durability = "standby" if self.standbys else "checkpoint"
        return f"{self.shards} shard{'s' * (self.shards > 1)}, {durability}"

    @property
    def name(self) -> str:
        return f"{self.mode}, {self.servers}"


def plans(seed: int, modes: Sequence[str] = tuple(MODES)) -> Iterator[Plan]:
    """Every combination in an order that the seed decides, again and again over another transport.

    Each mode comes once before one comes again.
    """
    chance, shuffled = random.Random(seed), list(modes)
    chance.shuffle(shuffled)
    ways = list(itertools.product((1, 2), (False, True)))
    chance.shuffle(ways)
    combinations = [
        (mode, *ways[(place + turn) % len(ways)])
        for turn in range(len(ways))
        for place, mode in enumerate(shuffled)
    ]
    for number, (mode, shards, standbys) in enumerate(itertools.cycle(combinations)):
        transport = TRANSPORTS[(number + number // len(combinations)) % len(TRANSPORTS)]
        yield Plan(seed, number, mode, shards, standbys, transport)


@dataclass
class Verdict:
    """What became of one job. `problems`: empty if all is well."""

    plan: Plan
    seconds: float
    versions: int
    terms: int
    faults: collections.Counter[Kind]
    missing: int = 0
    twice: int = 0
    problems: list[str] = field(default_factory=list)


def make_job(plan: Plan, *, records: int, seconds: float, results: Path) -> TrainingJob:
    mode = MODES[plan.mode]
    spec = {
        "entrypoint": "benchmarks.soak:train",
        "arguments": {
            "records": records,
            "seconds": seconds,
            "results": str(results),
            "rows": mode.trains_rows,
        },
        "worker": {
            "replicas": WORKERS,
            "processes": mode.processes,
            "minReplicas": mode.consistency.get("quorum", 1),
            "maxReplicas": MOST_WORKERS,
            "leaseDuration": f"{LEASE:g}s",
            "progressTimeout": "60s",
        },
        "parameterServer": {
            "replicas": plan.shards,
            "bucketBytes": 4096,
            "durability": "standby" if plan.standbys else "checkpoint",
            "checkpoint": {"everyVersions": 12, "interval": "1h"},
        },
        "consistency": mode.consistency,
        "data": {"shardRecords": 16},
        "runPolicy": {"backoffLimit": 0},
    }
    document = {"apiVersion": "elastic-ps.dev/v1alpha1", "kind": "TrainingJob"}
    name = f"soak-{plan.seed}-{plan.number}"
    return parse_job({**document, "metadata": {"name": name}, "spec": spec}, source="soak")


class Trouble:
    """Brings faults about in a running job, some while others last.

    Args:
        every: mean seconds between two faults.
    """

    def __init__(self, launcher: Launcher, wires: Wires, plan: Plan, *, every: float) -> None:
        self.done: collections.Counter[Kind] = collections.Counter()
        self._launcher, self._wires, self._plan = launcher, wires, plan
        self._mode = MODES[plan.mode]
        self._random = random.Random(f"{plan.seed} {plan.number}")
        self._every = every
        self._next = 0.0
        self._frozen: dict[int, float] = {}
        self._kinds: list[Kind] = [k for k in get_args(Kind) if self._possible(k)]
        changes: list[Kind] = ["change"] * self._kinds.count("change")
        self._kinds += (len(self._kinds) - 2) * changes  # every other one

    def _possible(self, kind: Kind) -> bool:
        if kind == "kill-standby":
            return self._plan.standbys
        if kind == "reset":
            return self._plan.relayed
        if kind == "change":
            return bool(self._mode.changes)
        return kind != "rescale" or self._mode.rescaled

    def go_on(self, now: float, *, quiet: bool) -> None:
        """Do what is due; with `quiet` nothing new is broken."""
        for pid in [pid for pid, until in self._frozen.items() if quiet or now >= until]:
            del self._frozen[pid]
            signal_to(pid, signal.SIGCONT)
        if not self._next:
            self._next = now + self._random.expovariate(1 / self._every)
        if not quiet and now >= self._next:
            self._next = now + self._random.expovariate(1 / self._every)
            kind, index = self._random.choice(self._kinds), self._random.randrange(MOST_WORKERS)
            lasting = self._random.uniform(0.1, 2 * LEASE)
            if self._strike(kind, index, now + lasting):
                self.done[kind] += 1

    def _strike(self, kind: Kind, index: int, until: float) -> bool:
        if kind == "rescale":
            self._launcher.directory.scale(max(self._mode.consistency.get("quorum", 1), 1 + index))
            return True
        if kind == "change":
            wanted = Consistency.model_validate(self._random.choice(self._mode.changes))
            before, after = self._launcher.directory.edit(lambda job: with_consistency(job, wanted))
            return before != after
        if kind == "reset":
            return self._wires.reset(index % WORKERS) > 0
        verb, _, role = kind.partition("-")
        pid = self._pid(role, index % (WORKERS if role == "worker" else self._plan.shards))  # type: ignore[arg-type]
        if pid is None:
            return False
        if verb == "kill":
            return signal_to(pid, signal.SIGKILL)
        self._frozen[pid] = until
        return signal_to(pid, signal.SIGSTOP)

    def _pid(self, role: Role, index: int) -> int | None:
        """Of a process of this kind; of a worker with several processes, one of those that train."""
        pid = self._started(role, index)
        if pid is not None and role == "worker" and self._mode.processes > 1:
            with contextlib.suppress(psutil.NoSuchProcess):
                pids = sorted(child.pid for child in psutil.Process(pid).children())
                return self._random.choice(pids) if pids else None
        return pid

    def _started(self, role: Role, index: int) -> int | None:
        return next(
            (
                p.pid
                for p in self._launcher.status().processes
                if (p.role, p.index) == (role, index) and p.state not in ("ended", "starting")
            ),
            None,
        )


def with_consistency(job: TrainingJob, consistency: Consistency) -> TrainingJob:
    """The same job that makes versions otherwise."""
    return job.model_copy(update={"spec": job.spec.model_copy(update={"consistency": consistency})})


def soak(plan: Plan, directory: Path, *, records: int, seconds: float, every: float) -> Verdict:
    """Run one job to its end. Blocks; a job that stands still for `STALLED` is stopped."""
    results, history = directory / "results", directory / "history"
    for each in (results, history):
        each.mkdir(parents=True)
    job = make_job(plan, records=records, seconds=seconds, results=results)
    wires, began = Wires(), time.monotonic()
    try:
        route = wires.route if plan.relayed else None
        options = Options(root=directory / "state", history=history, transport=plan.transport, route=route)
        with Launcher(job, options) as launcher:
            launcher.start()
            trouble = Trouble(launcher, wires, plan, every=every)
            stuck = _follow(launcher, trouble)
            outcome = launcher.outcome()
    finally:
        wires.close()
    progress = outcome.status.server.progress if outcome.status.server else None
    verdict = Verdict(
        plan=plan,
        seconds=time.monotonic() - began,
        versions=progress.version if progress else 0,
        terms=outcome.status.server.term if outcome.status.server else 0,
        faults=trouble.done,
    )
    if stuck:
        verdict.problems.append(stuck)
    elif outcome.verdict.phase != "Succeeded":
        verdict.problems.append(f"{outcome.verdict.phase}: {outcome.verdict.message}")
    else:
        account(verdict, sorted(results.glob("*.pt")))
        said = job.spec.consistency
        data = Data(records, EPOCHS)
        found = check(read(history), data, max_staleness=said.most_stale, batch=said.global_batch_size)
        verdict.problems += [f"the histories: {violation}" for violation in found]
    return verdict


def _follow(launcher: Launcher, trouble: Trouble) -> str:
    """Make trouble until the job ends; returns why it was stopped, or ""."""
    seen: object = None
    since = time.monotonic()
    while not launcher.wait(timedelta(seconds=0.05)):
        now, status = time.monotonic(), launcher.status()
        progress = status.server.progress if status.server else None
        percent = 0.0
        if progress and progress.records_expected:
            percent = 100 * progress.records_applied / progress.records_expected
        trouble.go_on(now, quiet=percent >= QUIET)
        moved = (progress.version if progress else 0, [(p.pid, p.state) for p in status.processes])
        if moved != seen:
            seen, since = moved, now
        if now - since > STALLED:
            for process in status.processes:
                if process.state != "ended":
                    signal_to(process.pid, signal.SIGUSR1)  # the log says where its threads are
            time.sleep(2)
            launcher.stop("it stands still", at_once=True)
            launcher.wait()
            return f"nothing moved for {STALLED:.0f} s at version {moved[0]}: {moved[1]}"
    return ""


def account(verdict: Verdict, saved: Sequence[Path]) -> None:
    """Judge the models that were saved: one, by the one chief."""
    counted = MODES[verdict.plan.mode].counted
    if len(saved) != 1:
        verdict.problems.append(f"{len(saved)} workers were the chief and saved the model")
    for path in saved:
        state = torch.load(path, weights_only=True)
        clock = state.pop("clock")
        if counted == "histories":
            continue
        # What moves the clock without being a version is in all of the model or in none of it.
        right = torch.tensor(float(verdict.versions)) if counted == "versions" else clock[0]
        if not bool(torch.isclose(clock, right.to(clock.dtype), rtol=1e-9).all()):
            found = sorted({round(version, 6) for version in clock.tolist()})
            verdict.problems.append(
                f"the model has versions {', '.join(f'{version:g}' for version in found)}, but the job is at "
                f"version {verdict.versions}"
            )
        cells = torch.stack([state[f"trained.{worker}"] for worker in range(MOST_WORKERS)])
        times = cells.sum(0)
        if (rows := state.get("rows")) is not None:
            verdict.missing += int((rows < LEAST).sum())
            verdict.twice += int((rows > 1 + LEAST).sum())
        if counted == "trained":
            verdict.missing += int((times < LEAST).sum())
        else:
            if float((cells - cells.round()).abs().max()) > 1e-9:
                verdict.problems.append("a number has not moved by an integer")
            verdict.missing += int((times.round() < 1).sum())
            verdict.twice += int((times.round() > 1).sum())
        if verdict.missing or verdict.twice:
            verdict.problems.append(f"{verdict.missing} records are missing, {verdict.twice} came twice")


def table(verdicts: Sequence[Verdict], records: int) -> str:
    """The result as Markdown: by mode, by what the parameter servers are, and by transport."""
    kinds = get_args(Kind)
    lines = [
        f"| job | jobs | {' | '.join(kinds)} | versions | terms | records | missing | twice | failed |",
        "|" + " --- |" * (len(kinds) + 8),
    ]
    modes = [mode for mode in MODES if any(v.plan.mode == mode for v in verdicts)]
    servers = sorted({v.plan.servers for v in verdicts})
    for name in [*modes, *servers, *TRANSPORTS, "all"]:
        rows = [v for v in verdicts if name in ("all", v.plan.transport, v.plan.servers, v.plan.mode)]
        faults: collections.Counter[Kind] = sum((v.faults for v in rows), collections.Counter())
        numbers = [
            len(rows),
            *(faults[kind] for kind in kinds),
            sum(v.versions for v in rows),
            sum(v.terms for v in rows),
            len(rows) * EPOCHS * records,
            sum(v.missing for v in rows),
            sum(v.twice for v in rows),
            sum(bool(v.problems) for v in rows),
        ]
        lines.append(f"| {name} | " + " | ".join(f"{number:,}" for number in numbers) + " |")
    return "\n".join(lines)


def main() -> int:
    """The command; returns its exit status: 1 if anything was lost, came twice, or stood still."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="start no job after this time")
    parser.add_argument("--seed", type=int, default=None, help="default: a new one")
    parser.add_argument(
        "--modes", nargs="*", default=[], metavar="MODE", help="those that begin so; all by default"
    )
    parser.add_argument("--first", type=int, default=0, help="begin with the job with this number")
    parser.add_argument("--job", type=int, default=None, help="only the job with this number")
    parser.add_argument("--records", type=int, default=600, help="records of each job")
    parser.add_argument("--seconds", type=float, default=0.05, help="mean seconds that a batch takes")
    parser.add_argument("--every", type=float, default=3.0, help="mean seconds between two faults")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 20) if arguments.seed is None else arguments.seed
    for wanted in arguments.modes:
        if not any(mode.startswith(wanted) for mode in MODES):
            parser.error(
                f"--modes: there is no mode that begins with {wanted!r}; there are {'; '.join(MODES)}"
            )
    modes = [mode for mode in MODES if mode.startswith(tuple(arguments.modes or [""]))]
    began, verdicts = time.monotonic(), list[Verdict]()
    print(f"seed {seed}", flush=True)
    try:
        for plan in plans(seed, modes):
            if arguments.job not in (None, plan.number) or plan.number < arguments.first:
                continue
            if time.monotonic() - began > 60 * arguments.minutes:
                break
            verdicts.append(_one(plan, arguments))
            if arguments.job is not None:
                break
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    minutes = (time.monotonic() - began) / 60
    print(f"\nseed {seed}, {minutes:.1f} minutes\n\n{table(verdicts, arguments.records)}")
    return 1 if any(verdict.problems for verdict in verdicts) or not any(v.faults for v in verdicts) else 0


def _one(plan: Plan, arguments: argparse.Namespace) -> Verdict:
    """Run a job and say what became of it; its directory stays if there is a problem."""
    directory = Path(tempfile.mkdtemp(prefix="elastic-ps-soak-"))
    options = {"records": arguments.records, "seconds": arguments.seconds, "every": arguments.every}
    verdict = soak(plan, directory, **options)
    faults = ", ".join(f"{kind} {count}" for kind, count in sorted(verdict.faults.items()))
    print(
        f"job {plan.number} ({plan.name}, {plan.transport}): {'FAILED' if verdict.problems else 'ok'}, "
        f"{verdict.versions} versions, {verdict.terms} terms, {verdict.seconds:.0f} s; {faults}",
        flush=True,
    )
    if not verdict.problems:
        shutil.rmtree(directory)
        return verdict
    for problem in verdict.problems[:10]:
        print(f"    {problem}")
    again = [f"--{name} {value:g}" for name, value in options.items()]
    again += ["--modes", *(shlex.quote(mode) for mode in arguments.modes)] if arguments.modes else []
    print(
        f"    {directory} has the logs and histories; again: "
        f"python -m benchmarks.soak --seed {plan.seed} --job {plan.number} {' '.join(again)}",
        flush=True,
    )
    return verdict


if __name__ == "__main__":
    sys.exit(main())
