"""A parameter server's start and end: what it continues from, what it keeps, and who has taken its place."""

from __future__ import annotations

import itertools
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from elastic_ps.checkpoint.store import Store
from elastic_ps.contract.env import Resume
from elastic_ps.core.settings import Settings
from elastic_ps.errors import AskedToEnd, InvalidJob, NoCheckpoint, RefusalCode, Refused, StorageUnavailable
from elastic_ps.evaluation import results as evaluations
from elastic_ps.process.retrying import Patience
from elastic_ps.server.limits import ServerLimits
from elastic_ps.server.orders import Advance, Configuration, RemoteShard
from elastic_ps.server.process import ParameterServer, bare_status
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.inproc import connect
from tests.testing import machine
from tests.testing.polling import eventually
from tests.testing.service import Worker, code, environment, serving
from tests.testing.shard import one_bucket, tensor


def test_the_best_checkpoint_is_kept_although_the_evaluations_cannot_be_read_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parameter server that did not wait would not know of it, and delete it as one of the older ones."""
    checkpoint = {"interval": "1h", "everyVersions": 1, "keep": 1}
    best = {"entrypoint": "tests:main", "best": {"metric": "loss", "mode": "min"}}
    given = environment(checkpoints=tmp_path, evaluator=best, parameterServer={"checkpoint": checkpoint})

    def train(worker: Worker, server: ParameterServer, *, version: int) -> None:
        taken = worker.take(records=60)
        worker.push(version, taken.version, finish=worker.finishing(version, taken))
        eventually(lambda: server.status().progress.durable_version == version, "the version is on disk")

    def evaluate(worker: Worker, server: ParameterServer, *, version: int) -> None:
        def done() -> bool:
            worker.ask(pb.EvaluateRequest(job="job", process="one"))
            loss = {"loss": float(version)}
            worker.ask(pb.EvaluateRequest(job="job", process="one", version=version, metrics=loss))
            return version in [each.version for each in server.evaluations()]

        eventually(done, "the version is evaluated")

    with serving(given) as (listener, server):
        worker = Worker(listener)
        worker.start()
        for version in (1, 2):
            train(worker, server, version=version)
            evaluate(worker, server, version=version)
    asked = itertools.count(1)
    away = StorageUnavailable("the volume is away")
    machine.fails(monkeypatch, evaluations, "read", away, lambda: next(asked) == 1)
    with serving(given) as (listener, server):
        assert next(asked) > 2, "it was read again"
        worker = Worker(listener)
        worker.start()
        train(worker, server, version=3)
        assert Store(tmp_path).versions() == [1, 3]


def test_a_job_begins_anew_only_where_no_checkpoint_is(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpoint), serving(environment(checkpoints=tmp_path, resume="require")):
        pass
    with serving(environment(checkpoints=tmp_path, resume="no")) as (listener, server):
        Worker(listener).start(3.0)
        eventually(lambda: server.status().progress.durable_version == 0, "the first values are on disk")
    with (
        pytest.raises(InvalidJob, match=r"up to version 0. Continue from them with --resume"),
        serving(environment(checkpoints=tmp_path, resume="no")),
    ):
        pass
    for resume in ("auto", "require"):
        resumed: Resume = "auto" if resume == "auto" else "require"
        with serving(environment(checkpoints=tmp_path, resume=resumed)) as (listener, _):
            worker = Worker(listener)
            assert not worker.join().initialise
            assert worker.values(0) == [3.0] * 4
            with pytest.raises(Refused, match="is not the one that brings the model") as refused:
                worker.ask(pb.InitDoneRequest(caller=worker.caller()))
            assert code(refused) is RefusalCode.STALE_INCARNATION


def test_a_server_whose_checkpoints_are_away_waits_for_them(tmp_path: Path) -> None:
    """It would begin anew in the empty directory, and later delete what was trained as an older version."""
    place, volume = tmp_path / "checkpoints", tmp_path / "volume"
    given = replace(environment(checkpoints=place), durable=0)
    with serving(replace(given, durable=None)) as (listener, server):
        Worker(listener).start(3.0)
        eventually(lambda: server.status().progress.durable_version == 0, "the first values are on disk")
    place.rename(volume)
    place.mkdir()
    looks: list[str] = []

    def asked_to_end() -> bool:
        looks.append(patience.problem)
        assert list(place.iterdir()) == []
        return True

    patience = Patience(asked_to_end)
    with pytest.raises(AskedToEnd, match="the volume may be unmounted"), serving(given, patience):
        pass
    assert "the checkpoint of version 0 has disappeared" in looks[0]
    place.rmdir()
    volume.rename(place)
    with serving(given, patience) as (listener, server):
        assert not Worker(listener).join().initialise
        assert server.term == 2


def test_a_checkpoint_that_was_copied_is_continued_from_in_a_later_term_than_its_own(tmp_path: Path) -> None:
    """The new place knows nothing of the terms of the old one, in which workers have been told numbers."""
    first, copy = tmp_path / "first", tmp_path / "copy"
    for _ in range(2):
        with serving(environment(checkpoints=first)) as (listener, server):
            worker = Worker(listener)
            worker.start(3.0)
            worker.step(int(worker.term))
            server.close()
    (newest,) = first.glob("version-*2")
    shutil.copytree(newest, copy / newest.name)
    with serving(environment(checkpoints=copy, resume="require")) as (listener, server):
        assert server.term == 3
        assert (server.status().term, server.status().progress.version) == (3, 2)
        assert Worker(listener).join().term == server.term


def test_a_server_that_is_replaced_knows_it_and_commits_nothing(tmp_path: Path) -> None:
    with serving(environment(checkpoints=tmp_path)) as (listener, server):
        worker = Worker(listener)
        worker.start()
        assert not server.fenced
        taken = worker.take()
        Store(tmp_path).next_term()
        worker.push(0, 0, finish=worker.finishing(0, taken))
        eventually(lambda: server.fenced, "it notices")
        assert server.status().progress.version == 0


def test_a_shard_that_is_not_the_first_knows_no_members(tmp_path: Path) -> None:
    given = environment(index=1, parameterServer={"replicas": 2})
    with serving(given) as (listener, server):
        status = server.status()
        assert (status.shard, status.shards, status.ready, status.members) == (1, 2, False, [])
        assert server.loss() == []
        assert not server.fenced
        worker = Worker(listener)
        with pytest.raises(Refused, match="shard 1 has no method Join") as refused:
            worker.join()
        assert code(refused) is RefusalCode.UNKNOWN_METHOD
        with pytest.raises(Refused) as refused:
            worker.pull(0)
        assert code(refused) is RefusalCode.NOT_READY


def test_a_server_that_waits_for_its_disk_says_what_for() -> None:
    given = environment(index=1, parameterServer={"replicas": 2})
    status = bare_status(given, problem="no room")
    assert (status.job, status.shard, status.shards) == ("job", 1, 2)
    assert (status.term, status.ready, status.problem) == (0, False, "no room")


def test_a_checkpoint_that_another_shard_cannot_load_is_asked_for_again(tmp_path: Path) -> None:
    """Shard 0 has verified it, so what is wrong here may pass."""
    given = environment(index=1, parameterServer={"replicas": 2}, checkpoints=tmp_path)
    with serving(given) as (listener, server):
        layout = one_bucket(tensor("w", 4))
        missing = Configuration(layout, "SGD", Settings(({"lr": 1.0},)), 1, 7)
        with pytest.raises(Refused) as refused:
            RemoteShard("job", connect(listener)).configure(missing)
        assert code(refused) is RefusalCode.NOT_READY
        assert not server.status().ready


ANOTHER = environment(index=1, parameterServer={"replicas": 2})
LONG = timedelta(hours=1)
LEAD = Configuration(one_bucket(tensor("w", 4)), "SGD", Settings(({"lr": 1.0},)), 1, None)


def test_another_shard_ends_when_the_first_has_its_part_of_the_last_checkpoint() -> None:
    patient = ServerLimits(quiet=LONG, release=LONG)
    with serving(ANOTHER, limits=patient) as (listener, server), ThreadPoolExecutor(1) as threads:
        zero = RemoteShard("job", connect(listener))
        zero.configure(LEAD)
        closed = threads.submit(server.close)
        with pytest.raises(TimeoutError):
            closed.result(0.5)
        zero.advance(Advance(0, 0, {}, last=True, term=1))
        closed.result(60)


@pytest.mark.parametrize(("keep", "configured"), [(False, True), (True, False)])
def test_another_shard_waits_for_nobody_if_nothing_is_to_be_kept(keep: bool, configured: bool) -> None:
    """Nobody comes for it, nor for a model that it has not got."""
    with serving(ANOTHER, limits=ServerLimits(quiet=LONG, release=LONG)) as (listener, server):
        if configured:
            RemoteShard("job", connect(listener)).configure(LEAD)
        server.close(keep=keep)


def test_another_shard_does_not_wait_for_a_first_one_that_has_ended() -> None:
    soon = ServerLimits(quiet=timedelta(milliseconds=50), release=LONG)
    with serving(ANOTHER, limits=soon) as (listener, server):
        RemoteShard("job", connect(listener)).configure(LEAD)
        server.close()


def test_a_history_tells_what_became_of_each_record(tmp_path: Path) -> None:
    """Whoever looks for records that were lost or trained twice reads it."""
    histories, traces = tmp_path / "histories", tmp_path / "traces"
    for directory in (histories, traces):
        directory.mkdir()
    given = replace(environment(checkpoints=tmp_path / "checkpoints"), history=histories, trace=traces)
    with serving(given) as (listener, server):
        worker = Worker(listener)
        worker.start()
        taken = worker.take()
        worker.push(0, 0, finish=worker.finishing(0, taken))
        more = worker.take()
        worker.take(skipped=more.ranges)
        server.close()
    with serving(replace(given, resume="require")) as (listener, again):
        assert again.term == 2
    (file,) = histories.glob("ps-0-*.jsonl")
    events = [json.loads(line) for line in file.read_text().splitlines()]
    told = [event for event in events if event["event"] not in ("values", "coding")]
    assert [event["event"] for event in told] == ["start", "join", "commit", "skip", "start", "restore"]
    start, join, commit, skip, restart, restore = told
    assert (start["term"], restart["term"]) == (1, 2)
    assert (join["worker"], join["version"], join["term"]) == (0, 0, 1)
    assert (commit["version"], commit["term"]) == (1, 1)
    (step,) = commit["contributions"]
    assert (step["worker"], step["step"], step["samples"]) == (0, 0, 10)
    assert {each["incarnation"] for each in (join, step, skip)} == {worker.incarnation}
    assert step["records"] == [[r.epoch, r.start, r.stop] for r in taken.ranges]
    assert skip["records"] == [[r.epoch, r.start, r.stop] for r in more.ranges]
    assert (restore["version"], restore["term"], restore["round"]["version"]) == (1, 2, 1)
    (trace,) = traces.glob("ps-0-*.jsonl")
    assert '"name": "apply"' in trace.read_text()
