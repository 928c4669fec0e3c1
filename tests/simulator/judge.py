"""Whether a schedule broke a promise: by the histories, and by the values."""

from __future__ import annotations

import math

import torch

from elastic_ps.api.consistency import Consistency
from elastic_ps.checkpoint.store import Store
from elastic_ps.codec import as_bytes, checksum
from elastic_ps.drill import history
from elastic_ps.drill.recorded import read
from elastic_ps.errors import CheckpointError
from elastic_ps.worker.runtime.local_steps import outer_optimizer
from tests.simulator.cluster import MOMENTUM, PARAMETERS, Cluster, Plan, Sight, halved, places

HARMLESS = {"kill_worker", "kill_ps", "kill_standby", "drain_worker", "grow"}
"""Faults that do not keep the parameter server from changing the mode."""

PATIENCE = 1.5
"""Seconds within which it does so."""


def judge(cluster: Cluster) -> list[str]:
    """In words what must not be."""
    plan = cluster.plan
    found = list(cluster.problems)
    histories = read(cluster.history)
    completed = not found and not cluster.stopped_early
    data = history.Data(plan.records, plan.epochs) if completed else None
    consistency = Consistency.model_validate(plan.consistency)
    violations = history.check(
        histories, data, max_staleness=consistency.most_stale, batch=consistency.global_batch_size
    )
    if cluster.stopped_early and not cluster.stopped_well:
        # A server that was killed after the workers had seen a step, and before it was recorded, and that
        # nobody started again, went back to no checkpoint.
        violations = [v for v in violations if v.kind != "acknowledged step lost"]
    found += [str(v) for v in violations]
    found += _objectives(cluster, histories)
    if (consistency.fragments or 1) > 1:
        return found + _fragmented(cluster, histories, completed=completed)
    replayed = Replay(cluster, histories)
    said = history.consistencies(histories)
    whole = {term for term, consistency in said.items() if consistency.reads_one_version}
    for sight in cluster.sights:
        if not _equal_rows(sight.values) and (
            sight.what.startswith(("end", "checkpoint")) or sight.term in whole
        ):
            versions = [replayed.version_like(row) for row in sight.values]
            found.append(
                f"torn: {sight.what} of version {sight.version} has parameters of versions {versions}"
            )
    exact = {term for term in whole if said[term].mode != "local"}
    for sight in cluster.sights:
        kept = sight.what.startswith("checkpoint")
        if kept or (sight.what.startswith("step") and sight.term in exact):
            expected = replayed.at(sight.version, sight.term)
            # A version that a worker has may be lost before it is recorded.
            wrong = expected is not None and not torch.allclose(expected, sight.values[0], rtol=0, atol=1e-9)
            if wrong or (kept and expected is None):
                found.append(f"wrong: {sight.what} of version {sight.version} in term {sight.term}")
    if histories.skipped and not plan.skipping:
        found.append(f"skipped: {histories.skipped}, but no script skips any")
    if completed:
        ends = [s for s in cluster.sights if s.what.startswith("end")]
        for sight in ends:
            expected = replayed.final(sight.version)
            if expected is None or not torch.allclose(expected, sight.values[0], rtol=0, atol=1e-9):
                found.append(f"wrong: {sight.what}, version {sight.version}, is not the final model")
        # A process that was killed before it had ended may have been told already that it is the chief.
        if len({worker for worker, _ in cluster.chiefs}) != 1:
            found.append(f"chiefs: {cluster.chiefs}")
    found += _own_values(cluster, replayed)
    # No schedule damages a file.
    found += [f"set aside: {path.name}" for path in cluster.checkpoints.glob("corrupt-*")]
    if completed or (cluster.stopped_well and not found):
        found += _last_checkpoint(cluster, histories)
    return found


def _objectives(cluster: Cluster, histories: history.Histories) -> list[str]:
    """Whether steps went on being staler than `maxStalenessP99` allows, where nothing else was in the way."""
    plan = cluster.plan
    if plan.stalling or plan.weather.late or not HARMLESS.issuperset(plan.faults):
        return []
    found = []
    for term, said in history.consistencies(histories).items():
        made = [c for c in histories.committed if c.term == term]
        stale = [_stalest(histories, each) for each in made]
        over = [at for at, most in enumerate(stale) if most > (said.max_staleness_p99 or 0)]
        due = made[over[0] + plan.window :] if over and said.max_staleness_p99 is not None else []
        if due and made[-1].time > due[0].time + PATIENCE:
            found.append(f"objective: term {term} goes on with {said.mode}, with steps as stale as {stale}")
    return found


