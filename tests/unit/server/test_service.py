"""A parameter server as workers meet it: each call, what it answers, and what it refuses.

The worker here is played by hand, message by message, over the transport within one process.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ps.core.partition import Rule, TensorSpec
from elastic_ps.errors import Malformed, RefusalCode, Refused
from elastic_ps.server.limits import ServerLimits
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Frame
from elastic_ps.transport.calls import CALLS, At, Sender
from elastic_ps.transport.inproc import InprocServer
from tests.testing.service import GROUPS, Worker, code, environment, serving

soon = pytest.mark.parametrize(
    "limits",
    [ServerLimits(answer=timedelta(milliseconds=50), shard_answer=timedelta(milliseconds=50))],
    ids=["soon"],
)


@pytest.fixture
def listener(limits: ServerLimits) -> Iterator[InprocServer]:
    with serving(environment(), limits=limits) as (listener, _):
        yield listener


@pytest.fixture
def worker(listener: InprocServer) -> Worker:
    """One that is a member, of a job whose values are all 0."""
    worker = Worker(listener)
    worker.start()
    return worker


def test_a_whole_training_by_hand(listener: InprocServer, worker: Worker) -> None:
    assert worker.values(0) == [0.0] * 4
    for step, version in ((0, 0), (1, 1)):
        assert worker.step(step, loss=0.5 - step / 4, accuracy=0.25).version == version
        ((reply, values),) = worker.pull(version + 1)
        assert (reply.bucket, reply.version, list(values)) == (0, version + 1, [-float(version + 1)] * 4)
        assert (reply.last, reply.stopped) == (True, "")
        assert json.loads(reply.settings)["groups"] == [{"lr": 1.0}]
    end = worker.take()
    assert (end.finished, end.chief, end.version) == (True, True, 2)
    assert worker.answer(pb.Done, pb.LeaveRequest(caller=worker.caller(call=worker.calls + 1)))
    with pytest.raises(Refused) as refused:
        worker.ask(pb.HeartbeatRequest(caller=worker.caller()))
    assert code(refused) is RefusalCode.STALE_INCARNATION


def test_what_the_status_says_of_a_training(tmp_path: Path) -> None:
    with serving(environment(checkpoints=tmp_path)) as (listener, server):
        worker = Worker(listener)
        assert not server.status().ready
        worker.start()
        assert server.status().ready
        (member,) = server.status().members
        assert (member.state, member.pid, member.host) == ("idle", 100, "here")
        worker.step(0, loss=0.5, accuracy=0.25)
        worker.ask(pb.ReportRequest(caller=worker.caller(), metrics={"test": 2.0}))
        status = server.status()
        progress = status.progress
        assert (progress.version, progress.loss, progress.percent) == (1, 0.5, 50)
        assert (progress.records_applied, progress.records_expected, progress.epochs) == (10, 20, 1)
        assert progress.metrics == {"accuracy": 0.25, "test": 2.0}
        assert (progress.durable_version, status.problem, status.term) == (0, "", 1)
        assert status.durable_age_seconds is not None
        assert 0.0 <= status.durable_age_seconds < 60.0
        assert server.loss() == [(1, 0.5)]
        (member,) = status.members
        assert (member.steps, member.records, member.late, member.state) == (1, 10, 0, "training")
        server.close()
        with serving(environment(checkpoints=tmp_path)) as (_, again):
            status = again.status()
            assert (status.term, status.progress.version) == (2, 1), "the last version was kept"
            assert status.ready
            assert again.loss() == [(1, 0.5)]
            (member,) = status.members
            assert (member.state, member.steps, member.gone_seconds) == ("lost", 1, None)
            assert member.joins_again


@pytest.mark.parametrize(
    "method",
    ["Report", *(name for name, call in CALLS.items() if call.sender is Sender.MEMBER)],
)
def test_who_speaks_of_another_job_or_term_is_refused(worker: Worker, method: str) -> None:
    request = getattr(pb, f"{method}Request")
    with pytest.raises(Refused, match=r"of another job than 'other'") as refused:
        worker.ask(request(caller=worker.caller(job="other")))
    assert code(refused) is RefusalCode.WRONG_JOB
    assert "'job'" not in str(refused.value), "a stranger is not told what to say"
    with pytest.raises(Refused, match="term 7 of the parameter server; this is term 1") as refused:
        worker.ask(request(caller=worker.caller(term=7)))
    assert code(refused) is RefusalCode.STALE_TERM


def orders(job: str) -> list[Message]:
    """What shard 0 tells other shards, and then what it tells standbys. Attempts are as bad as can be."""
    last = (1 << 31) - 1
    return [
        pb.ConfigureRequest(job=job, term=1),
        pb.AdvanceRequest(job=job, term=1, attempt=last),
        pb.StateRequest(job=job, term=1),
        pb.SumRequest(job=job, term=1, attempt=last),
        pb.HeldRequest(job=job, term=last),
    ]


def test_shard_0_takes_no_orders(worker: Worker) -> None:
    """One `Configure` of a stranger ended a job, and two `Advance` with a huge attempt locked it up."""
    for request in orders("job"):
        with pytest.raises(Refused) as refused:
            worker.ask(request)
        assert code(refused) is RefusalCode.UNKNOWN_METHOD
    worker.step(0)
    assert worker.values(1) == [-1.0] * 4


def test_other_shards_take_orders_but_hold_nothing_for_anybody() -> None:
    given = environment(index=1, parameterServer={"replicas": 2})
    with serving(given) as (listener, _):
        for request in orders("job")[2:]:
            with pytest.raises(Refused) as refused:
                Worker(listener).ask(request)
            assert code(refused) is RefusalCode.UNKNOWN_METHOD


@pytest.mark.parametrize("method", ["Init", "Push", "Pull", "OptimizerState", "Join"])
def test_a_standby_answers_no_worker(method: str) -> None:
    with serving(replace(environment(), role="standby")) as (listener, _):
        with pytest.raises(Refused, match=f"shard 0 has no method {method}") as refused:
            Worker(listener).ask(getattr(pb, f"{method}Request")())
        assert code(refused) is RefusalCode.UNKNOWN_METHOD


def test_what_is_no_message_or_no_method_is_refused(worker: Worker) -> None:
    frame = Frame(b"\xff\xff\xff")
    with pytest.raises((Malformed, Refused), match="HeartbeatRequest"):
        list(worker.connections[0].call("Heartbeat", frame, timeout=timedelta(seconds=5)))
    with pytest.raises(Refused, match="shard 0 has no method Dance") as refused:
        list(worker.connections[0].call("Dance", Frame(b""), timeout=timedelta(seconds=5)))
    assert code(refused) is RefusalCode.UNKNOWN_METHOD


def test_a_header_that_no_model_needs_is_not_parsed(worker: Worker) -> None:
    """Parsed, 16 MiB of tensors without a name took 700 MiB."""
    take = pb.TakeRequest(skipped=[pb.Range(start=1 << 40, stop=1 << 41)]).SerializeToString()
    join = pb.JoinRequest(tensors=[pb.Tensor()]).SerializeToString()
    for method, header in (("Take", take * 300_000), ("Join", join * 2_000_000)):
        with pytest.raises(Malformed, match=rf"{method}: a header of \d+ bytes; the limit is 2097152"):
            list(worker.connections[0].call(method, Frame(header), timeout=timedelta(seconds=30)))
    worker.step(0)
    assert worker.values(1) == [-1.0] * 4


def test_the_first_worker_may_bring_a_model_with_a_long_description() -> None:
    tensors = tuple(TensorSpec("w" * 1000 + str(n), (1,), "float32", Rule.GRADIENT, 0) for n in range(2200))
    with serving(environment()) as (listener, _):
        first = Worker(listener)
        assert first.join(tensors=tensors).initialise
        assert first.join(tensors=tensors).initialise, "asked again, it is not too long now either"


def nonsense(kind: type[Message], data: st.DataObject) -> Message:
    """A message with some of its fields, of any values. Its `caller`, if it has one, is absent."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if field.name == "caller" or not data.draw(st.booleans()):
            continue
        now, made, inner = getattr(message, field.name), None, cast(Any, field.message_type)
        if inner is not None and not inner.GetOptions().map_entry:
            made = nonsense(GetMessageClass(inner), data)
        elif inner is None:
            kinds: dict[int, st.SearchStrategy[Any]] = {
                field.CPPTYPE_STRING: st.sampled_from(["", "x", "[1]", "{}", GROUPS, "none", "SGD", "job"]),
                field.CPPTYPE_BOOL: st.booleans(),
                field.CPPTYPE_DOUBLE: st.floats(),
            }
            made = data.draw(kinds.get(field.cpp_type, st.sampled_from([0, 1, 2, 7, (1 << 31) - 1])))
        if made is None:
            continue
        if hasattr(now, "extend"):
            now.extend([made] * data.draw(st.integers(1, 3)))
        elif isinstance(made, Message):
            now.CopyFrom(made)
        else:
            setattr(message, field.name, made)
    return message


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.at & At.SHARD_ZERO])
def test_whatever_a_call_says_is_answered_or_refused(name: str) -> None:
    """Anything else would be a `TransportError`, which names what the handler has raised."""
    limits = ServerLimits(answer=timedelta(milliseconds=5), shard_answer=timedelta(milliseconds=5))
    with serving(environment(), limits=limits) as (listener, _):
        worker = Worker(listener)
        worker.start()

        @settings(max_examples=20, deadline=None)
        @given(st.data())
        def say(data: st.DataObject) -> None:
            request: Any = nonsense(CALLS[name].request, data)
            if CALLS[name].sender is Sender.JOB:
                request.job = "job"
            else:
                request.caller.CopyFrom(worker.caller(call=data.draw(st.integers(0, 3))))
            with contextlib.suppress(Refused, Malformed):
                worker.ask(request, torch.ones(data.draw(st.sampled_from([0, 4]))))

        say()


