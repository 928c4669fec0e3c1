"""The calls about tensors that scripts keep on the parameter servers: protobuf headers in, `Tensors` out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta

import torch

from elastic_ps import codec
from elastic_ps.core.partition import ITEM_SIZE
from elastic_ps.core.spread import PUSH_RULES, Slice
from elastic_ps.errors import Malformed
from elastic_ps.server.receiving import Buffers
from elastic_ps.server.service import check_caller, parse
from elastic_ps.server.tensors import UNBORN, Birth, Place, Sender, Tensors
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Frame, Incoming

WAIT = timedelta(seconds=10)
"""For how long a slice waits for memory to be received in. Then the worker sends it again."""

LONGEST_INSTANCE = 100
MOST_BIRTHS = 1 << 62


class TensorService:
    """Answers for a `Service`, which has checked that the caller may call.

    A body is received before the tensor is touched. So one that is cut off changes nothing, and what is
    received at a time is `receiving.RECEIVE_BUFFERS` slices.

    Args:
        job: the job's name.
        bucket_bytes: of a slice, at most.

    Attributes:
        methods: what answers calls, by their names.
    """

    def __init__(self, job: str, tensors: Tensors, *, bucket_bytes: int) -> None:
        self._job, self._tensors = job, tensors
        self._buffers = Buffers(bucket_bytes)
        self.methods: dict[str, Callable[[Incoming], Iterator[Frame]]] = {
            "DeclareTensor": self._declare,
            "PutTensor": self._put,
            "PushTensor": self._push,
            "PullTensor": self._pull,
            "FreeTensor": self._free,
        }

    def _declare(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.DeclareTensorRequest, incoming.header)
        who = self._sender(request.caller, request.instance, incoming)
        tensor = request.tensor
        shape, birth = tuple(tensor.shape), _birth(tensor.birth)
        if request.above > MOST_BIRTHS:
            raise Malformed(f"no tensor has a number above {MOST_BIRTHS}")
        if birth.number:
            said = self._tensors.look(tensor.name, shape, tensor.dtype, birth=birth)
        else:
            lost = _birth(request.lost)
            said = self._tensors.declare(
                who, tensor.name, shape, tensor.dtype, above=request.above, lost=lost
            )
        reply = pb.DeclareTensorReply(life=said.life, bring=said.bring, pending=said.pending)
        if said.birth != UNBORN:
            reply.birth.CopyFrom(pb.Birth(number=said.birth.number, origin=said.birth.origin))
        yield Frame(reply.SerializeToString(), last=True)

    def _put(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.PutTensorRequest, incoming.header)
        who = self._sender(request.caller, request.instance, incoming)
        tensor, start, birth = request.tensor, request.start, _birth(request.tensor.birth)
        found = self._tensors.expect(
            who, tensor.name, tuple(tensor.shape), tensor.dtype, birth=birth, start=start
        )
        if found is not None:
            with self._receive(tensor.name, found, tensor.dtype, incoming) as values:
                self._tensors.put(who, tensor.name, birth=birth, start=start, values=values)
        yield Frame(pb.PutTensorReply(later=found is None).SerializeToString(), last=True)

    def _push(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.PushTensorRequest, incoming.header)
        who = self._sender(request.caller, request.instance, incoming)
        place = Place(request.name, _birth(request.birth), request.life)
        rule = next((known for known in PUSH_RULES if known == request.rule), None)
        if rule is None:
            raise Malformed(f"unknown rule {request.rule[:50]!r}; known: {', '.join(PUSH_RULES)}")
        found, dtype = self._tensors.find(place, request.start)
        if rule == "zero":
            new = self._tensors.push(who, request.number, place, start=found.start, rule=rule)
        else:
            with self._receive(request.name, found, dtype, incoming) as values:
                new = self._tensors.push(
                    who, request.number, place, start=found.start, rule=rule, values=values
                )
        yield Frame(pb.Done(duplicate=not new).SerializeToString(), last=True)

    def _pull(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.PullTensorRequest, incoming.header)
        check_caller(request.caller, incoming, self._job)
        place = Place(request.name, _birth(request.birth), request.life)
        for start, values in self._tensors.pull(place):
            yield Frame(pb.PullTensorReply(start=start).SerializeToString(), codec.as_bytes(values))
        yield Frame(pb.PullTensorReply(done=True).SerializeToString(), last=True)

    def _free(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.FreeTensorRequest, incoming.header)
        check_caller(request.caller, incoming, self._job)
        freed = self._tensors.free(request.name, birth=_birth(request.birth))
        yield Frame(pb.Done(duplicate=not freed).SerializeToString(), last=True)

    def _sender(self, caller: pb.Caller, instance: str, incoming: Incoming) -> Sender:
        check_caller(caller, incoming, self._job)
        if not 0 < len(instance) <= LONGEST_INSTANCE:
            raise Malformed(f"a process is named with 1 to {LONGEST_INSTANCE} characters")
        return Sender(caller.worker, instance)

    def _receive(
        self, name: str, found: Slice, dtype: str, incoming: Incoming
    ) -> AbstractContextManager[torch.Tensor]:
        what = f"elements {found.start} to {found.start + found.length} of {name!r}"
        return self._buffers.values(what, dtype, found.length * ITEM_SIZE[dtype], incoming, timeout=WAIT)


def _birth(message: pb.Birth) -> Birth:
    """Raises Malformed for a number that leaves no higher one."""
    if message.number > MOST_BIRTHS:
        raise Malformed(f"no tensor has a number above {MOST_BIRTHS}")
    return Birth(message.number, message.origin)
