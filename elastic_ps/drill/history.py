"""Checks the recorded histories of both sides for lost or repeated work.

The parameter server records its commits and the version from which a new term continues; each worker records
what it sent and what it saw applied. Neither side is trusted alone: `check` compares them and returns
violations. Without any, the gradient of every record is in the model exactly once.

Pure; `recorded.read` reads the files. All times are of one machine's monotonic clock.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from elastic_ps.api.compression import Compression
from elastic_ps.api.consistency import Consistency
from elastic_ps.core.ledger import Range

Kind: TypeAlias = Literal[
    "record missing",  # a record's gradient is not in the model
    "record twice",  # it is in the model more than once
    "step twice",  # a worker's step was committed twice
    "step not sent",  # a commit names a step that no worker has sent, or has sent for another version
    "step in part",  # a commit names a step of which not all buckets were sent
    "step too stale",  # a commit names a step that was computed on an older version than the job allows
    "stale term",  # a parameter server committed after a newer one had started
    "stale incarnation",  # a commit names a step that was sent after a newer process took the worker's place
    "acknowledged step lost",  # a worker saw its step applied, but no commit has it and nothing undid it
    "mixed compression",  # two processes have encoded or decoded in different ways in one term
    "values differ",  # two processes have different values of one version, or a checkpoint is of another one
    "version size",  # a version was made of other records than the next ones, as many as the job says
    "version gap",  # versions of a term do not follow one another
    "version from nowhere",  # a term continues from a version that no term before had committed
]


class StepId(NamedTuple):
    """A worker's step. Incarnations are unique, so this name is, too."""

    worker: int
    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"step {self.step} of worker {self.worker} (incarnation {self.incarnation})"


@dataclass(frozen=True)
class Committed:
    """A parameter server has made `version` from these steps.

    `decided` is a time before it checked that no newer term has begun; `time` is a time after the version
    became visible.
    """

    time: float
    term: int
    version: int
    steps: Mapping[StepId, tuple[Range, ...]]
    decided: float


@dataclass(frozen=True)
class Started:
    """A parameter server has begun a term. From then on an older one may commit nothing.

    `consistency`: how it makes versions; None if that is not recorded.
    """

    time: float
    term: int
    consistency: Consistency | None = None


@dataclass(frozen=True)
class Restored:
    """A term continues from a checkpoint of `version`. Later commits of older terms are undone.

    `consistency`: as in `Started`. A change of it also begins a term.
    """

    time: float
    term: int
    version: int
    consistency: Consistency | None = None


@dataclass(frozen=True)
class Joined:
    """A parameter server has admitted a worker process."""

    time: float
    worker: int
    incarnation: int


@dataclass(frozen=True)
class Sent:
    """A worker has begun to push a bucket for the round on `version`.

    `stale`: the staleness of the step, in versions.
    """

    time: float
    step: StepId
    bucket: int
    version: int
    attempt: int = 0
    stale: int = 0


@dataclass(frozen=True)
class Acknowledged:
    """A worker has the version with its step."""

    time: float
    step: StepId
    term: int
    version: int
    records: tuple[Range, ...]


@dataclass(frozen=True)
class Values:
    """The checksum of a bucket's values in a process, of `version` in `term`.

    A parameter server records it after loading, making or copying a version, a worker after pulling one.
    """

    time: float
    process: str
    term: int
    version: int
    bucket: int
    checksum: int


@dataclass(frozen=True)
class Coding:
    """How a process encodes and decodes in a term."""

    time: float
    process: str
    term: int
    compression: Compression


@dataclass
class Histories:
    """The records of both sides, each list in order of time."""

    started: list[Started] = field(default_factory=list)
    restored: list[Restored] = field(default_factory=list)
    joined: list[Joined] = field(default_factory=list)
    committed: list[Committed] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    acknowledged: list[Acknowledged] = field(default_factory=list)
    skipped: list[Range] = field(default_factory=list)
    """Records that scripts have skipped, and that may be missing."""
    values: list[Values] = field(default_factory=list)
    codings: list[Coding] = field(default_factory=list)


@dataclass(frozen=True)
class Violation:
    """A violation of the guarantee. `records`: the number of affected records; `time`: when it happened."""

    kind: Kind
    text: str
    time: float = math.inf
    records: int = 0

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True)
class Data:
    """The records that a successful job must have trained."""

    records: int
    epochs: int