@pytest.mark.parametrize("missing", ["records", "epochs", "batch"])
def test_a_take_of_nothing_is_refused(worker: Worker, missing: str) -> None:
    fields: dict[str, Any] = {missing: 0}
    with pytest.raises(Refused, match="must be at least 1") as refused:
        worker.take(**fields)
    assert code(refused) is RefusalCode.MALFORMED


def test_a_push_in_another_codec_or_of_settings_that_are_none_is_refused(worker: Worker) -> None:
    taken = worker.take()
    with pytest.raises(Refused, match="codec 'zip'") as refused:
        worker.push(0, 0, codec="zip")
    assert code(refused) is RefusalCode.MALFORMED
    heeds = '{"groups": [], "schedulers": [{"heeds": "2"}], "first": [], "made": [0, 0], "position": [0]}'
    for text in ("[1", heeds, heeds.replace("heeds", "steps")):
        with pytest.raises((Refused, Malformed), match="not the settings of an optimizer"):
            worker.push(0, 0, finish=worker.finishing(0, taken, settings=text))
    assert worker.push(0, 0, finish=worker.finishing(0, taken)).duplicate is False
    assert worker.values(1) == [-1.0] * 4


def test_settings_that_are_nested_too_deeply_are_malformed(worker: Worker) -> None:
    worker.start()
    taken = worker.take()
    deep = worker.finishing(0, taken, settings="[" * 50_000 + "]" * 50_000)
    with pytest.raises(Malformed, match="not the settings of an optimizer"):
        worker.push(0, 0, finish=deep)