def _fragmented(cluster: Cluster, histories: history.Histories, *, completed: bool) -> list[str]:
    """With fragments, what a death costs follows from no history; but all end with the same values.

    They are those of the last checkpoint of that version. No change is exchanged twice, and if no process was
    lost each parameter has had every record.
    """
    last = {sight.version: sight for sight in cluster.sights if sight.what.startswith("checkpoint")}
    ends = [sight for sight in cluster.sights if sight.what.startswith("end")] if completed else []
    known = [(sight, last[sight.version]) for sight in ends if sight.version in last]
    found = [
        f"wrong: {sight.what}, version {sight.version}, is not what is on disk"
        for sight, kept in known
        if not torch.equal(sight.values, kept.values)
    ]
    if completed and not known:
        found.append("no worker has ended with a version that is on disk")
    return found + [problem for _, kept in known for problem in _marks(cluster, histories, kept)]


def _marks(cluster: Cluster, histories: history.Histories, end: Sight) -> list[str]:
    """Whether each record has left its mark in the final values: once, where the outer rule only adds."""
    plan = cluster.plan
    firsts = [sight for sight in cluster.sights if (sight.what, sight.version) == ("checkpoint", 0)]
    marks = firsts[-1].values[:, :1] - end.values
    trained = {place for commit in history.fate(histories).surviving for place in _placed(commit, plan)}
    somewhere = set((marks.abs() > 1e-9).any(dim=0).nonzero().flatten().tolist())
    found = [] if somewhere == trained else [f"wrong: marks of {somewhere}, trained are {trained}"]
    lost = len(histories.joined) > cluster.wanted or len(histories.started) + len(histories.restored) > 1
    if not lost and not (marks[:, sorted(trained)] > 1e-9).all():
        found.append("wrong: a fragment lacks records, though no process was lost")
    once = Consistency.model_validate(plan.consistency).outer == "downpour"  # with a rate of 1
    if once and not ((marks.abs() < 1e-9) | ((marks - 1).abs() < 1e-9)).all():
        found.append(f"wrong: a fragment has a change twice: {marks.tolist()}")
    return found


def _placed(commit: history.Committed, plan: Plan) -> list[int]:
    return places((r for ranges in commit.steps.values() for r in ranges), plan)


def _own_values(cluster: Cluster, replayed: Replay) -> list[str]:
    """An elastic worker makes its steps on its own values, which an exchange draws to those of a version.

    It begins with a version when it joins, and when it was given no more records for a while.
    """
    rule = Consistency.model_validate(cluster.plan.consistency).outer_rule
    if not rule.elastic:
        return []
    versions = replayed.all_values()
    last: dict[str, list[torch.Tensor]] = {}
    found = []
    for step in cluster.local_steps:
        own = step.after
        drawn = [own + rule.learning_rate * (value - own) for value in versions]
        begun = [*versions, *last.get(step.instance, ())]
        if not _one_of(begun, step.before) or not (step.then is None or _one_of([own, *drawn], step.then)):
            found.append(f"wrong: {step.instance} has values that follow from nothing")
        last[step.instance] = [own, *drawn] if step.then is None else [step.then]
    return found


def _one_of(known: list[torch.Tensor], value: torch.Tensor) -> bool:
    return any(torch.allclose(each, value, rtol=0, atol=1e-9) for each in known)


def _equal_rows(values: torch.Tensor) -> bool:
    return bool(torch.equal(values, values[:1].expand_as(values)))


def _last_checkpoint(cluster: Cluster, histories: history.Histories) -> list[str]:
    """Servers that were asked to end leave the last version."""
    last = max((c.version for c in history.fate(histories).surviving), default=0)
    if not last and cluster.stopped_early:
        return []  # there may be none yet
    try:
        manifest, problems = Store(cluster.checkpoints).newest()
    except CheckpointError as error:
        return [f"no checkpoint at the end: {error}"]
    if manifest.version != last or problems:
        return [f"the last checkpoint is of version {manifest.version}, not {last}; {problems}"]
    return []


