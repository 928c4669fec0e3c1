"""Each call of the table: who may make it of whom, and which headers are looked at."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
import torch
from google.protobuf.message import Message

from elastic_ps.contract.identity import Identity, Role
from elastic_ps.errors import Malformed, RefusalCode, Refused
from elastic_ps.process.telemetry import Trace
from elastic_ps.server.calls.node import Node
from elastic_ps.server.calls.service import HEADER, Service, refuse, refuse_to_end, refuse_to_speak_for
from elastic_ps.server.calls.shard_zero import ShardZero
from elastic_ps.server.process import service_of
from elastic_ps.tensors.store import TensorStore
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.calls import CALLS, GONE, At, By, Call, Sender
from tests.testing.service import Worker, environment, serving
from tests.testing.shard import Body

EVERYTHING = set(CALLS)
OF_WORKERS = {name for name, call in CALLS.items() if call.by & By.WORKER}
ORDERS = {"Configure", "Advance", "State", "Sum", "Rows", "Held"}
JOB = "job-1"
EVERYBODY = [Identity(JOB, role, index) for role in get_args(Role) for index in (0, 1)]
Namespace: Any = SimpleNamespace
NO_BODY = torch.empty(0)
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def permitted(peer: Identity | None, *, shard: int = 0, standby: bool = False) -> set[str]:
    return {name for name in EVERYTHING if refuse(peer, name, shard=shard, standby=standby) is None}


def test_what_shards_answer() -> None:
    for shard in (0, 1):
        assert permitted(Identity(JOB, "worker", 5), shard=shard) == OF_WORKERS
        assert permitted(Identity(JOB, "evaluator"), shard=shard) == {"Evaluate", "ReadFile"}
        assert permitted(Identity(JOB, "operator"), shard=shard) == {"Gone"}
        assert permitted(Identity(JOB, "standby", shard), shard=shard) == set()
    assert permitted(Identity(JOB, "server", 0), shard=1) == {"Configure", "Advance", "Held"}
    assert permitted(Identity(JOB, "server", 2), shard=1) == set()


def test_what_standbys_answer() -> None:
    for role in ("worker", "evaluator", "operator", "standby"):
        assert permitted(Identity(JOB, role), standby=True) == set()
    own = {"Configure", "Advance", "State", "Sum", "Rows"}
    assert permitted(Identity(JOB, "server", 1), shard=1, standby=True) == own
    assert permitted(Identity(JOB, "server", 0), shard=1, standby=True) == {"Configure", "Advance", "Held"}
    assert permitted(Identity(JOB, "server", 0), standby=True) == ORDERS
    assert permitted(Identity(JOB, "server", 2), shard=1, standby=True) == set()


def test_workers_make_all_calls_but_those_of_servers_and_the_evaluator() -> None:
    assert ORDERS | {"Evaluate", "ReadFile"} == EVERYTHING - OF_WORKERS


def test_without_an_identity_everything_is_answered() -> None:
    assert permitted(None) == permitted(None, standby=True) == EVERYTHING
    assert refuse_to_speak_for(None, 3) is None


def test_a_worker_speaks_for_itself_only() -> None:
    assert refuse_to_speak_for(Identity(JOB, "worker", 3), 3) is None
    assert "worker 4" in (refuse_to_speak_for(Identity(JOB, "worker", 3), 4) or "")
    assert refuse_to_speak_for(Identity(JOB, "server", 3), 3) is not None


def test_a_worker_ends_itself_only_and_the_launcher_each() -> None:
    assert refuse_to_end(Identity(JOB, "worker", 3), 3) is None
    assert refuse_to_end(Identity(JOB, "operator"), 3) is None
    assert refuse_to_end(None, 3) is None
    for peer in (Identity(JOB, "worker", 2), Identity(JOB, "server", 3)):
        assert "does not permit it to speak for worker 3" in str(refuse_to_end(peer, 3))


def services() -> dict[At, Service]:
    """Shard 0's, another shard's, and a standby's."""

    def node(index: int) -> Node:
        return Node(index, 2, store=None, trace=Trace(None, ""))

    def tensors(index: int) -> TensorStore:
        return TensorStore(index, 2, bucket_bytes=1024, most_bytes=1024, clock=time.monotonic)

    nothing = dict.fromkeys(("job", "commit", "checkpoints", "history", "last_version"))
    zero = cast(ShardZero, Namespace(**nothing, evaluation_queue=object()))
    return {
        At.SHARD_ZERO: service_of("secret", node(0), zero, tensors(0)),
        At.OTHER: service_of("secret", node(1), None, tensors(1)),
        At.STANDBY: service_of("secret", node(1), None, tensors(1), standby=True),
    }