def test_a_push_that_ends_a_step_is_applied_once_however_often_it_comes(worker: Worker) -> None:
    taken = worker.take()
    assert worker.push(0, 0).duplicate is False
    assert worker.push(0, 0).duplicate is True
    finish = worker.finishing(0, taken)
    assert worker.push(0, 0, finish=finish).duplicate is False, "the step is finished by it"
    assert worker.push(0, 0, finish=finish).duplicate is True, "its answer was lost"
    assert worker.answer(pb.Done, finish).duplicate is True
    assert worker.values(1) == [-1.0] * 4
    with pytest.raises(Refused) as refused:
        worker.push(5, 0, finish=worker.finishing(5, taken))
    assert code(refused) in (RefusalCode.STALE_ATTEMPT, RefusalCode.WRONG_VERSION)


def test_records_that_a_worker_does_not_hold_are_neither_trained_nor_skipped_by_it(
    listener: InprocServer, worker: Worker
) -> None:
    taken = worker.take()
    others = pb.Range(epoch=0, start=10, stop=20)
    worker.push(0, 0)
    with pytest.raises(Refused) as refused:
        worker.answer(pb.Done, worker.finishing(0, taken, ranges=[others]))
    assert code(refused) is RefusalCode.INVALID
    with pytest.raises(Refused) as refused:
        worker.answer(pb.Done, worker.finishing(0, taken, skipped=[others]))
    assert code(refused) is RefusalCode.INVALID
    with pytest.raises(Refused) as refused:
        worker.take(skipped=[others])
    assert code(refused) is RefusalCode.INVALID
    assert worker.values(0) == [0.0] * 4


