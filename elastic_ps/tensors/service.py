"""The calls about tensors that scripts keep on the parameter servers, for `Tensors`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta

import torch

from elastic_ps import codec
from elastic_ps.core.partition import ITEM_SIZE
from elastic_ps.errors import Malformed
from elastic_ps.tensors.spread import PUSH_RULES, Slice
from elastic_ps.tensors.store import UNBORN, Birth, Place, Sender, Tensors
from elastic_ps.transport import calls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Frame, Incoming
from elastic_ps.transport.buffers import Buffers
from elastic_ps.transport.calls import answers
from elastic_ps.transport.convert import to_message

WAIT = timedelta(seconds=10)
"""For how long a slice waits for memory to be received in. Then the worker sends it again."""

LONGEST_INSTANCE = 100
MOST_BIRTHS = 1 << 62


class TensorService:
    """Answers for a `Service`.

    A body is received before the tensor is touched. So one that is cut off changes nothing, and what is
    received at a time is `buffers.RECEIVE_BUFFERS` slices.

    Args:
        bucket_bytes: of a slice, at most.
    """

    def __init__(self, tensors: Tensors, *, bucket_bytes: int) -> None:
        self._tensors, self._buffers = tensors, Buffers(bucket_bytes)

    @answers(calls.DECLARE_TENSOR)
    def _declare(self, request: pb.DeclareTensorRequest, _: Incoming) -> pb.DeclareTensorReply:
        who, tensor = _sender(request.caller, request.instance), request.tensor
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
        known = to_message(pb.Birth, said.birth) if said.birth != UNBORN else None
        return to_message(pb.DeclareTensorReply, said, birth=known)

    @answers(calls.PUT_TENSOR)
    def _put(self, request: pb.PutTensorRequest, incoming: Incoming) -> pb.PutTensorReply:
        who = _sender(request.caller, request.instance)
        tensor, start, birth = request.tensor, request.start, _birth(request.tensor.birth)
        found = self._tensors.expect(
            who, tensor.name, tuple(tensor.shape), tensor.dtype, birth=birth, start=start
        )
        if found is not None:
            with self._receive(tensor.name, found, tensor.dtype, incoming) as values:
                self._tensors.put(who, tensor.name, birth=birth, start=start, values=values)
        return pb.PutTensorReply(later=found is None)

    @answers(calls.PUSH_TENSOR)
    def _push(self, request: pb.PushTensorRequest, incoming: Incoming) -> pb.Done:
        who = _sender(request.caller, request.instance)
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
        return pb.Done(duplicate=not new)

    @answers(calls.PULL_TENSOR)
    def _pull(self, request: pb.PullTensorRequest, _: Incoming) -> Iterator[Frame]:
        place = Place(request.name, _birth(request.birth), request.life)
        for start, values in self._tensors.pull(place):
            yield Frame(pb.PullTensorReply(start=start).SerializeToString(), codec.as_bytes(values))
        yield Frame(pb.PullTensorReply(done=True).SerializeToString(), last=True)

    @answers(calls.FREE_TENSOR)
    def _free(self, request: pb.FreeTensorRequest, _: Incoming) -> pb.Done:
        return pb.Done(duplicate=not self._tensors.free(request.name, birth=_birth(request.birth)))

    def _receive(
        self, name: str, found: Slice, dtype: str, incoming: Incoming
    ) -> AbstractContextManager[torch.Tensor]:
        what = f"elements {found.start} to {found.start + found.length} of {name!r}"
        return self._buffers.values(what, dtype, found.length * ITEM_SIZE[dtype], incoming, timeout=WAIT)


def _sender(caller: pb.Caller, instance: str) -> Sender:
    if not 0 < len(instance) <= LONGEST_INSTANCE:
        raise Malformed(f"a process is named with 1 to {LONGEST_INSTANCE} characters")
    return Sender(caller.worker, instance)


def _birth(message: pb.Birth) -> Birth:
    """Raises Malformed for a number that leaves no higher one."""
    if message.number > MOST_BIRTHS:
        raise Malformed(f"no tensor has a number above {MOST_BIRTHS}")
    return Birth(message.number, message.origin)
