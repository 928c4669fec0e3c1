"""Steps the pieces of a bucket with torch's optimizers, or the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from elastic_ps.codec.optimizers import (
    StateEntry,
    constructor_arguments,
    is_of_torch,
    kept_state,
    restored,
    unseen_step,
)
from elastic_ps.codec.rows import Rows, put
from elastic_ps.codec.several import Kind
from elastic_ps.core.settings import CONSTRUCTED
from elastic_ps.errors import InvalidModel

Groups = Sequence[Mapping[str, Any]]
"""The hyperparameters of each parameter group of the model."""


class Stepper:
    """Steps the pieces of a bucket. Not thread-safe.

    It has one optimizer of torch, or several if the parameter groups have different classes.

    Args:
        kinds, groups: the class and the hyperparameters of each parameter group of the model.
        pieces: the parameters to step: flat, or whole tensors for a class that steps these.
        group_of: the index of the parameter group of each.

    Raises:
        InvalidModel: an optimizer cannot be made.
    """

    def __init__(
        self,
        kinds: Sequence[Kind],
        groups: Groups,
        pieces: Sequence[torch.nn.Parameter],
        group_of: Sequence[int],
    ) -> None:
        self._pieces, self._group_of = pieces, group_of
        self.groups = sorted(set(group_of))
        """The parameter groups of the pieces."""
        alike: dict[tuple[object, ...], list[int]] = {}
        for group in self.groups:
            constructed = [groups[group].get(key) for key in sorted(CONSTRUCTED)]
            alike.setdefault((kinds[group], *constructed), []).append(group)
        self._each = [_One(kinds[mine[0]], groups, mine, pieces, group_of) for mine in alike.values()]
        self._of_group = {group: one for one in self._each for group in one.groups}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of torch's optimizers, with their parameters."""
        return [group for one in self._each for group in one.optimizer.param_groups]

    def step(self, present: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Step the pieces `present` with these gradients, one for each piece of the bucket."""
        for one in self._each:
            mine = present if len(self._each) == 1 else [i for i in present if i in one.pieces]
            for part in one.parts(mine):
                for index in one.pieces:
                    self._pieces[index].grad = gradients[index] if index in part else None
                one.make_step(one.optimizer)

    def step_rows(self, rows: Rows) -> None:
        """Step rows of the only piece, a matrix, with their gradients.

        Adagrad steps a copy of these rows and of their state, in a third of the time of its sparse step.
        """
        one, piece = self._one(0), self._pieces[0]
        optimizer, state = one.optimizer, self.state_of(0)
        if type(optimizer) is not torch.optim.Adagrad or "sum" not in state:
            self.step([0], [rows.gradient(len(piece))])
            return
        some = torch.nn.Parameter(piece.detach().index_select(0, rows.numbers))
        some.grad = rows.values
        total = state["sum"].index_select(0, rows.numbers)
        optimizer.state[some] = {**state, "sum": total}
        (group,) = (each for each in optimizer.param_groups if each["params"])
        group["params"] = [some]
        try:
            one.make_step(optimizer)
        finally:
            group["params"] = [piece]
            del optimizer.state[some]
        put(piece, rows.numbers, some)
        put(state["sum"], rows.numbers, total)

    def prepare(self, groups: Groups) -> None:
        """Use these hyperparameters from now on."""
        for one in self._each:
            for own, number in zip(one.optimizer.param_groups, one.groups, strict=True):
                own.update(groups[number])

    def state_of(self, index: int) -> Mapping[str, Any]:
        """The state of a piece, live; {} if it was never stepped."""
        state: Mapping[str, Any] = self._one(index).optimizer.state.get(self._pieces[index], {})
        return state

    def take(self, index: int, state: Mapping[str, Any]) -> None:
        """Continue from a saved state of a piece; see `restored`."""
        one, piece = self._one(index), self._pieces[index]
        values = self._values_for(index)
        one.optimizer.state[piece] = restored(type(one.optimizer), values, piece.shape, state)

    def mirror(self, index: int, state: Mapping[str, Any]) -> None:
        """Copy this state of a piece, into existing memory if the keys are the same."""
        kept = self._one(index).optimizer.state
        own = kept.get(self._pieces[index], {})
        if own.keys() != state.keys():
            own = kept[self._pieces[index]] = {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and key in own:
                own[key].copy_(value)
            else:
                own[key] = value.clone() if isinstance(value, torch.Tensor) else value

    def usual_state(self, index: int) -> dict[str, StateEntry]:
        """The state of a piece after a step."""
        one, piece = self._one(index), self._pieces[index]
        return kept_state(type(one.optimizer), self._values_for(index), piece.dtype, piece.shape)

    def _values_for(self, index: int) -> dict[str, Any]:
        """The hyperparameters of a piece's group."""
        one = self._one(index)
        own = one.optimizer.param_groups[one.groups.index(self._group_of[index])]
        return {key: value for key, value in own.items() if key != "params"}

    def _one(self, index: int) -> _One:
        return self._of_group[self._group_of[index]]


class _One:
    def __init__(
        self,
        kind: Kind,
        groups: Groups,
        numbers: Sequence[int],
        pieces: Sequence[torch.nn.Parameter],
        group_of: Sequence[int],
    ) -> None:
        self.groups = numbers
        self.pieces = {index: pieces[index] for index, group in enumerate(group_of) if group in numbers}
        members = [[pieces[i] for i, group in enumerate(group_of) if group == number] for number in numbers]
        first = groups[numbers[0]]
        arguments = constructor_arguments(kind, first)
        dense = all(piece.dim() == 1 for piece in self.pieces.values())  # matrices get sparse gradients
        if (
            dense and is_of_torch(kind) and "fused" in inspect.signature(kind).parameters
        ):  # one pass over memory
            arguments["fused"] = True
        try:
            self.optimizer = kind(
                [{**groups[n], "params": own} for n, own in zip(numbers, members, strict=True)], **arguments
            )
        except (TypeError, ValueError) as error:
            raise InvalidModel(f"{kind.__name__} does not take these hyperparameters: {error}") from error
        self.make_step: Callable[[torch.optim.Optimizer], object] = unseen_step(kind)

    def parts(self, present: Sequence[int]) -> list[frozenset[int]]:
        """Divide the pieces to step: torch's fused SGD fails if only some have a momentum buffer."""
        state = self.optimizer.state
        if len(state) == len(self.pieces) and all(state.values()):
            return [frozenset(present)] if present else []
        new = frozenset(index for index in present if not state.get(self.pieces[index]))
        return [part for part in (new, frozenset(present) - new) if part]