def test_a_step_counts_as_no_more_than_its_records(worker: Worker) -> None:
    worker.start()
    taken = worker.take()
    with pytest.raises(Refused, match="counts as 5000 samples, but it has 10 records") as refused:
        worker.push(0, 0, weight=5000, finish=worker.finishing(0, taken, samples=5000))
    assert code(refused) is RefusalCode.INVALID


@pytest.mark.parametrize("weight", [-1.0, 2.0**65, math.nan, math.inf])
def test_a_weight_that_would_spoil_the_mean_is_refused(worker: Worker, weight: float) -> None:
    worker.start()
    taken = worker.take()
    with pytest.raises(Refused, match="weight") as refused:
        worker.push(0, 0, weight=weight)
    assert code(refused) is RefusalCode.MALFORMED
    with pytest.raises(Refused, match="has the weight") as refused:
        worker.push(0, 0, finish=worker.finishing(0, taken, weight=weight))
    assert code(refused) is RefusalCode.INVALID


def test_gradients_that_weigh_more_than_their_step_are_in_no_version(worker: Worker) -> None:
    """Only shard 0 knows of records: the others have to be told what the steps weigh."""
    worker.start()
    taken = worker.take()
    worker.push(0, 0, weight=5000, finish=worker.finishing(0, taken))
    (answer, _), *_ = worker.pull(1, contributor=True)
    assert answer.attempt == 1, "the round has started again"
    worker.push(0, 0, attempt=1, finish=worker.finishing(0, taken, attempt=1))
    assert worker.values(1) == [-1.0] * 4


def test_records_that_are_skipped_are_counted_and_end_the_training(tmp_path: Path) -> None:
    with serving(environment()) as (listener, server):
        worker = Worker(listener)
        worker.start()
        taken = worker.take()
        taken = worker.take(skipped=taken.ranges)
        assert server.status().progress.records_skipped == 10
        assert not server.status().progress.finished
        assert server.status().progress.percent == 50
        worker.push(0, taken.version, finish=worker.finishing(0, taken))
        progress = server.status().progress
        assert (progress.records_applied, progress.records_skipped, progress.finished) == (10, 10, True)
        assert progress.percent == 100


