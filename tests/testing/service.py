"""A parameter server that serves within one process, and a worker that is played message by message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from google.protobuf.message import Message

from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.codec import as_bytes
from elastic_ps.contract.env import ProcessEnvironment, Resume
from elastic_ps.core.partition import Rule, TensorSpec
from elastic_ps.core.settings import Settings
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.process.retrying import Patience
from elastic_ps.server.limits import USUAL, ServerLimits
from elastic_ps.server.process import ParameterServer
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import EMPTY, Frame
from elastic_ps.transport.convert import tensors_to_message
from elastic_ps.transport.inproc import InprocServer, connect

TENSORS = (TensorSpec("w", (4,), "float32", Rule.GRADIENT, 0),)
GROUPS = Settings(({"lr": 1.0},)).to_json()
M = TypeVar("M", bound=Message)


def environment(
    *, checkpoints: Path | None = None, resume: Resume = "auto", job: str = "job", index: int = 0, **spec: Any
) -> ProcessEnvironment:
    return ProcessEnvironment(
        job=job,
        spec=TrainingJobSpec.model_validate({"entrypoint": "train:main", **spec}),
        role="ps",
        index=index,
        addresses=("here",),
        checkpoints=checkpoints,
        resume=resume,
    )


class Worker:
    """A worker's side of the calls. There may be `more` shards than the first one."""

    def __init__(
        self, listener: InprocServer, index: int = 0, *more: InprocServer, instance: str = ""
    ) -> None:
        self.connections = [connect(each) for each in (listener, *more)]
        self.index, self.instance = index, instance or f"instance-{index}"
        self.term = self.incarnation = self.calls = 0

    def caller(self, **change: Any) -> pb.Caller:
        fields = {"job": "job", "term": self.term, "worker": self.index, "incarnation": self.incarnation}
        return pb.Caller(**{**fields, **change})

    def ask(
        self, request: Message, body: torch.Tensor | None = None, *, shard: int = 0
    ) -> list[tuple[bytes, torch.Tensor]]:
        """All answers to a call: header, and the floats of the body."""
        method = type(request).__name__.removesuffix("Request")
        frame = Frame(request.SerializeToString(), EMPTY if body is None else as_bytes(body))
        answers = []
        for incoming in self.connections[shard].call(method, frame, timeout=timedelta(seconds=30)):
            values = torch.empty(incoming.size // 4)
            if incoming.size:
                incoming.read_into(as_bytes(values))
            answers.append((incoming.header, values))
        return answers

    def answer(self, kind: type[M], request: Message, body: torch.Tensor | None = None) -> M:
        ((header, _),) = self.ask(request, body)
        return kind.FromString(header)

    def join(self, *, tensors: tuple[TensorSpec, ...] = TENSORS, **more: Any) -> pb.JoinReply:
        self.calls += 1
        reply = self.answer(
            pb.JoinReply,
            pb.JoinRequest(
                caller=self.caller(call=self.calls, term=0, incarnation=0),
                pid=100 + self.index,
                host="here",
                tensors=tensors_to_message(tensors),
                optimizer=pb.Optimizer(name=more.pop("optimizer", "SGD"), groups=GROUPS),
                instance=self.instance,
                **more,
            ),
        )
        self.term, self.incarnation = reply.term, reply.incarnation
        return reply

    def start(self, value: float = 0.0) -> None:
        """Join, and bring the model if there is none."""
        if self.join().initialise:
            self.ask(pb.InitRequest(caller=self.caller(), bucket=0), torch.full((4,), value))
            self.ask(pb.InitDoneRequest(caller=self.caller()))

    def take(self, *, wait: bool = True, **more: Any) -> pb.TakeReply:
        self.calls += 1
        fields = {"records": 20, "epochs": 1, "batch": 10, **more}
        return self.answer(
            pb.TakeReply, pb.TakeRequest(caller=self.caller(call=self.calls), wait=wait, **fields)
        )

    def push(self, step: int, version: int, *, value: float = 1.0, **more: Any) -> pb.Done:
        """A gradient whose elements are all `value`."""
        fields = {"bucket": 0, "weight": 10, "attempt": 0, "codec": "none", **more}
        request = pb.PushRequest(caller=self.caller(), step=step, version=version, **fields)
        return self.answer(pb.Done, request, torch.full((4,), value))

    def finishing(self, step: int, taken: pb.TakeReply, **more: Any) -> pb.FinishRequest:
        return pb.FinishRequest(
            **{
                "caller": self.caller(),
                "step": step,
                "version": taken.version,
                "samples": 10,
                "ranges": taken.ranges,
                "settings": GROUPS,
                **more,
            }
        )

    def step(self, step: int, **metrics: float) -> pb.TakeReply:
        """Take records and push a step made of them; the push ends it."""
        taken = self.take()
        if not taken.finished:
            self.push(step, taken.version, finish=self.finishing(step, taken, metrics=metrics))
        return taken

    def pull(self, version: int, **more: Any) -> list[tuple[pb.PullReply, torch.Tensor]]:
        request = pb.PullRequest(caller=self.caller(), version=version, buckets=[0], **more)
        return [(pb.PullReply.FromString(header), values) for header, values in self.ask(request)]

    def values(self, version: int) -> list[float]:
        return list(self.pull(version)[0][1])


@contextmanager
def serving(
    given: ProcessEnvironment, patience: Patience | None = None, limits: ServerLimits = USUAL
) -> Iterator[tuple[InprocServer, ParameterServer]]:
    listener = InprocServer()
    server = ParameterServer(given, listener, lambda _: connect(listener), patience=patience, limits=limits)
    try:
        yield listener, server
    finally:
        server.close(keep=False)


def code(error: pytest.ExceptionInfo[Refused]) -> RefusalCode:
    return error.value.code