def check(
    histories: Histories, data: Data | None, *, max_staleness: float = 0, batch: int | None = None
) -> list[Violation]:
    """All violations of the guarantee in the histories.

    Args:
        histories: the histories of one run, from its first term on.
        data: the records of a successful job; None for others, in which records may be missing.
        max_staleness: the job's limit, in versions, for terms that do not record it; infinite if there is
        none. batch: the number of records in each version, if that is constant.
    """
    surviving = fate(histories).surviving
    return [
        *_versions(histories),
        *_terms(histories),
        *_steps(histories),
        *_staleness(histories, max_staleness),
        *_incarnations(histories),
        *_acknowledgements(histories),
        *_codings(histories),
        *_values(histories),
        *_records(surviving, histories, data),
        *(_sizes(surviving, histories.skipped, data, batch) if data and batch else ()),
    ]


def bases(histories: Histories) -> dict[int, int]:
    """The version from which each effective term continued.

    A term is not effective if it has committed nothing before a newer term continued from a later version.
    For example, a parameter server goes back to a checkpoint because it cannot reach the standby, and is
    replaced at once. The next one can, and saves the rounds of an older term that the standby has.
    """
    committing = {committed.term for committed in histories.committed}
    found = dict.fromkeys(committing, 0)
    found |= {restored.term: restored.version for restored in histories.restored}
    later = 0
    for term in sorted(found, reverse=True):
        if term not in committing and found[term] < later:
            del found[term]
        else:
            later = found[term]
    return found


def consistencies(histories: Histories) -> dict[int, Consistency]:
    """The consistency of each term, as far as it is recorded.

    A term that starts from scratch, because there was no checkpoint, records nothing. It has the previous
    one.
    """
    events: list[Started | Restored] = [*histories.started, *histories.restored]
    said = {each.term: each.consistency for each in events if each.consistency is not None}
    for term in sorted({each.term for each in histories.committed} - said.keys()):
        before = max((each for each in said if each < term), default=None)
        if before is not None:
            said[term] = said[before]
    return said


@dataclass(frozen=True)
class Fate:
    """The fate of the commits: `surviving` are in the model, `undone` with the term that went back."""

    surviving: list[Committed]
    undone: dict[int, list[Committed]]


def fate(histories: Histories) -> Fate:
    """Follow the terms: each continues from its base, and undoes earlier commits above it."""
    by_term: dict[int, list[Committed]] = defaultdict(list)
    for committed in histories.committed:
        by_term[committed.term].append(committed)
    surviving: list[Committed] = []
    undone: dict[int, list[Committed]] = {}
    for term, base in sorted(bases(histories).items()):
        undone[term] = [committed for committed in surviving if committed.version > base]
        surviving = [committed for committed in surviving if committed.version <= base]
        surviving += sorted(by_term[term], key=lambda committed: committed.version)
    return Fate(surviving, undone)


def _versions(histories: Histories) -> Iterator[Violation]:
    """Check that versions count up from a term's base, and that an older term has committed the base."""
    reached = 0
    for term, base in sorted(bases(histories).items()):
        own = [committed for committed in histories.committed if committed.term == term]
        if base > reached:
            text = f"term {term} continues from version {base}; before it, only version {reached} was reached"
            yield Violation("version from nowhere", text)
        last = base
        for committed in own:
            if committed.version != last + 1:
                text = f"term {term} committed version {committed.version} after version {last}"
                yield Violation("version gap", text, committed.time)
            last = committed.version
        reached = last


def _terms(histories: Histories) -> Iterator[Violation]:
    """Find commits that were decided after a newer term had begun.

    An earlier decision may be recorded later: it is not durable, and the newer term undoes it.
    """
    begun = [(started.time, started.term) for started in histories.started]
    begun += [(restored.time, restored.term) for restored in histories.restored]
    for committed in histories.committed:
        newer = [(t, term) for t, term in begun if term > committed.term and t < committed.decided]
        if newer:
            t, term = min(newer)
            text = (
                f"term {committed.term} committed version {committed.version} "
                f"{committed.decided - t:.3f} s after term {term} had begun"
            )
            yield Violation("stale term", text, committed.time)


