"""After a large gradient is sent, the parameter's gradient lies in the memory that it was sent from.

A script that does with gradients what torch allows gets what it gets in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.codec import as_bytes
from elastic_ps.codec.lending import WORTHWHILE
from elastic_ps.transport.memory import place_of
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp
from tests.testing.oracle import mse
from tests.testing.trained import alone

Optimizer = Any
"""torch's, or a job's, which has `no_sync`, too."""


def gradients_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


class Script:
    """A loop that does something with gradients, beside a job and in one."""

    def __init__(self) -> None:
        self.model = make_mlp((6, 128, 128, 1))
        self.seen: list[torch.Tensor] = []
        self.lent: dict[bool, list[bool]] = {False: [], True: []}  # by whether they are large

    def train(self, optimizer: Optimizer, batches: Any) -> None:
        for x, y in batches:
            self.step(optimizer, x, y)

    def step(self, optimizer: Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        self.backward(x, y)
        optimizer.step()

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> None:
        mse(self.model, x, y).backward()
        for each in gradients_of(self.model):
            self.lent[each.nbytes >= WORTHWHILE].append(place_of(as_bytes(each)) is not None)


class Keeps(Script):
    """It keeps gradients of earlier steps, or parts of them."""

    def step(self, optimizer: Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        super().step(optimizer, x, y)
        self.seen += gradients_of(self.model)
        self.seen += [each.detach().view(-1)[1:] for each in gradients_of(self.model)]


class Accumulates(Script):
    """It never sets them to zero, and changes them after steps."""

    def step(self, optimizer: Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        self.backward(x, y)
        optimizer.step()
        self.seen += [each.clone() for each in gradients_of(self.model)]
        for each in gradients_of(self.model):
            each.mul_(-0.5)


class Zeros(Script):
    """It sets them to zero in place."""

    def step(self, optimizer: Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=False)
        self.backward(x, y)
        self.seen += [each.clone() for each in gradients_of(self.model)]
        optimizer.step()


class Prepares(Script):
    """It makes gradients before the first step, keeps them, and sets them to zero itself."""

    def step(self, optimizer: Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        if not self.seen:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
                self.seen.append(parameter.grad)
        torch._foreach_zero_(self.seen)
        self.backward(x, y)
        optimizer.step()


class Hooks(Script):
    """A hook of its own keeps the gradients of the first step, to which later ones are added."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self.keep)

    def keep(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if not any(parameter.grad is each for each in self.seen):
            self.seen.append(parameter.grad)

    def step(self, optimizer: Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        self.backward(x, y)
        optimizer.step()


class Twice(Script):
    """It makes a step of two gradients."""

    def train(self, optimizer: Optimizer, batches: Any) -> None:
        together = getattr(optimizer, "no_sync", nullcontext)
        for number, (x, y) in enumerate(batches):
            if number % 2 == 0:
                optimizer.zero_grad()
                with together():
                    mse(self.model, x, y).backward()
            else:
                self.backward(x, y)
                optimizer.step()


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


@pytest.mark.parametrize("kind", [Script, Keeps, Accumulates, Zeros, Prepares, Hooks, Twice])
def test_a_script_does_with_gradients_what_torch_allows(tmp_path: Path, kind: Callable[[], Script]) -> None:
    data, ours, expected = Numbers(32), kind(), kind()

    def script(session: Session) -> None:
        optimizer = session.optimizer(sgd(ours.model), ours.model)
        ours.train(optimizer, session.loader(data, 4))

    alone(tmp_path, script, data={"shuffle": False})
    expected.train(sgd(expected.model), torch.utils.data.DataLoader(data, 4))
    torch.testing.assert_close(ours.seen, expected.seen)
    torch.testing.assert_close(ours.model.state_dict(), expected.model.state_dict())
    assert not any(expected.lent[True] + expected.lent[False])
    assert not any(ours.lent[False])
    own = kind in (Prepares, Hooks, Twice)  # the memory of gradients is older than what is sent
    assert ours.lent[True][0] == (not own), "of the first step"
    assert all(ours.lent[True]) == (not own and kind is not Keeps), "what a script keeps is not overwritten"


@pytest.mark.parametrize("how", [{"overlap": False}, {"check_gradients": True}], ids=str)
def test_gradients_that_a_script_may_change_are_its_own(tmp_path: Path, how: dict[str, Any]) -> None:
    ours = Script()

    def script(session: Session) -> None:
        optimizer = session.optimizer(sgd(ours.model), ours.model, **how)
        ours.train(optimizer, session.loader(Numbers(8), 4))

    alone(tmp_path, script)
    assert not any(ours.lent[True] + ours.lent[False])