def test_another_model_is_refused_in_words(listener: InprocServer, worker: Worker) -> None:
    other = Worker(listener, 1)
    wide = (TensorSpec("w", (5,), "float32", Rule.GRADIENT, 0),)
    with pytest.raises(Refused, match=r"\bw\b") as refused:
        other.join(tensors=wide)
    assert code(refused) is RefusalCode.MODEL_MISMATCH
    with pytest.raises(Refused, match="this worker has Adam, the parameter server has SGD") as refused:
        other.join(optimizer="Adam")
    assert code(refused) is RefusalCode.MODEL_MISMATCH
    with pytest.raises(Refused) as refused:
        other.join(tensors=wide, optimizer="Adam")
    assert "this worker has Adam" in str(refused.value)
    assert "; " in str(refused.value)
    worker.ask(pb.HeartbeatRequest(caller=worker.caller()))


def test_a_worker_that_is_refused_takes_nobodys_place(listener: InprocServer, worker: Worker) -> None:
    wide = (TensorSpec("w", (5,), "float32", Rule.GRADIENT, 0),)
    with pytest.raises(Refused) as refused:
        Worker(listener, worker.index, instance="another").join(tensors=wide)
    assert code(refused) is RefusalCode.MODEL_MISMATCH
    worker.step(0)
    assert worker.values(1) == [-1.0] * 4


def test_another_data_set_is_refused_in_words(listener: InprocServer, worker: Worker) -> None:
    worker.take(wait=False)
    other = Worker(listener, 1)
    other.start()
    with pytest.raises(Refused, match="has 21 records for 1 epochs; the job trains 20 records") as refused:
        other.take(records=21)
    assert code(refused) is RefusalCode.INVALID


@soon
def test_while_one_brings_the_model_others_are_asked_to_wait(listener: InprocServer) -> None:
    first, second = Worker(listener, 0), Worker(listener, 1)
    assert first.join().initialise
    reply = second.join()
    assert reply.pending
    first.ask(pb.InitRequest(caller=first.caller(), bucket=0), torch.ones(4))
    stranger = Worker(listener, 5)
    stranger.term, stranger.incarnation = first.term, first.incarnation + 100
    for request in (pb.InitDoneRequest(caller=stranger.caller()), pb.InitRequest(caller=stranger.caller())):
        with pytest.raises(Refused):
            stranger.ask(request, torch.zeros(4))
    first.ask(pb.InitDoneRequest(caller=first.caller()))
    first.ask(pb.InitDoneRequest(caller=first.caller()))
    reply = second.join()
    assert (reply.pending, reply.initialise, reply.version) == (False, False, 0)
    assert second.values(0) == [1.0] * 4
    assert reply.lease_ms == 10_000


def test_a_worker_that_lost_its_model_with_the_server_is_not_taken_for_the_first(
    listener: InprocServer,
) -> None:
    """It has trained; its values would become the job's first ones."""
    worker = Worker(listener)
    with pytest.raises(Refused, match="has lost the model and has no checkpoint") as refused:
        worker.join(again=True)
    assert code(refused) is RefusalCode.MODEL_LOST
    assert worker.join().initialise


