"""The checker finds nothing in histories that are as they should be, and every violation that is planted."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elastic_ps.api.compression import Compression
from elastic_ps.api.consistency import Consistency
from elastic_ps.core.ledger import Ledger, Range
from elastic_ps.drill.history import (
    Acknowledged,
    Coding,
    Committed,
    Data,
    Histories,
    Joined,
    Kind,
    Restored,
    Sent,
    Started,
    StepId,
    Values,
    check,
    consistencies,
    fate,
)
from elastic_ps.drill.recorded import read
from elastic_ps.process.telemetry import History

DATA = Data(records=40, epochs=2)
BUCKETS = 3


@dataclass
class Simulation:
    """A job of two workers that trains on `DATA`, goes back to checkpoints, and records what it does."""

    seed: int
    crashes: int
    histories: Histories = field(default_factory=Histories)
    now: float = 0.0
    term: int = 0
    version: int = 0
    models: dict[int, int] = field(default_factory=lambda: {0: 0})

    def run(self) -> Histories:
        rng = random.Random(self.seed)
        crashes = {rng.randrange(3, 20) for _ in range(self.crashes)}
        ledger = Ledger(DATA.records, DATA.epochs, 8)
        kept = (0, ledger.state())
        rounds, steps = 0, 0
        self.begin(None)
        while not ledger.finished:
            self.now += 1
            rounds += 1
            contributions: dict[StepId, tuple[Range, ...]] = {}
            for worker in range(2):
                incarnation = self.term * 100 + worker
                taken = ledger.take(incarnation, batch=4, workers=2)
                if not taken:
                    continue
                steps += 1
                step = StepId(worker, incarnation, steps)
                attempts = rng.choice([1, 1, 2])
                for attempt in range(attempts):
                    for bucket in range(BUCKETS if attempt == attempts - 1 else 1):
                        sent = Sent(self.now + 0.1 * attempt, step, bucket, self.version, attempt)
                        self.histories.sent.append(sent)
                contributions[step] = tuple(taken)
            if rounds in crashes:
                ledger = self.crash(rng, contributions, kept)
                continue
            self.commit(contributions)
            for step, ranges in contributions.items():
                ledger.apply(step.incarnation, ranges)
            if rng.random() < 0.2:
                kept = (self.version, ledger.state())
        return self.histories

    def begin(self, version: int | None) -> None:
        self.term += 1
        self.now += 1
        self.histories.started.append(Started(self.now, self.term))
        if version is not None:
            self.histories.restored.append(Restored(self.now, self.term, version))
            self.version = version
            self.have_values("ps-0", "ps-1")
        for worker in range(2):
            self.histories.joined.append(Joined(self.now, worker, self.term * 100 + worker))

    def commit(self, contributions: dict[StepId, tuple[Range, ...]], *, recorded: bool = True) -> None:
        self.version += 1
        at = self.now + 0.5
        if recorded:
            made = Committed(at, self.term, self.version, contributions, at - 0.1)
            self.histories.committed.append(made)
        for step, ranges in contributions.items():
            seen = Acknowledged(at, step, self.term, self.version, ranges)
            self.histories.acknowledged.append(seen)
        self.models[self.version] = hash((self.models[self.version - 1], *contributions.items()))
        self.have_values("ps-0", "ps-1", "worker-0", "worker-1")

    def have_values(self, *processes: str) -> None:
        """The shards of the present version, each with its buckets, and workers with all."""
        model = self.models[self.version]
        for process in processes:
            for bucket in range(BUCKETS):
                if process != f"ps-{1 - bucket % 2}":
                    found = Values(self.now, process, self.term, self.version, bucket, hash((model, bucket)))
                    self.histories.values.append(found)

    def crash(
        self,
        rng: random.Random,
        contributions: dict[StepId, tuple[Range, ...]],
        kept: tuple[int, dict[str, object]],
    ) -> Ledger:
        """Before, or after the round was applied but before that was recorded."""
        if rng.random() < 0.5:
            self.commit(contributions, recorded=False)
        version, state = kept
        self.begin(version)
        return Ledger.from_state(state, shard_records=8)


def kinds(histories: Histories, data: Data | None = DATA) -> set[Kind]:
    return {violation.kind for violation in check(histories, data)}


@given(seed=st.integers(0, 2**32), crashes=st.integers(0, 4))
def test_nothing_is_found_in_a_run_that_lost_nothing(seed: int, crashes: int) -> None:
    assert check(Simulation(seed, crashes).run(), DATA) == []


Plant = Callable[[Histories, random.Random], None]


def of_model(histories: Histories, rng: random.Random) -> int:
    """The place of a commit that is in the model."""
    return histories.committed.index(rng.choice(fate(histories).surviving))


def lose_a_record(histories: Histories, rng: random.Random) -> None:
    at = of_model(histories, rng)
    commit = histories.committed[at]
    step, ranges = next(iter(commit.steps.items()))
    less = (ranges[0]._replace(stop=ranges[0].stop - 1), *ranges[1:])
    histories.committed[at] = replace(commit, steps={**commit.steps, step: less})


def double_a_record(histories: Histories, rng: random.Random) -> None:
    at = of_model(histories, rng)
    commit = histories.committed[at]
    step, ranges = next(iter(commit.steps.items()))
    first = ranges[0]
    more = Range(first.epoch, max(0, first.start - 1), first.stop + (first.start == 0))
    histories.committed[at] = replace(commit, steps={**commit.steps, step: (more, *ranges[1:])})


def double_a_step(histories: Histories, rng: random.Random) -> None:
    last = histories.committed[-1]
    at = rng.choice(histories.committed)
    again = replace(last, steps=at.steps, version=last.version + 1, time=last.time + 1)
    histories.committed.append(again)


def invent_a_step(histories: Histories, rng: random.Random) -> None:
    at = of_model(histories, rng)
    steps = set(histories.committed[at].steps)
    histories.sent = [sent for sent in histories.sent if sent.step not in steps]


def apply_to_another_version(histories: Histories, rng: random.Random) -> None:
    steps = set(histories.committed[of_model(histories, rng)].steps)
    histories.sent = [replace(s, version=s.version + 1) if s.step in steps else s for s in histories.sent]


def send_in_part(histories: Histories, rng: random.Random) -> None:
    step = rng.choice(list(histories.committed[of_model(histories, rng)].steps))
    histories.sent = [s for s in histories.sent if not (s.step == step and s.bucket == BUCKETS - 1)]


def compute_on_an_older_version(histories: Histories, rng: random.Random) -> None:
    step = rng.choice(list(histories.committed[of_model(histories, rng)].steps))
    histories.sent = [replace(s, stale=1) if s.step == step else s for s in histories.sent]


def commit_when_frozen_before(histories: Histories, rng: random.Random) -> None:
    at = of_model(histories, rng)
    commit = histories.committed[at]
    histories.started.append(Started(commit.decided - 0.01, commit.term + 1))


def send_when_replaced(histories: Histories, rng: random.Random) -> None:
    step = rng.choice(list(histories.committed[of_model(histories, rng)].steps))
    earliest = min(sent.time for sent in histories.sent if sent.step == step)
    histories.joined.append(Joined(earliest - 0.01, step.worker, step.incarnation + 10))


def forget_a_commit(histories: Histories, rng: random.Random) -> None:
    surviving = fate(histories).surviving
    followed = [a for a, b in pairwise(surviving) if a.term == b.term]
    assume(followed)
    histories.committed.remove(rng.choice(followed))


def acknowledge_what_was_not_taken(histories: Histories, rng: random.Random) -> None:
    seen = histories.acknowledged[-1]
    histories.acknowledged.append(replace(seen, step=seen.step._replace(step=10_000)))


def come_from_nowhere(histories: Histories, rng: random.Random) -> None:
    last = histories.committed[-1]
    histories.restored.append(Restored(last.time + 1, last.term + 1, last.version + 5))


def change(histories: Histories, which: Callable[[Values], bool]) -> None:
    histories.values = [replace(v, checksum=v.checksum + 1) if which(v) else v for v in histories.values]


def pull_a_torn_model(histories: Histories, rng: random.Random) -> None:
    version = rng.choice([v.version for v in histories.values if v.process == "worker-1"])
    change(histories, lambda v: (v.process, v.version, v.bucket) == ("worker-1", version, 1))


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (lose_a_record, "record missing"),
        (double_a_record, "record twice"),
        (double_a_step, "step twice"),
        (invent_a_step, "step not sent"),
        (apply_to_another_version, "step not sent"),
        (send_in_part, "step in part"),
        (compute_on_an_older_version, "step too stale"),
        (commit_when_frozen_before, "stale term"),
        (send_when_replaced, "stale incarnation"),
        (forget_a_commit, "version gap"),
        (forget_a_commit, "acknowledged step lost"),
        (forget_a_commit, "record missing"),
        (acknowledge_what_was_not_taken, "acknowledged step lost"),
        (come_from_nowhere, "version from nowhere"),
        (pull_a_torn_model, "values differ"),
    ],
)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), crashes=st.integers(0, 3))
def test_what_is_planted_is_found(plant: Plant, kind: Kind, seed: int, crashes: int) -> None:
    histories = Simulation(seed, crashes).run()
    plant(histories, random.Random(seed))
    assert kind in kinds(histories)


def test_a_checkpoint_that_is_in_part_of_another_version_is_found() -> None:
    """A shard that was ahead of the others, or behind, was asked for a version, and all go on from that."""
    found = 0
    for seed in range(20):
        histories = Simulation(seed, 3).run()
        known = {(v.term, v.version) for v in histories.values if v.process == "worker-0"}
        for went_back in histories.restored:
            if (went_back.term - 1, went_back.version) in known:
                torn, place = copy.deepcopy(histories), (went_back.term, went_back.version, 1)
                change(torn, lambda v, place=place: (v.term, v.version, v.bucket) == place)  # type: ignore[misc]
                assert kinds(torn) == {"values differ"}
                found += 1
    assert found > 5


def test_a_step_may_be_as_stale_as_the_job_allows() -> None:
    histories = Simulation(1, 0).run()
    histories.sent = [replace(sent, stale=sent.step.step % 3) for sent in histories.sent]
    assert check(histories, DATA, max_staleness=2) == []
    violations = check(histories, DATA, max_staleness=1)
    assert {violation.kind for violation in violations} == {"step too stale"}


def test_a_term_that_begins_anew_makes_versions_as_the_one_before() -> None:
    """It goes back to no checkpoint, so that nothing is recorded of it."""
    said = Consistency(mode="bounded", max_staleness=3)
    histories = Histories()
    histories.started.append(Started(0.0, 1, said))
    histories.committed += [Committed(float(term), term, 1, {}, 0.0) for term in (2, 3)]
    assert consistencies(histories) == {1: said, 2: said, 3: said}


def test_versions_have_as_many_records_as_the_job_says() -> None:
    """The positions 11 to 13 were skipped, so version 2 has three records less."""
    made = [Range(0, 0, 8), Range(0, 8, 11), Range(0, 14, 16), Range(0, 16, 20), Range(1, 0, 8)]
    contents = [(made[0],), made[1:3], (made[3],), (made[4],), (Range(1, 8, 16),), (Range(1, 16, 20),)]
    histories = Histories(skipped=[Range(0, 11, 14)])
    for version, ranges in enumerate(contents, start=1):
        step = StepId(0, 1, version)
        histories.committed.append(Committed(version, 1, version, {step: tuple(ranges)}, version))
        histories.sent.append(Sent(version, step, 0, version - 1))
    data = Data(records=20, epochs=2)
    assert check(histories, data, batch=8) == []
    assert {violation.kind for violation in check(histories, data, batch=10)} == {"version size"}
    assert check(histories, None, batch=10) == [], "it has not ended"


def test_a_job_that_has_not_ended_may_lack_records() -> None:
    histories = Simulation(1, 0).run()
    del histories.committed[-3:]
    last = histories.committed[-1].version
    histories.acknowledged = [seen for seen in histories.acknowledged if seen.version <= last]
    assert check(histories, None) == []
    assert kinds(histories) == {"record missing"}


def test_a_restore_undoes_what_was_committed_above_it() -> None:
    histories = Simulation(4, 3).run()
    assert histories.restored
    fates = fate(histories)
    assert sum(len(each) for each in fates.undone.values()) == len(histories.committed) - len(fates.surviving)
    assert [c.version for c in fates.surviving] == list(range(1, len(fates.surviving) + 1))
    without = copy.deepcopy(histories)
    without.restored = [replace(r, version=r.version + 1) for r in without.restored]
    assert kinds(without), "another version than the one restored does not fit"


def test_a_term_that_has_done_nothing_before_it_was_replaced_undoes_nothing() -> None:
    """Its successor could ask the standby, which has the rounds of the term before."""
    histories = Simulation(4, 0).run()
    last = histories.committed[-1]
    histories.restored.append(Restored(last.time + 1, last.term + 1, last.version - 3))
    assert "record missing" in kinds(histories)
    histories.restored.append(Restored(last.time + 2, last.term + 2, last.version))
    assert kinds(histories) == set()
    histories.committed.append(replace(last, term=last.term + 1, version=last.version - 2))
    assert "version from nowhere" in kinds(histories), "the term has done something"


def test_files_are_read_even_if_their_last_line_is_cut_off(tmp_path: Path) -> None:
    contribution = {"worker": 0, "incarnation": 7, "step": 1, "records": [[0, 0, 4]]}
    server = [
        {"event": "start", "time": 1.0, "term": 1},
        {"event": "join", "time": 1.5, "worker": 0, "incarnation": 7, "version": 0, "term": 1},
        {"event": "commit", "time": 3.0, "decided": 2.9, "term": 1, "version": 1}
        | {"contributions": [contribution]},
    ]
    push = {"event": "push", "time": 2.0, "worker": 0, "incarnation": 7, "step": 1, "bucket": 0}
    worker = [
        push | {"version": 0, "base": 0, "attempt": 0},
        {"event": "applied", "time": 3.1, "term": 1, "version": 1, "samples": 4} | contribution,
    ]
    for name, events in (("ps-0-11", server), ("worker-0-12", worker)):
        text = "".join(json.dumps(event) + "\n" for event in events) + '{"event": "comm'
        (tmp_path / f"{name}.jsonl").write_text(text)
    histories = read(tmp_path)
    assert check(histories, Data(records=4, epochs=1)) == []
    assert (len(histories.committed), len(histories.sent), len(histories.acknowledged)) == (1, 1, 1)
    assert "records 4 to 4" in str(check(histories, Data(records=5, epochs=1))[0])


def test_a_process_goes_on_in_the_file_of_one_that_was_killed(tmp_path: Path) -> None:
    """In containers all have the same id; a line that was cut off does not swallow the next one."""
    for number in range(2):
        history = History(tmp_path, "ps-0")
        history.record("start", term=number + 1)
        history.close()
        (file,) = tmp_path.iterdir()
        with file.open("a") as cut:
            cut.write('{"event": "commi')
    assert [started.term for started in read(tmp_path).started] == [1, 2]


def test_each_term_has_the_bound_of_its_own_consistency() -> None:
    """A stale step of the bounded term is no violation; one of the synchronous term after it is."""
    bounded = Consistency(mode="bounded", max_staleness=2)
    steps = [StepId(0, 1, 0), StepId(0, 2, 0)]
    histories = Histories(
        started=[Started(0.0, 1, bounded)],
        restored=[Restored(5.0, 2, 1, Consistency())],
        sent=[Sent(1.0, steps[0], 0, 0, 0, 0), Sent(6.0, steps[1], 0, 1, 0, 1)],
        committed=[
            Committed(2.0, 1, 1, {steps[0]: (Range(0, 0, 2),)}, 1.5),
            Committed(7.0, 2, 2, {steps[1]: (Range(0, 2, 4),)}, 6.5),
        ],
    )
    assert [v.kind for v in check(histories, None)] == ["step too stale"]
    allowed = replace(histories, restored=[Restored(5.0, 2, 1, bounded)])
    assert check(allowed, None) == []


INT8, ROUNDED = Compression(codec="int8"), Compression(codec="int8", values="bf16")


def test_processes_that_encode_in_different_ways_in_one_term_are_found() -> None:
    def codings(*compressions: Compression) -> list[Coding]:
        return [Coding(0.1 * i, f"process-{i}", 1 + i // 2, each) for i, each in enumerate(compressions)]

    histories = Simulation(1, 0).run()
    histories.codings = codings(INT8, INT8, ROUNDED, ROUNDED)
    assert check(histories, DATA) == []
    histories.codings = codings(INT8, INT8, ROUNDED, INT8)
    (violation,) = check(histories, DATA)
    assert violation.kind == "mixed compression"
    assert "in term 2 process-2 has" in str(violation)
    assert "and process-3 has ({'codec': 'int8'})" in str(violation)


def test_a_term_that_sends_values_in_another_way_has_other_ones() -> None:
    """Rounded ones in the place of exact ones. In any other term they are those that it continues from."""

    def histories(*compressions: Compression) -> Histories:
        return Histories(
            restored=[Restored(5.0, 2, 1)],
            committed=[
                Committed(2.0, 1, 1, {StepId(0, 1, 0): (Range(0, 0, 2),)}, 1.5),
                Committed(7.0, 2, 2, {StepId(0, 2, 1): (Range(0, 2, 4),)}, 6.5),
            ],
            sent=[Sent(1.0, StepId(0, 1, 0), 0, 0), Sent(6.0, StepId(0, 2, 1), 0, 1)],
            values=[Values(2.0, "ps-0", 1, 1, 0, 111), Values(5.0, "ps-0", 2, 1, 0, 222)],
            codings=[Coding(0.0, "ps-0", term, each) for term, each in enumerate(compressions, 1)],
        )

    assert check(histories(INT8, ROUNDED), None) == []
    for same in ((), (INT8, INT8), (INT8, Compression())):
        assert [v.kind for v in check(histories(*same), None)] == ["values differ"]