def test_every_message_that_asks_is_in_the_table() -> None:
    asking = {name for name in pb.DESCRIPTOR.message_types_by_name if name.endswith("Request")}
    assert {f"{name}Request" for name in CALLS} == asking


@each_call
def test_a_call_is_answered_where_somebody_may_make_it(call: Call[Any, Any]) -> None:
    """Whoever may not is refused before the header is parsed, and is told nothing of the job."""
    for at, service in services().items():
        assert (call.name in service.methods) == bool(call.at & at)
        shard, standby = int(at is not At.SHARD_ZERO), at is At.STANDBY
        problems = [refuse(peer, call.name, shard=shard, standby=standby) for peer in EVERYBODY]
        assert not call.at & at or None in problems
        for peer, problem in zip(EVERYBODY, problems, strict=True):
            error = failed(service, call.name, b"\xff" * 100, peer)
            if problem is not None:
                assert (error.code, "secret" in str(error)) == (RefusalCode.FORBIDDEN, False)
            elif not call.at & at:
                assert error.code is RefusalCode.UNKNOWN_METHOD
            else:
                assert isinstance(error, Malformed)
                assert f"not a {call.name}Request" in str(error)


@each_call
def test_a_header_that_is_too_long_is_not_parsed(call: Call[Any, Any]) -> None:
    """One that describes a model may have any size, until there is a model."""
    for at, service in services().items():
        if call.at & at:
            error = failed(service, call.name, b"\xff" * (HEADER + 1), None)
            assert isinstance(error, Malformed)
            assert ("the limit is" in str(error)) != call.describes


def test_an_order_may_carry_the_record_of_a_large_job() -> None:
    """Shard 0's standby gets it with each round, with more than a kilobyte for each worker."""
    order = pb.AdvanceRequest(job="secret", source="shard 0", number=1)
    order.next.state = "x" * (HEADER + 1)
    error = failed(services()[At.STANDBY], "Advance", order.SerializeToString(), None)
    assert isinstance(error, Refused), "it is read"
    assert error.code is RefusalCode.NOT_READY


@each_call
def test_a_call_for_another_job_is_refused(call: Call[Any, Any]) -> None:
    named = {"job": "other"} if call.sender is Sender.JOB else {"caller": pb.Caller(job="other", worker=4)}
    for at, service in services().items():
        if call.at & at:
            error = failed(service, call.name, call.request(**named).SerializeToString(), None)
            assert (error.code, "secret" in str(error)) == (RefusalCode.WRONG_JOB, False)


class Made(Body):
    """A call of a process with a certificate."""

    def __init__(self, header: bytes, peer: Identity | None, body: torch.Tensor) -> None:
        super().__init__(body)
        self.header, self.peer = header, peer


def failed(
    service: Service, method: str, header: bytes, peer: Identity | None, body: torch.Tensor = NO_BODY
) -> Any:
    with pytest.raises((Malformed, Refused)) as caught:
        list(service(method, Made(header, peer, body)))
    return caught.value


CALLER = pb.Caller(job="secret", worker=4, term=1)


@pytest.mark.parametrize("name", sorted(OF_WORKERS))
def test_no_call_is_made_in_another_workers_name(name: str) -> None:
    call = CALLS[name]
    request: Message = pb.GoneRequest(job="secret", worker=4) if call is GONE else call.request(caller=CALLER)
    error = failed(services()[At.SHARD_ZERO], name, request.SerializeToString(), Identity(JOB, "worker", 3))
    assert error.code is RefusalCode.FORBIDDEN
    assert ("worker 4" in str(error), "secret" in str(error)) == (True, False)


def test_the_end_of_a_step_is_not_in_another_workers_name() -> None:
    with serving(environment(worker={"replicas": 5})) as (listener, server):
        worker = Worker(listener, 3)
        worker.start()
        ending = worker.finishing(0, worker.take(), caller=worker.caller(worker=4))
        request = pb.PushRequest(caller=worker.caller(), weight=10, codec="none", finish=ending)
        zero = service_of("job", server.node, server.shard_zero)
        peer, gradient = Identity(JOB, "worker", 3), torch.ones(4)
        error = failed(zero, "Push", request.SerializeToString(), peer, gradient)
        assert error.code is RefusalCode.FORBIDDEN