def _steps(histories: Histories) -> Iterator[Violation]:
    """Check that each committed step is unique, and was sent completely for its version."""
    buckets = _buckets_sent(histories.sent)
    whole = {sent.bucket for sent in histories.sent}
    seen: dict[StepId, int] = {}
    for committed in histories.committed:
        for step in committed.steps:
            if step in seen:
                text = f"{step} is in version {seen[step]} and in version {committed.version}"
                yield Violation("step twice", text, committed.time)
            seen[step] = committed.version
            given = buckets.get((step, committed.version - 1), set())
            if not given:
                text = f"{step} is in version {committed.version}, but was not sent for it"
                yield Violation("step not sent", text, committed.time)
            elif given != whole:
                text = f"{step} is in version {committed.version} without buckets {sorted(whole - given)}"
                yield Violation("step in part", text, committed.time)


def _staleness(histories: Histories, default: float) -> Iterator[Violation]:
    """Check that no committed step is staler than its term allows."""
    allowed = {term: said.most_stale for term, said in consistencies(histories).items()}
    stale = {(sent.step, sent.version): sent.stale for sent in histories.sent}
    for committed in histories.committed:
        most = allowed.get(committed.term, default)
        for step in committed.steps:
            found = stale.get((step, committed.version - 1), 0)
            if not 0 <= found <= most:
                base = committed.version - 1 - found
                text = (
                    f"{step}, computed on version {base}, is in version {committed.version}, but may be at "
                    f"most {most} versions stale"
                )
                yield Violation("step too stale", text, committed.time)


def _buckets_sent(sent: Sequence[Sent]) -> dict[tuple[StepId, int], set[int]]:
    """The buckets of a step that were sent in its last attempt on a version."""
    attempts: dict[tuple[StepId, int], int] = {}
    buckets: dict[tuple[StepId, int], set[int]] = {}
    for each in sent:
        key = (each.step, each.version)
        if each.attempt > attempts.get(key, -1):
            attempts[key], buckets[key] = each.attempt, set()
        if each.attempt == attempts[key]:
            buckets[key].add(each.bucket)
    return buckets


def _incarnations(histories: Histories) -> Iterator[Violation]:
    """Find steps that were still sent after a newer process had replaced the worker."""
    last_sent: dict[StepId, float] = {}
    for sent in histories.sent:
        last_sent[sent.step] = max(sent.time, last_sent.get(sent.step, -math.inf))
    joined: dict[int, list[Joined]] = defaultdict(list)
    for each in histories.joined:
        joined[each.worker].append(each)
    for committed in histories.committed:
        for step in committed.steps:
            at = last_sent.get(step, -math.inf)
            newer = [j for j in joined[step.worker] if j.incarnation > step.incarnation and j.time < at]
            if newer:
                text = f"{step} was sent after incarnation {newer[0].incarnation} had joined"
                yield Violation("stale incarnation", text, committed.time)


def _acknowledgements(histories: Histories) -> Iterator[Violation]:
    """Check that steps which a worker saw applied were committed, or undone by a later term."""
    commits = {(committed.term, committed.version): committed for committed in histories.committed}
    for seen in histories.acknowledged:
        committed = commits.get((seen.term, seen.version))
        if committed is None:
            # The parameter server may die between applying a round and recording it.
            if any(e > seen.term and base < seen.version for e, base in bases(histories).items()):
                continue
            text = f"{seen.step} was seen in version {seen.version}, which term {seen.term} never committed"
        elif seen.step not in committed.steps:
            text = f"{seen.step} was seen in version {seen.version}, which is made of other steps"
        elif committed.steps[seen.step] != seen.records:
            text = (
                f"{seen.step} was computed on {seen.records}, but was counted as {committed.steps[seen.step]}"
            )
        else:
            continue
        yield Violation("acknowledged step lost", text, seen.time)


def _codings(histories: Histories) -> Iterator[Violation]:
    """Check that all processes of a term encode and decode in the same way."""
    first: dict[int, Coding] = {}
    for coding in histories.codings:
        other = first.setdefault(coding.term, coding)
        if coding.compression != other.compression:
            text = (
                f"in term {coding.term} {other.process} has compression ({_said(other.compression)}), and "
                f"{coding.process} has ({_said(coding.compression)})"
            )
            yield Violation("mixed compression", text, coding.time)


def _said(compression: Compression) -> str:
    return str(compression.model_dump(mode="json", by_alias=True, exclude_defaults=True) or "none")


