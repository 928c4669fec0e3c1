"""What a worker says about its model and optimizer, and what it refuses before it joins."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elastic_ps.codec.optimizers import Optimizers
from elastic_ps.errors import InvalidModel
from elastic_ps.worker.model.description import ModelDescription


@pytest.mark.parametrize(
    ("kind", "group", "match"),
    [
        (torch.optim.SGD, {"differentiable": True}, "differentiable=True, but the step is made on the"),
        (torch.optim.Adagrad, {"initial_accumulator_value": 2.0}, "only from its constructor, .* got 0;"),
    ],
)
def test_an_argument_that_the_parameter_server_would_not_honour_is_refused(
    kind: Any, group: dict[str, Any], match: str
) -> None:
    model = torch.nn.Linear(2, 1)
    with pytest.raises(InvalidModel, match=match):
        ModelDescription(model, kind([{"params": model.parameters(), **group}]))


def test_statistics_over_all_workers_are_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    with pytest.raises(InvalidModel, match=r"1 is a SyncBatchNorm.* use BatchNorm.*GroupNorm"):
        ModelDescription(model, torch.optim.SGD(model.parameters(), lr=0.1))


def described(change: Callable[[torch.nn.Module], list[torch.nn.Parameter] | None]) -> None:
    model: torch.nn.Module = torch.nn.Linear(2, 1)
    trained = change(model) or [*model.parameters()]
    ModelDescription(model, torch.optim.SGD(trained, lr=0.1))


def own_weights(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [*model.parameters(), torch.nn.Parameter(torch.zeros(3))]


def copied(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [*copy.deepcopy(model).parameters()]


def complex_parameter(model: torch.nn.Module) -> None:
    model.w = torch.nn.Parameter(torch.ones(2, dtype=torch.cfloat))


def rotary(model: torch.nn.Module, *, persistent: bool = True) -> None:
    model.register_buffer("w", torch.ones(2, dtype=torch.cfloat), persistent=persistent)


def lazy(model: torch.nn.Module) -> None:
    model.norm = torch.nn.LazyBatchNorm1d(affine=False)


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            own_weights,
            r"1 of .* 3 parameters .*\['params'\]\[2\], of shape \[3\].*model.loss_weights =",
        ),
        (copied, r"2 of the optimizer's 2 parameters .*after all that replaces .*deepcopy"),
        (complex_parameter, r"the parameter w is .*complex64.*view_as_real.*own=\["),
        (rotary, r"the buffer w is .*complex64.*persistent=False.*own=\[.*view_as_real"),
        (lazy, r"norm\.running_mean is lazy.* once on a batch before"),
    ],
)
def test_tensors_that_a_job_cannot_have_are_refused_by_name(
    change: Callable[[torch.nn.Module], Any], match: str
) -> None:
    with pytest.raises(InvalidModel, match=match):
        described(change)


def test_a_complex_buffer_that_is_not_saved_is_left_alone() -> None:
    described(functools.partial(rotary, persistent=False))


class Twice(torch.optim.SGD):
    """Computes the gradient at two places, as SAM does."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.base = torch.optim.SGD(self.param_groups, lr)


class Closed(torch.optim.SGD):
    """Needs a closure."""

    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        return closure()


@pytest.mark.parametrize("kind", [Twice, Closed])
def test_an_optimizer_that_needs_more_than_a_gradient_is_not_to_be_named(kind: Any) -> None:
    model = torch.nn.Linear(2, 1)
    for own in [], [f"{__name__}:{kind.__name__}"]:
        with pytest.raises(InvalidModel, match=f"{kind.__name__} cannot run .*mode: local") as caught:
            ModelDescription(model, kind(model.parameters()), optimizers=Optimizers(own))
        assert "parameterServer" not in str(caught.value)
