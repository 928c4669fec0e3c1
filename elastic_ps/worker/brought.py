"""The optimizer's state, as the parameter server takes it and gives it, and as torch has it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from elastic_ps.codec import as_bytes, dtype_of, name_of
from elastic_ps.codec.optimizers import WIDE, Entry, usual_numbers, usual_state, with_numbers
from elastic_ps.codec.several import Kind, Several, kinds_of, parts_of
from elastic_ps.core.partition import Bucket, Layout, Rule
from elastic_ps.core.settings import CONSTRAINTS, plain_group
from elastic_ps.errors import InvalidModel
from elastic_ps.transport import messages_pb2 as pb


class Kept:
    """The state that an optimizer has, in the form that the parameter server takes."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._entries: dict[int, dict[Entry, torch.Tensor]] = {}  # by the parameters' ids
        states = [part.state for part in parts_of(optimizer) for _ in part.param_groups]
        kinds = kinds_of(optimizer)
        for number, group in enumerate(optimizer.param_groups):
            values = plain_group(group, number)
            for position, parameter in enumerate(group["params"]):
                if found := states[number].get(parameter):
                    what = f"parameter {position} of group {number}"
                    self._entries[id(parameter)] = dict(
                        _entries(kinds[number], values, parameter, found, what)
                    )

    def pieces(
        self, bucket: Bucket, tensors: Sequence[torch.Tensor]
    ) -> Iterator[tuple[int, list[Entry], memoryview]]:
        """For each piece of a bucket that has a state: its index, what there is, and all bytes of that.

        Args:
            tensors: the model's, by the numbers of the bucket's layout.
        """
        if bucket.rule is not Rule.GRADIENT:
            return
        for index, piece in enumerate(bucket.pieces):
            entries = self._entries.get(id(tensors[piece.tensor]))
            if entries:
                parts = [
                    value if entry.scalar else value[piece.start : piece.start + piece.length]
                    for entry, value in entries.items()
                ]
                body = bytearray().join(bytes(as_bytes(part.contiguous())) for part in parts)
                yield index, list(entries), memoryview(body)


class Brought(Kept):
    """The state of an optimizer, which is empty afterwards: its state is on the parameter server then.

    Args:
        optimizer: of torch.optim, or several; gets the hyperparameters of `state`, too. The constraints of
            its parameter groups stay: torch knows none of them.
        state: what `state_dict()` of such an optimizer has given; of several, by their names.

    Raises:
        InvalidModel: the state is not that of such an optimizer with such parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        constraints = [
            {key: group[key] for key in CONSTRAINTS if key in group} for group in optimizer.param_groups
        ]
        try:
            joined = optimizer.join(state) if isinstance(optimizer, Several) else dict(state)
            optimizer.load_state_dict(joined)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidModel(_not_of(optimizer, error)) from error
        for group, own in zip(optimizer.param_groups, constraints, strict=True):
            group.update(own)
        super().__init__(optimizer)
        for part in parts_of(optimizer):
            part.state.clear()


def _not_of(optimizer: torch.optim.Optimizer, error: Exception) -> str:
    """Why a state cannot be loaded into this optimizer, in words."""
    if isinstance(optimizer, Several):
        return (
            f"state is not what these optimizers give: {error}. Pass the state_dict() of each of them by its "
            f"name, as in {{{', '.join(f'{name!r}: ...' for name in optimizer.parts)}}}"
        )
    name = type(optimizer).__name__
    return (
        f"state is not what state_dict() of this {name} gives: {error}. Pass the state_dict() of an "
        f"{name} with the same parameters in the same groups"
    )


def state_dict_of(
    entries: Iterable[tuple[pb.OptimizerStateReply, bytes]],
    layout: Layout,
    tensors: Sequence[torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """What a parameter server keeps of an optimizer, as `state_dict()` of torch's gives it.

    Args:
        entries: as it sends them, with their bytes.
        tensors: the model's, by the numbers of the layout.
        optimizer: whose it is, with the parameter groups of now.
    """
    groups = optimizer.param_groups
    numbers = {id(p): i for i, p in enumerate(p for g in groups for p in g["params"])}
    state: dict[int, dict[str, Any]] = {}
    for reply, body in entries:
        spec = layout.tensors[reply.tensor]
        number = numbers[id(tensors[reply.tensor])]
        value = torch.frombuffer(bytearray(body), dtype=dtype_of(reply.dtype))
        kept = state.setdefault(number, {})
        if reply.scalar:
            kept[reply.key] = value.reshape(())
        else:
            whole = kept.setdefault(reply.key, torch.zeros(spec.shape, dtype=value.dtype, device="cpu"))
            whole.view(-1)[reply.start : reply.start + value.numel()] = value
    plain, counter = [], iter(range(len(numbers)))
    for group in groups:
        rest = {key: value for key, value in group.items() if key != "params"}
        plain.append({**rest, "params": [next(counter) for _ in group["params"]]})
    kinds = kinds_of(optimizer)
    numeric = [usual_numbers(kind, plain_group(g, 0)) for kind, g in zip(kinds, groups, strict=True)]
    group_of = [index for index, group in enumerate(groups) for _ in group["params"]]
    ordered = {
        number: with_numbers(kept, numeric[group_of[number]]) for number, kept in sorted(state.items())
    }
    return {"state": ordered, "param_groups": plain}


def _entries(
    kind: Kind, group: Mapping[str, Any], parameter: torch.nn.Parameter, found: Mapping[str, Any], what: str
) -> Iterator[tuple[Entry, torch.Tensor]]:
    """A parameter's state, flat, on the CPU, and in the dtypes of the parameter server."""
    usual = usual_state(kind, group, WIDE.get(name_of(parameter.dtype), parameter.dtype))
    for key, (dtype, scalar) in usual.items():
        value = found.get(key)
        if value is None and kind is torch.optim.SGD:
            continue  # its buffer is made by the first step
        value = torch.as_tensor(value if value is not None else [], device="cpu")
        if value.numel() != (1 if scalar else parameter.numel()):
            raise InvalidModel(
                f"state has no {key!r} of the shape {[] if scalar else list(parameter.shape)} for {what}; it "
                f"has {sorted(found)}"
            )
        yield Entry(key, dtype, scalar), value.detach().to("cpu", dtype_of(dtype)).reshape(-1)
