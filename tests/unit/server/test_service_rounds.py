"""A parameter server as several workers meet it: who waits for whom, and what they are told then."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from elastic_ps.core.overlap import Overlap
from elastic_ps.core.stages import CourseEvent
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.server.shards.shard import Shard
from elastic_ps.transport import messages_pb2 as pb
from tests.testing.coordinator import SOON
from tests.testing.polling import eventually
from tests.testing.service import Worker, environment, serving


def test_with_backup_workers_a_step_that_begins_too_late_is_refused() -> None:
    given = environment(consistency={"backupWorkers": 1}, worker={"replicas": 2})
    with serving(given) as (listener, server):
        workers = [Worker(listener, index) for index in range(2)]
        for worker in workers:
            worker.start()
        taken = [worker.take() for worker in workers]
        first, late = workers

        def begin(worker: Worker) -> pb.BeginReply:
            request = pb.BeginRequest(caller=worker.caller(), version=0, step=0)
            return worker.answer(pb.BeginReply, request)

        begun = begin(first)
        assert (begun.version, begun.attempt, begun.pending) == (0, 0, False)
        assert begin(first) == begun
        with pytest.raises(Refused, match="wants to push a step on version 0, but the round on version 0"):
            begin(late)
        first.push(0, 0, finish=first.finishing(0, taken[0]))
        assert first.values(1) == [-1.0] * 4
        members = {member.worker: member for member in server.status().members}
        assert (members[0].late, members[1].late) == (0, 1)
        assert server.status().progress.records_applied == 10


def test_who_was_declared_gone_while_it_waited_is_not_told_that_its_step_was_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would go on, and count a step whose records have gone to others."""
    original, waits = Shard.pull, threading.Event()

    def pull(shard: Shard, *arguments: Any, **named: Any) -> Any:
        waits.set()
        return original(shard, *arguments, **named)

    # The call has to be in the shard, which answers nothing before it is over.
    monkeypatch.setattr(Shard, "pull", pull)
    given = environment(consistency={"mode": "bounded", "maxStaleness": 2}, worker={"replicas": 2})
    with serving(given) as (listener, server), ThreadPoolExecutor(1) as threads:
        lost, other = workers = [Worker(listener, index) for index in range(2)]
        for worker in workers:
            worker.start()
        taken = [worker.take() for worker in workers]
        for worker in workers:
            worker.answer(pb.BeginReply, pb.BeginRequest(caller=worker.caller(), version=0, step=0))
        lost.push(0, 0, finish=lost.finishing(0, taken[0]))
        pulled = threads.submit(lost.pull, 1, contributor=True)
        assert waits.wait(60)
        lost.ask(pb.GoneRequest(job="job", worker=0, instance=lost.instance))
        assert not server.status().members[0].present
        attempt = server.shard_zero.job.state.rounds.attempt if server.shard_zero is not None else 0
        other.push(0, 0, attempt=attempt, finish=other.finishing(0, taken[1], attempt=attempt))
        with pytest.raises(Refused) as refused:
            pulled.result(60)
        assert refused.value.code is RefusalCode.STALE_INCARNATION


def test_who_has_pulled_a_newer_version_holds_nobody_up() -> None:
    given = environment(consistency={"mode": "bounded", "maxStaleness": 1}, worker={"replicas": 2})
    with serving(given) as (listener, server):
        first, second = Worker(listener, 0), Worker(listener, 1)
        for worker in (first, second):
            worker.start()
        second.take(records=1000)
        for version in (0, 1):
            taken = first.take(records=1000)
            request = pb.BeginRequest(caller=first.caller(), version=version, step=version)
            assert not first.answer(pb.BeginReply, request).pending
            first.push(version, version, finish=first.finishing(version, taken))
        assert server.status().progress.version == 1, "the second's step would be too stale"
        second.ask(pb.HeartbeatRequest(caller=second.caller()))
        assert server.status().progress.version == 1
        second.ask(pb.HeartbeatRequest(caller=second.caller(), version=1))
        assert server.status().progress.version == 2