def _values(histories: Histories) -> Iterator[Violation]:
    """Check that all processes have equal values of a version, and a term those of its base.

    The base is not compared if the term encodes values differently, since workers may have rounded ones.
    """
    sends = {
        coding.term: (coding.compression.values, coding.compression.values_options)
        for coding in histories.codings
    }
    known: dict[tuple[int, int], dict[int, Values]] = defaultdict(dict)
    for found in histories.values:
        first = known[found.term, found.version].setdefault(found.bucket, found)
        if first.checksum != found.checksum:
            text = (
                f"bucket {found.bucket} of version {found.version} in term {found.term} differs between "
                f"{first.process} and {found.process}"
            )
            yield Violation("values differ", text, found.time)
    restored = {each.term for each in histories.restored}
    made_in: dict[int, int] = {}  # the versions that a term could continue from, and the terms that made them
    for term, base in sorted(bases(histories).items()):
        comparable = term in restored and base in made_in and sends.get(term) == sends.get(made_in[base])
        before = known[made_in[base], base] if comparable else {}
        for bucket, values in known[term, base].items():
            if bucket in before and before[bucket].checksum != values.checksum:
                text = (
                    f"term {term} continues from bucket {bucket} of version {base} with other values than "
                    f"term {before[bucket].term} had"
                )
                yield Violation("values differ", text, values.time)
        made_in = {version: made for version, made in made_in.items() if version < base} | {base: term}
        made_in |= {c.version: term for c in histories.committed if c.term == term}


def _records(surviving: Sequence[Committed], histories: Histories, data: Data | None) -> Iterator[Violation]:
    """Check that every record of every epoch is in the surviving commits once, or was skipped."""
    by_epoch: dict[int, list[tuple[Range, float]]] = defaultdict(list)
    for each in surviving:
        for ranges in each.steps.values():
            for r in ranges:
                by_epoch[r.epoch].append((r, each.time))
    for epoch in range(data.epochs if data else 0):
        by_epoch.setdefault(epoch, [])
    for epoch, found in sorted(by_epoch.items()):
        found.sort()
        yield from _doubled(epoch, found)
        if data is not None:
            skipped = [r for r in histories.skipped if r.epoch == epoch]
            known = sorted([*(r for r, _ in found), *skipped])
            yield from _missing(epoch, known, histories.committed, data)


def _sizes(
    surviving: Sequence[Committed], skipped: Sequence[Range], data: Data, batch: int
) -> Iterator[Violation]:
    """Check that each version has the next `batch` records of an epoch, without skipped ones."""
    made = [_positions(r for ranges in each.steps.values() for r in ranges) for each in surviving]
    left_out = _positions(skipped).difference(*made)  # of a term that is undone, some may be trained later
    starts = ((epoch, start) for epoch in range(data.epochs) for start in range(0, data.records, batch))
    wanted = (
        _positions([Range(epoch, start, min(start + batch, data.records))]) - left_out
        for epoch, start in starts
    )
    trained = (each for each in wanted if each)
    for committed, found, expected in zip(surviving, made, trained, strict=False):
        if found != expected:
            text = (
                f"version {committed.version} is made of {len(found)} records; {len(found & expected)} of "
                f"them are among the {len(expected)} that come next"
            )
            yield Violation("version size", text, committed.time)


def _positions(ranges: Iterable[Range]) -> set[tuple[int, int]]:
    return {(r.epoch, position) for r in ranges for position in range(r.start, r.stop)}


def _doubled(epoch: int, found: Sequence[tuple[Range, float]]) -> Iterator[Violation]:
    reached, when = 0, -math.inf
    for r, time in found:
        twice = min(reached, r.stop) - r.start
        if twice > 0:
            text = f"records {r.start} to {r.start + twice - 1} of epoch {epoch} were trained twice"
            yield Violation("record twice", text, max(time, when), twice)
        if r.stop > reached:
            reached, when = r.stop, time


def _missing(
    epoch: int, found: Sequence[Range], committed: Sequence[Committed], data: Data
) -> Iterator[Violation]:
    reached = 0
    for r in [*found, Range(epoch, data.records, data.records)]:
        if r.start > reached:
            gap = Range(epoch, reached, r.start)
            text = f"records {gap.start} to {gap.stop - 1} of epoch {epoch} are not in the model"
            yield Violation("record missing", text, _last_seen(gap, committed), gap.records)
        reached = max(reached, r.stop)


def _last_seen(gap: Range, committed: Sequence[Committed]) -> float:
    """When one of these records was last in the model."""
    return max(
        (
            each.time
            for each in committed
            for ranges in each.steps.values()
            for r in ranges
            if r.epoch == gap.epoch and r.start < gap.stop and gap.start < r.stop
        ),
        default=math.inf,
    )