def test_a_server_that_may_have_been_replaced_says_of_no_model_that_it_is_lost(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    with serving(environment(checkpoints=directory)) as (listener, _):
        for away, expected in ((True, RefusalCode.NOT_READY), (False, RefusalCode.MODEL_LOST)):
            if away:
                directory.rename(tmp_path / "away")
            with pytest.raises(Refused) as refused:
                Worker(listener).join(again=True)
            assert code(refused) is expected
            if away:
                (tmp_path / "away").rename(directory)


def test_a_worker_is_told_that_its_server_has_come_back_without_anything(worker: Worker) -> None:
    """Where the checkpoints are gone, terms are counted anew, so the worker names the term of the new one."""
    taken = worker.take()
    with serving(environment()) as (listener, server):
        assert server.term == worker.term
        lost = Worker(listener)
        lost.term, lost.incarnation = worker.term, worker.incarnation
        finish = lost.finishing(0, taken)
        for call in (
            lambda: lost.push(0, 0),
            lambda: lost.push(0, 0, finish=finish, pull=pb.PullRequest(version=1, buckets=[0])),
            lambda: lost.pull(1),
            lambda: lost.pull(1, contributor=True),
            lambda: lost.ask(pb.InitRequest(caller=lost.caller(), bucket=0), torch.ones(4)),
        ):
            with pytest.raises(Refused) as refused:
                call()
            assert code(refused) is RefusalCode.STALE_INCARNATION


def test_a_worker_of_a_model_that_is_lost_is_told_so_when_another_model_is_trained(worker: Worker) -> None:
    """It would be refused as if it had failed, or wait until the new model is as far as the old one was."""
    soon = ServerLimits(shard_answer=timedelta(milliseconds=50))  # before the newcomer's lease ends
    with serving(environment(), limits=soon) as (listener, server):
        assert server.term == worker.term
        newcomer = Worker(listener)
        newcomer.start()
        assert newcomer.incarnation != worker.incarnation
        lost = Worker(listener)
        lost.term, lost.incarnation = worker.term, worker.incarnation
        for call in (
            lambda: lost.push(7, 7),
            lambda: lost.pull(7),
            lambda: lost.pull(7, contributor=True),
        ):
            with pytest.raises(Refused) as refused:
                call()
            assert code(refused) is RefusalCode.STALE_INCARNATION
        with pytest.raises(Refused) as refused:
            newcomer.push(7, 7)
        assert code(refused) is RefusalCode.WRONG_VERSION


@soon
def test_a_take_that_waits_in_vain_is_answered_before_long(listener: InprocServer, worker: Worker) -> None:
    other = Worker(listener, 1)
    other.start()
    for holder in (worker, worker):
        holder.take(wait=False)
    reply = other.take()
    assert (reply.pending, list(reply.ranges)) == (True, [])
    worker.answer(pb.Done, pb.ReleaseRequest(caller=worker.caller(call=worker.calls + 1)))
    other.calls -= 1
    reply = other.take()
    assert sum(each.stop - each.start for each in reply.ranges) == 10, "what the other has given back"


def test_one_worker_is_the_chief_of_an_epoch(listener: InprocServer, worker: Worker) -> None:
    other = Worker(listener, 1)
    other.start()

    def chief(who: Worker, epoch: int) -> bool:
        return who.answer(pb.ChiefReply, pb.ChiefRequest(caller=who.caller(), epoch=epoch)).chief

    assert [chief(other, 0), chief(worker, 0), chief(other, 0)] == [True, False, True]
    assert [chief(worker, 1), chief(other, 1)] == [False, True], "it remains the chief"
    worker.incarnation += 1
    with pytest.raises(Refused) as refused:
        chief(worker, 2)
    assert code(refused) is RefusalCode.STALE_INCARNATION


@pytest.mark.parametrize("last_one_leaves", [False, True])
@soon
def test_a_worker_that_has_not_begun_the_last_epoch_is_its_chief_only_if_no_other_has(
    listener: InprocServer, worker: Worker, last_one_leaves: bool
) -> None:
    other = Worker(listener, 1)
    other.start()
    worker.take(early=True)
    worker.answer(pb.Done, pb.ReleaseRequest(caller=worker.caller(call=worker.calls + 1)))
    worker.calls += 1
    for step in range(2):
        worker.step(step)
    assert other.take(early=True).pending, "the worker that has trained comes to the end"
    other.calls -= 1
    if last_one_leaves:
        worker.answer(pb.Done, pb.LeaveRequest(caller=worker.caller(call=worker.calls + 1)))
    else:
        end = worker.take()
        assert (end.finished, end.chief) == (True, True)
    end = other.take(early=True)
    assert (end.finished, end.chief) == (True, last_one_leaves)


def test_a_script_stops_the_training_once_and_with_a_reason(tmp_path: Path) -> None:
    with serving(environment()) as (listener, server):
        worker = Worker(listener)
        worker.start()
        with pytest.raises(Refused, match="must not be empty") as refused:
            worker.ask(pb.StopRequest(caller=worker.caller()))
        assert code(refused) is RefusalCode.MALFORMED
        taken = worker.take()
        worker.ask(pb.StopRequest(caller=worker.caller(), reason="no improvement"))
        worker.ask(pb.StopRequest(caller=worker.caller(), reason="another"))
        stranger = Worker(listener, 7)
        stranger.term = worker.term
        with pytest.raises(Refused):
            stranger.ask(pb.StopRequest(caller=stranger.caller(), reason="not a member"))
        assert not server.status().progress.finished, "a step is under way"
        worker.push(0, 0, finish=worker.finishing(0, taken))
        assert worker.pull(1)[-1][0].stopped == "no improvement"
        end = worker.take()
        assert (end.finished, end.stopped, end.version) == (True, "no improvement", 1)
        progress = server.status().progress
        assert (progress.stopped, progress.finished, progress.records_applied) == ("no improvement", True, 10)


def test_what_was_finished_is_not_stopped(worker: Worker) -> None:
    for step in range(2):
        worker.step(step)
    worker.ask(pb.StopRequest(caller=worker.caller(), reason="too late"))
    end = worker.take()
    assert (end.finished, end.stopped) == (True, "")


def test_a_push_that_ends_a_step_is_known_again_when_its_version_is_there(worker: Worker) -> None:
    """Its answer was lost; what it was part of is not added once more."""
    taken = worker.take()
    finish = worker.finishing(0, taken)
    assert worker.push(0, taken.version, finish=finish).duplicate is False
    assert worker.values(1) == [-1.0] * 4
    assert worker.push(0, taken.version, finish=finish).duplicate is True
    with pytest.raises(Refused) as refused:
        worker.push(5, taken.version, finish=finish)
    assert code(refused) is RefusalCode.STALE_ATTEMPT


@soon
def test_a_pull_that_waits_in_vain_is_answered_before_long(worker: Worker) -> None:
    ((reply, _),) = worker.pull(1)
    assert reply.pending


def test_values_that_a_script_assigns_are_the_next_version(worker: Worker) -> None:
    taken = worker.take()
    worker.calls += 1
    worker.answer(pb.Done, pb.ReleaseRequest(caller=worker.caller(call=worker.calls)))
    answer = worker.answer(pb.AssignReply, pb.AssignRequest(caller=worker.caller(), version=taken.version))
    assert (answer.pending, answer.version) == (False, 0)
    changed = {"ranges": [], "settings": "", "assigns": True, "samples": 0, "attempt": answer.attempt}
    finish = worker.finishing(0, taken, **changed)
    worker.push(0, 0, value=5.0, weight=1, attempt=answer.attempt, finish=finish)
    assert worker.values(1) == [5.0] * 4


def test_the_optimizer_s_state_is_sent_to_whoever_asks(tmp_path: Path) -> None:
    with serving(environment()) as (listener, _):
        worker = Worker(listener)
        if worker.join(optimizer="Adam").initialise:
            worker.ask(pb.InitRequest(caller=worker.caller(), bucket=0), torch.zeros(4))
            worker.ask(pb.InitDoneRequest(caller=worker.caller()))
        worker.step(0)
        answers = worker.ask(pb.OptimizerStateRequest(caller=worker.caller(term=0)))
        replies = [(pb.OptimizerStateReply.FromString(header), values) for header, values in answers]
        assert replies[-1][0].done
        state = {reply.key: (reply.tensor, reply.scalar, values) for reply, values in replies[:-1]}
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        assert state["step"][1]
        assert list(state["step"][2]) == [1.0]
        assert torch.allclose(state["exp_avg"][2], torch.full((4,), 0.1))
        assert not state["exp_avg"][1]


def test_a_process_that_has_ended_is_no_member(listener: InprocServer, worker: Worker) -> None:
    gone = pb.GoneRequest(job="job", worker=0, instance="another")
    worker.ask(gone)
    worker.ask(pb.HeartbeatRequest(caller=worker.caller()))
    worker.ask(pb.GoneRequest(job="job", worker=0, instance=worker.instance))
    with pytest.raises(Refused):
        worker.ask(pb.HeartbeatRequest(caller=worker.caller()))


def test_a_large_bucket_is_not_the_last_answer_to_a_pull() -> None:
    """Shard 0 says afterwards whether the worker took part until the bucket was sent."""
    with serving(environment(), limits=ServerLimits(small_pull=0)) as (listener, _):
        worker = Worker(listener)
        worker.start()
        worker.step(0)
        (bucket, _), (done, _) = worker.pull(1, contributor=True)
        assert (bucket.bucket, bucket.last) == (0, False)
        assert (done.done, done.version, json.loads(done.settings)["groups"]) == (True, 1, [{"lr": 1.0}])


def test_a_push_that_ends_a_step_may_ask_for_the_new_values_too(worker: Worker) -> None:
    taken = worker.take()
    request = pb.PushRequest(
        caller=worker.caller(),
        weight=10,
        codec="none",
        finish=worker.finishing(0, taken),
        pull=pb.PullRequest(caller=worker.caller(), version=1, buckets=[0], contributor=False),
    )
    for _ in range(2):  # the second one is repeated, as its answer was lost
        ((header, values),) = worker.ask(request, torch.ones(4))
        reply = pb.PullReply.FromString(header)
        assert (reply.version, reply.last) == (1, True)
        assert values.tolist() == [-1.0] * 4
    with pytest.raises(Refused) as refused:
        worker.push(0, 0)
    assert code(refused) is RefusalCode.STALE_ATTEMPT, "this one ends no step"


def test_in_mode_accumulate_a_worker_is_told_what_to_do_after_a_step() -> None:
    """Of two workers the first computes two of the three steps of a version. Lost answers change nothing."""
    given = environment(consistency={"mode": "accumulate", "gradients": 3}, worker={"replicas": 2})
    with serving(given) as (listener, server):
        first, second = workers = [Worker(listener, index) for index in range(2)]
        for worker in workers:
            worker.start()
        taken = [worker.take(records=40) for worker in workers]

        def begin(worker: Worker, step: int) -> None:
            worker.ask(pb.BeginRequest(caller=worker.caller(), version=0, step=step))

        def what_next(worker: Worker, step: int) -> str | None:
            reply = worker.answer(pb.AwaitReply, pb.AwaitRequest(caller=worker.caller(), step=step))
            kind: str | None = reply.WhichOneof("kind")
            return kind

        begin(first, 0)
        first.push(0, 0, finish=first.finishing(0, taken[0]))
        assert [what_next(first, 0) for _ in range(2)] == ["compute", "compute"]
        with pytest.raises(Refused) as refused:
            begin(first, 0)
        assert code(refused) is RefusalCode.STALE_CALL, "a late copy"
        more = first.take(wait=False, records=40)
        begin(first, 1)
        first.push(1, 0, value=4.0, finish=first.finishing(1, more, version=0))
        begin(second, 0)
        second.push(0, 0, finish=second.finishing(0, taken[1]))
        assert [what_next(first, 1), what_next(first, 0), what_next(second, 0)] == ["made"] * 3
        assert first.values(1) == [-2.0] * 4
        assert server.status().progress.records_applied == 30


def test_elsewhere_nobody_asks_what_to_do_after_a_step(worker: Worker) -> None:
    taken = worker.take()
    with pytest.raises(Refused, match="asks what to do after step 0, which it does not have to") as refused:
        worker.ask(pb.AwaitRequest(caller=worker.caller(), step=0))
    assert code(refused) is RefusalCode.INVALID
    assert taken.ranges


def test_who_pulls_as_a_contributor_must_take_part(worker: Worker) -> None:
    taken = worker.take()
    assert worker.pull(0, contributor=True)[-1][0].last
    worker.incarnation += 1
    with pytest.raises(Refused) as refused:
        worker.pull(0, contributor=True)
    assert code(refused) is RefusalCode.STALE_INCARNATION
    assert taken.version == 0