def test_calls_that_wait_in_vain_are_answered_before_long() -> None:
    bounded = environment(consistency={"mode": "bounded", "maxStaleness": 2}, worker={"replicas": 3})
    with serving(bounded, limits=SOON) as (listener, _):
        workers = [Worker(listener, index) for index in range(3)]
        for worker in workers:
            worker.start()
        taken = [worker.take(records=1000) for worker in workers]

        def begin(worker: Worker) -> bool:
            request = pb.BeginRequest(caller=worker.caller(), version=0, step=0)
            return worker.answer(pb.BeginReply, request).pending

        assert [begin(workers[0]), begin(workers[1])] == [False, False]
        workers[0].push(0, 0, finish=workers[0].finishing(0, taken[0]))
        assert begin(workers[2]), "the round waits for worker 1 only"
        workers[1].push(0, 0, finish=workers[1].finishing(0, taken[1]))
        assert not begin(workers[2])
    with serving(environment(), limits=SOON) as (listener, _):
        one, other = Worker(listener, 0), Worker(listener, 1)
        for worker in (one, other):
            worker.start()

        def assign(worker: Worker) -> bool:
            request = pb.AssignRequest(caller=worker.caller(), version=0)
            return worker.answer(pb.AssignReply, request).pending

        assert [assign(one), assign(other)] == [False, True]


def test_a_pull_is_told_when_the_round_has_started_again() -> None:
    with serving(environment()) as (listener, server), ThreadPoolExecutor(1) as threads:
        worker, other = Worker(listener, 0), Worker(listener, 1)
        worker.start()
        other.start()
        taken = worker.take(records=40)
        assert worker.take(records=40, wait=False).ranges, "for the step after it"
        coming = threads.submit(other.take, records=40)
        eventually(lambda: server.status().members[1].state == "training", "the other waits for a round")
        worker.push(0, 0, finish=worker.finishing(0, taken))
        assert coming.result(10).version == 1
        worker.push(1, 1)
        other.push(0, 1)
        other.ask(pb.GoneRequest(job="job", worker=1, instance=other.instance))
        assert worker.pull(2, contributor=True, attempt=0)[-1][0].attempt == 1


def test_what_a_worker_has_sent_is_told_with_its_steps() -> None:
    """What is no number is left out."""
    with serving(environment()) as (listener, server):
        worker = Worker(listener)
        worker.start()
        counts = pb.Traffic(pushed_bytes=16, pushed_plain_bytes=64, encode_seconds=math.nan, codec="int8")
        counts.overlap = "USED"
        worker.push(0, 0, finish=worker.finishing(0, worker.take(), traffic=counts))
        status = server.status()
        assert [member.traffic.pushed_bytes for member in status.members] == [16]
        assert (status.traffic.pushed_plain_bytes, status.traffic.encode_seconds) == (64, 0.0)
        assert status.traffic.codec == "int8"
        assert status.traffic.overlap == str(Overlap.USED)
        counts.overlap = "anything"
        worker.push(1, 1, finish=worker.finishing(1, worker.take(), traffic=counts))
        assert server.status().traffic.overlap == str(Overlap.USED), "a name that means nothing is ignored"


def test_traffic_never_falls_though_workers_end_and_the_job_goes_back() -> None:
    """Prometheus would take a lower count for a restart, and add all of it once more."""
    with serving(environment(worker={"replicas": 2})) as (listener, server):

        def sent(worker: Worker, version: int, attempt: int) -> int:
            """The bytes that all have sent after a step of this worker, which has sent 16."""
            worker.start()
            ending = worker.finishing(0, worker.take(), attempt=attempt, traffic=pb.Traffic(pushed_bytes=16))
            worker.push(0, version, attempt=attempt, finish=ending)
            return server.status().traffic.pushed_bytes

        worker, other = Worker(listener), Worker(listener, 1)
        assert sent(worker, 0, 0) == 16
        worker.ask(pb.GoneRequest(job="job", worker=0, instance=worker.instance))
        assert sent(other, 1, 1) == 32
        assert server.shard_zero is not None
        job = server.shard_zero.job
        with job.lock:
            job.note_course(CourseEvent.ROLL_BACK)
        eventually(lambda: server.status().term > 1, "there is no checkpoint, so the job begins anew")
        assert server.status().traffic.pushed_bytes == 32
        assert sent(Worker(listener), 0, 0) == 48
