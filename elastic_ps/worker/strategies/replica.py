"""A worker's replica of the job, with `strategy: all-reduce`: the model's values and the optimizer's state.

A worker that lacks a version gets it from the memory of another one, or from the parameter server, which has
some versions. A worker that has a version sends it to the parameter server when asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from elastic_ps.codec import dtype_of, name_of
from elastic_ps.codec.state import OptimizerState, state_dict_of
from elastic_ps.collectives.groups import Group
from elastic_ps.core.partition import Rule
from elastic_ps.errors import ConnectionLost, DeadlineExceeded, Malformed, RefusalCode, Refused
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.worker.model.flat import Flat
from elastic_ps.worker.model.values import Values
from elastic_ps.worker.wire.client import Client


class Replica:
    """The model's values and the optimizer's state. Belongs to the training thread. Its methods block.

    A worker may be asked for its version after it has computed on another batch. Its parameters are of the
    version until it makes the step, but its buffers are not. So buffers are sent from `flat`'s values, where
    each version puts its own.

    Args:
        flat: of a model whose changing tensors have memory of their own.
        optimizer: torch's own, which makes the steps.
    """

    def __init__(self, client: Client, flat: Flat, optimizer: torch.optim.Optimizer, values: Values) -> None:
        self._client, self._flat, self._optimizer, self._values = client, flat, optimizer, values
        self._newer = False  # something that was fetched is of a later version than the rest

    def fetch(self, version: int) -> bool:
        """Get the version from the parameter server, which has it.

        Returns whether all is of it. A worker that takes part in the round gets no other version.

        Raises:
            Refused, ConnectionLost: it did not come. The replica has no version then.
        """
        self._newer = False
        missing = {bucket.index for bucket in self._flat.layout.buckets}
        self._flat.check(thorough=True)
        self._flat.expect()
        while missing:
            self._client.retry(partial(self._fetch_once, version, missing))
        self._flat.publish()
        entries = self._client.optimizer_state(0)
        state = state_dict_of(entries, self._flat.layout, self._flat.tensors, self._optimizer)
        _load(self._optimizer, state["state"])
        return not self._newer

    def _fetch_once(self, version: int, missing: set[int]) -> None:
        """One call. Removes the buckets that have come from `missing`. Raises only if none has come."""
        wanted = pb.PullRequest(version=version, buckets=sorted(missing))
        size = sum(self._flat.layout.buckets[index].nbytes for index in missing)
        try:
            for reply, incoming in self._client.pull(self._client.member_id, 0, wanted, size):
                if reply.WhichOneof("kind") == "bucket":
                    bucket = self._flat.layout.buckets[reply.bucket]
                    self._values.receive(bucket, reply, incoming)
                    self._newer |= bucket.rule is not Rule.CONSTANT and reply.version != version
                    missing.discard(reply.bucket)
        except (ConnectionLost, DeadlineExceeded):
            if len(missing) == len(wanted.buckets):
                raise

    def send(self, version: int) -> None:
        """Send it to the parameter server as `version`, unless another version is there by now."""
        self._flat.gather()
        state = OptimizerState(self._optimizer)
        try:
            for bucket in self._flat.layout.pushed:  # the others never change
                self._client.initialise(bucket, self._flat.value_bytes(bucket), version=version)
                for piece in state.pieces(bucket, self._flat.tensors):
                    self._client.initialise_state(bucket, *piece, version=version)
            self._client.initialised(version)
        except Refused as refusal:
            if refusal.code is not RefusalCode.WRONG_VERSION:
                raise

    def share(self, group: Group, source: int, look: Callable[[], None]) -> None:
        """Give all of the group what the worker with the rank `source` has.

        Raises:
            Broken: the group is not connected any more. This replica may have no version then.
            Malformed: the source describes its state in an unknown way.
        """
        gives = group.rank == source
        if gives:
            self._flat.gather()
        else:
            self._flat.check(thorough=True)
            self._flat.expect()
        values = [self._flat.value_of(bucket) for bucket in self._flat.layout.buckets]
        received = values if gives else [torch.empty_like(each) for each in values]
        for each in received:
            group.broadcast(each, source)
        head = _describe(self._optimizer) if gives else b""
        length = torch.tensor([len(head)], device="cpu")
        group.broadcast(length, source)
        group.wait(look)
        text = torch.frombuffer(bytearray(head or bytes(int(length))), dtype=torch.uint8)
        group.broadcast(text, source)
        group.wait(look)
        state = _state(self._optimizer) if gives else _prepare(bytes(text.tolist()))
        for entries in state.values():
            for key, value in entries.items():
                if isinstance(value, torch.Tensor):
                    entries[key] = value = value.detach().to("cpu").contiguous()
                    group.broadcast(value, source)
        group.wait(look)
        if not gives:
            for own, each in zip(values, received, strict=True):
                own.copy_(each)
            self._flat.publish()
            _load(self._optimizer, state)


def _state(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """An optimizer's state by the numbers of its parameters, in the same order on all workers."""
    state = optimizer.state_dict()["state"]
    return {number: dict(sorted(state[number].items())) for number in sorted(state)}


def _load(optimizer: torch.optim.Optimizer, state: dict[int, dict[str, Any]]) -> None:
    """Load a state. The optimizer's parameter groups stay the same objects, which others know."""
    groups = optimizer.param_groups
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    optimizer.param_groups = groups


def _describe(optimizer: torch.optim.Optimizer) -> bytes:
    """The state as JSON: plain values, and the dtype and shape of each tensor."""
    described = [
        [number, key, name_of(value.dtype), list(value.shape)]
        if isinstance(value, torch.Tensor)
        else [number, key, "", value]
        for number, entries in _state(optimizer).items()
        for key, value in entries.items()
    ]
    return json.dumps(described).encode()


def _prepare(head: bytes) -> dict[int, dict[str, Any]]:
    """A state with empty tensors, as `_describe` has described it. Raises Malformed."""
    state: dict[int, dict[str, Any]] = {}
    try:
        for number, key, dtype, value in json.loads(head):
            made = torch.empty(value, dtype=dtype_of(dtype), device="cpu") if dtype else value
            state.setdefault(int(number), {})[str(key)] = made
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise Malformed(f"cannot read the optimizer state that a worker sent: {error}") from error
    return state