class Replay:
    """The model as the commits say that it must be."""

    def __init__(self, cluster: Cluster, histories: history.Histories) -> None:
        self._plan, self._cluster, self._histories = cluster.plan, cluster, histories
        self._lineages: dict[int, list[torch.Tensor]] = {}

    def final(self, version: int) -> torch.Tensor | None:
        """The model at a version that trains the last records, or later; None if it is an earlier one.

        A script may assign values at its end, when others have come to theirs.
        """
        surviving = history.fate(self._histories).surviving
        values = self._values(surviving, self._last_term)
        trained = any(_samples(commit) for commit in surviving[version:])
        return None if trained or version >= len(values) else values[version]

    def at(self, version: int, term: int) -> torch.Tensor | None:
        """The model of a version as it was in a term; None if no commits lead there."""
        if term not in self._lineages:
            known = [c for c in self._histories.committed if c.term <= term]
            restored = [r for r in self._histories.restored if r.term <= term]
            until = history.Histories(committed=known, restored=restored)
            self._lineages[term] = self._values(history.fate(until).surviving, term)
        values = self._lineages[term]
        return values[version] if version < len(values) else None

    def all_values(self) -> list[torch.Tensor]:
        """The model of every version, in every term."""
        for term in {commit.term for commit in self._histories.committed}:
            self.at(0, term)
        return [value for values in self._lineages.values() for value in values]

    def version_like(self, row: torch.Tensor) -> int | str:
        surviving = history.fate(self._histories).surviving
        for version, values in enumerate(self._values(surviving, self._last_term)):
            if torch.allclose(values, row, rtol=0, atol=1e-9):
                return version
        return "?"

    @property
    def _last_term(self) -> int:
        return max((s.term for s in self._cluster.sights), default=0)

    def _first(self, term: int) -> float:
        """What the model began with, which is on disk before anything is trained."""
        firsts = [
            s for s in self._cluster.sights if (s.what, s.version) == ("checkpoint", 0) and s.term <= term
        ]
        return float(firsts[-1].values[0, 0]) if firsts else 0.0

    def _assigned(self, commit: history.Committed) -> float:
        """What a script has assigned that became this version, by a bucket's checksum; NaN if nothing."""
        sums = {
            v.checksum for v in self._histories.values if (v.term, v.version) == (commit.term, commit.version)
        }
        most = PARAMETERS * self._plan.records * self._plan.epochs
        for value in self._cluster.assigned:
            flat = as_bytes(torch.full((most,), value, dtype=torch.float64))
            if any(checksum(flat[: 8 * elements]) in sums for elements in range(1, most + 1)):
                return value
        return math.nan

    def _values(self, commits: list[history.Committed], term: int) -> list[torch.Tensor]:
        plan = self._plan
        first = torch.full((plan.records * plan.epochs,), self._first(term), dtype=torch.float64)
        value = torch.nn.Parameter(first)
        consistency = Consistency.model_validate(plan.consistency)
        inner = torch.optim.SGD([value], lr=1.0, momentum=MOMENTUM)
        optimizer: torch.optim.Optimizer = inner
        if consistency.mode == "local":  # a local step changes a value by as much as its gradient
            optimizer = outer_optimizer(inner, consistency.outer_rule, workers=plan.workers)
        made = [value.detach().clone()]
        for commit in commits:
            samples = _samples(commit)
            if not samples:
                with torch.no_grad():
                    value.fill_(self._assigned(commit))
                made.append(value.detach().clone())
                continue
            value.grad = torch.zeros_like(value)
            for ranges in commit.steps.values():
                weight = sum(r.records for r in ranges) / samples
                for place in places(ranges, plan):
                    value.grad[place] += weight
            if consistency.outer_rule.elastic and consistency.mode == "local":
                value.grad = self._distance(commit, made)
            if consistency.mode != "local":
                rate, momentum = self._scaled(commit)
                optimizer.param_groups[0].update(lr=rate, momentum=momentum)
            optimizer.step()
            made.append(value.detach().clone())
        return made

    def _scaled(self, commit: history.Committed) -> tuple[float, float]:
        """The learning rate and the momentum of a commit, which has those of its stalest step."""
        said = history.consistencies(self._histories).get(commit.term)
        stale = _stalest(self._histories, commit)
        match said.scale if said else "none":
            case "none":
                return 1.0, MOMENTUM
            case "inverse":
                return 1 / (1 + stale), MOMENTUM
            case "damped":
                remembered = MOMENTUM / (1 - MOMENTUM) / (1 + stale)
                return 1 / (1 + stale), remembered / (1 + remembered)
            case _:
                return halved(stale), MOMENTUM

    def _distance(self, commit: history.Committed, made: list[torch.Tensor]) -> torch.Tensor:
        """What an elastic worker has pushed: how far the values that it had pulled are from its own."""
        ((step, ranges),) = commit.steps.items()
        trained = set(places(ranges, self._plan))
        own = [
            each.after
            for each in self._cluster.local_steps
            if each.worker == step.worker
            and each.time < commit.time
            and not trained.isdisjoint(places(each.ranges, self._plan))
        ][-1]
        sent = next(s for s in self._histories.sent if s.step == step)
        return made[sent.version - sent.stale] - own


def _stalest(histories: history.Histories, commit: history.Committed) -> int:
    """How stale the stalest step of a commit is, as their workers say."""
    steps, version = commit.steps, commit.version - 1
    return max((s.stale for s in histories.sent if s.step in steps and s.version == version), default=0)


def _samples(commit: history.Committed) -> int:
    return sum(r.records for ranges in commit.steps.values() for r in ranges)


def checkpoint_sight(store: Store, version: int, term: int) -> Sight:
    """What is on the disk under a version."""
    with store.open(version) as reader:
        places = reader.manifest.specs[0].elements
        values = torch.stack([reader.value(tensor, 0, places) for tensor in range(PARAMETERS)])
    return Sight("checkpoint", term, version, values)
