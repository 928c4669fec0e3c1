"""Who may call what."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
import torch
from google.protobuf.message import Message

from elastic_ps.contract.identity import Identity, Role
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.evaluation.queue import Desk
from elastic_ps.process.telemetry import Trace
from elastic_ps.server.coordinator import Coordinator
from elastic_ps.server.desk_service import DeskService
from elastic_ps.server.node import Node
from elastic_ps.server.permissions import (
    OF_EVALUATORS,
    OF_OPERATORS,
    OF_WORKERS,
    refuse,
    refuse_to_end,
    refuse_to_speak_for,
)
from elastic_ps.server.service import Calls, Service
from elastic_ps.server.tensor_service import TensorService
from elastic_ps.server.tensors import Tensors
from elastic_ps.transport import messages_pb2 as pb
from tests.testing.shard import SYNC, Body

ORDERS = {"Configure", "Advance", "State", "Sum", "Held"}
EVERYTHING = OF_WORKERS | OF_EVALUATORS | OF_OPERATORS | ORDERS
JOB = "job-1"
Namespace: Any = SimpleNamespace


def permitted(peer: Identity | None, *, shard: int = 0, standby: bool = False) -> set[str]:
    return {name for name in EVERYTHING if refuse(peer, name, shard=shard, standby=standby) is None}


def test_what_shards_answer() -> None:
    for shard in (0, 1):
        assert permitted(Identity(JOB, "worker", 5), shard=shard) == OF_WORKERS
        assert permitted(Identity(JOB, "evaluator"), shard=shard) == OF_EVALUATORS
        assert permitted(Identity(JOB, "operator"), shard=shard) == OF_OPERATORS
        assert permitted(Identity(JOB, "standby", shard), shard=shard) == set()
    assert permitted(Identity(JOB, "server", 0), shard=1) == {"Configure", "Advance", "Held"}
    assert permitted(Identity(JOB, "server", 2), shard=1) == set()


def test_what_standbys_answer() -> None:
    for role in ("worker", "evaluator", "operator", "standby"):
        assert permitted(Identity(JOB, role), standby=True) == set()
    own = {"Configure", "Advance", "State", "Sum"}
    assert permitted(Identity(JOB, "server", 1), shard=1, standby=True) == own
    assert permitted(Identity(JOB, "server", 0), shard=1, standby=True) == {"Configure", "Advance", "Held"}
    assert permitted(Identity(JOB, "server", 0), standby=True) == ORDERS
    assert permitted(Identity(JOB, "server", 2), shard=1, standby=True) == set()


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


def services() -> list[Service]:
    """Shard 0's, another shard's, and a standby's."""

    def node(index: int) -> Node:
        return Node(index, 2, store=None, consistency=SYNC, trace=Trace(None, ""))

    def tensors(index: int) -> Calls:
        kept = Tensors(index, 2, bucket_bytes=1024, most_bytes=1024, clock=time.monotonic)
        return TensorService("secret", kept, bucket_bytes=1024).methods

    desk = DeskService("secret", cast(Desk, None), lambda: None)
    return [
        Service("secret", node(0), cast(Coordinator, object()), beside={**desk.methods, **tensors(0)}),
        Service("secret", node(1), None, beside=tensors(1)),
        Service("secret", node(1), None, standby=True),
    ]


def test_every_call_that_a_server_knows_is_somebodys() -> None:
    """A new call has to say who may make it; else nobody with a certificate could."""
    known = [set(service.methods) for service in services()]
    assert set.union(*known) == EVERYTHING
    for (shard, standby), names in zip([(0, False), (1, False), (1, True)], known, strict=True):
        everybody = [Identity(JOB, role, index) for role in get_args(Role) for index in (0, 1)]
        permitted = {
            name
            for name in EVERYTHING
            if any(refuse(peer, name, shard=shard, standby=standby) is None for peer in everybody)
        }
        assert names <= permitted


class Call(Body):
    """A call without a body, of a process with a certificate."""

    def __init__(self, request: Message, peer: Identity | None) -> None:
        super().__init__(torch.empty(0))
        self.header, self.peer = request.SerializeToString(), peer


def refused(service: Service, request: Message, peer: Identity | None) -> Refused:
    method = type(request).__name__.removesuffix("Request")
    with pytest.raises(Refused) as caught:
        list(service(method, Call(request, peer)))
    return caught.value


CALLER = pb.Caller(job="secret", worker=4, term=1)


@pytest.mark.parametrize(
    "request_of_a_worker",
    [
        pb.JoinRequest(caller=CALLER),
        pb.InitRequest(caller=CALLER),
        pb.InitStateRequest(caller=CALLER),
        pb.InitDoneRequest(caller=CALLER),
        pb.TakeRequest(caller=CALLER, records=1, epochs=1, batch=1),
        pb.StopRequest(caller=CALLER, reason="x"),
        pb.ChiefRequest(caller=CALLER),
        pb.ReleaseRequest(caller=CALLER),
        pb.BeginRequest(caller=CALLER),
        pb.AwaitRequest(caller=CALLER),
        pb.AssignRequest(caller=CALLER),
        pb.PushRequest(caller=CALLER),
        pb.FinishRequest(caller=CALLER),
        pb.PullRequest(caller=CALLER),
        pb.HeartbeatRequest(caller=CALLER),
        pb.LeaveRequest(caller=CALLER),
        pb.ReportRequest(caller=CALLER),
        pb.OptimizerStateRequest(caller=CALLER),
        pb.DeclareTensorRequest(caller=CALLER, instance="x"),
        pb.PutTensorRequest(caller=CALLER, instance="x"),
        pb.PushTensorRequest(caller=CALLER, instance="x", rule="zero"),
        pb.GoneRequest(job="secret", worker=4, instance="x"),
        pb.PullTensorRequest(caller=CALLER),
        pb.FreeTensorRequest(caller=CALLER),
    ],
    ids=lambda request: type(request).__name__,
)
def test_no_call_is_made_in_another_workers_name(request_of_a_worker: Message) -> None:
    lead = services()[0]
    error = refused(lead, request_of_a_worker, Identity(JOB, "worker", 3))
    assert (error.code, "worker 4" in str(error), "secret" in str(error)) == (
        RefusalCode.FORBIDDEN,
        True,
        False,
    )


def test_the_end_of_a_step_is_not_in_another_workers_name() -> None:
    class Adding(Service):
        def _added(self, *_: object) -> bool:
            return True

    knows = Namespace(job=Namespace(term=1), heartbeat=lambda *_: None)
    node = Node(0, 2, store=None, consistency=SYNC, trace=Trace(None, ""))
    lead, own = Adding("secret", node, cast(Any, knows)), pb.Caller(job="secret", worker=3, term=1)
    request = pb.PushRequest(caller=own, finish=pb.FinishRequest(caller=CALLER))
    assert refused(lead, request, Identity(JOB, "worker", 3)).code is RefusalCode.FORBIDDEN


def test_a_refusal_comes_before_the_header_is_parsed_and_tells_nothing() -> None:
    for service in services():
        for name in EVERYTHING:
            call = Call(pb.Done(), Identity(JOB, "standby", 0))
            call.header = b"\xff" * 100
            with pytest.raises(Refused) as caught:
                list(service(name, call))
            assert caught.value.code is RefusalCode.FORBIDDEN
            assert "secret" not in str(caught.value)
