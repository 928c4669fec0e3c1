"""Optimizers of rows: torch's values on the rows that a step touches, and refusals of what is not lazy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from elastic_ps.embedding import FTRL, SGD, Adagrad, LazyAdam, RowwiseAdagrad
from elastic_ps.embedding.optimizers import RowOptimizer, Touched, check_optimizer
from elastic_ps.errors import UsageError

ROWS, DIM = 6, 4


def trained(optimizer: RowOptimizer, steps: int = 5) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The first values, those after steps that touch half of the rows each, and the dense gradients."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64)
    values = first.clone()
    slots = [torch.full((ROWS, slot.width or DIM), slot.first).double() for slot in optimizer.slots]
    gradients = []
    for number in range(1, steps + 1):
        rows = torch.randperm(ROWS, generator=generator)[: ROWS // 2]
        gradient = torch.randn(len(rows), DIM, generator=generator, dtype=torch.float64)
        gradients.append(torch.zeros_like(values).index_copy(0, rows, gradient))
        touched = Touched(values[rows], [slot[rows] for slot in slots], gradient.clone(), number)
        optimizer.step(touched)
        values[rows] = touched.values
        for slot, changed in zip(slots, touched.slots, strict=True):
            slot[rows] = changed
    return first, values, gradients


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (Adagrad(lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
        (LazyAdam(lr=0.1), lambda p: torch.optim.SparseAdam(p, lr=0.1)),
    ],
    ids=["SGD", "Adagrad", "LazyAdam"],
)
def test_rows_become_what_torch_makes_of_sparse_gradients(
    ours: RowOptimizer, theirs: Callable[[list[torch.Tensor]], torch.optim.Optimizer]
) -> None:
    first, values, gradients = trained(ours)
    dense = torch.nn.Parameter(first)
    optimizer = theirs([dense])
    with torch.sparse.check_sparse_tensor_invariants():  # said, because torch warns if nobody says
        for gradient in gradients:
            dense.grad = gradient.to_sparse(1)
            optimizer.step()
    torch.testing.assert_close(values, dense.detach(), rtol=1e-12, atol=1e-12)


def test_rowwise_adagrad_divides_a_row_by_one_number() -> None:
    first, values, gradients = trained(RowwiseAdagrad(lr=0.1, eps=1e-3))
    total = torch.zeros(ROWS, 1, dtype=torch.float64)
    for gradient in gradients:
        total += (gradient**2).mean(1, keepdim=True)
        first = first - 0.1 * gradient / (total.sqrt() + 1e-3)
    torch.testing.assert_close(values, first, rtol=1e-12, atol=1e-12)


def closed_form(first: float, gradients: list[float], rule: FTRL) -> float:
    """Algorithm 1 of McMahan et al. 2013 for one weight; `first` is the weight that its state stands for."""
    z, n, w = 0.0, 0.0, first
    for number, g in enumerate(gradients):
        before = math.sqrt(n + rule.initial_accumulator) if number else -rule.beta
        n += g * g
        z += g - (math.sqrt(n + rule.initial_accumulator) - before) / rule.lr * w
        strength = (rule.beta + math.sqrt(n + rule.initial_accumulator)) / rule.lr + rule.l2
        w = 0.0 if abs(z) <= rule.l1 else -(z - math.copysign(rule.l1, z)) / strength
    return w


@pytest.mark.parametrize(
    "rule", [FTRL(lr=0.1), FTRL(lr=0.2, l1=1.0, l2=0.5), FTRL(lr=0.1, beta=0.0, initial_accumulator=0.1)]
)
def test_ftrl_is_the_published_algorithm(rule: FTRL) -> None:
    first, values, gradients = trained(rule)
    for row in range(ROWS):
        touched = [gradient[row] for gradient in gradients if gradient[row].any()]
        for place in range(DIM):
            expected = closed_form(float(first[row, place]), [float(g[place]) for g in touched], rule)
            assert float(values[row, place]) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_ftrl_keeps_the_first_values_without_a_gradient() -> None:
    first = torch.tensor([[0.5, -2.0]], dtype=torch.float64)
    for rule in (FTRL(lr=0.1), FTRL(lr=0.1, beta=0.0)):
        rows = Touched(first.clone(), [torch.zeros_like(first), torch.zeros_like(first)], 0 * first, 1)
        rule.step(rows)
        torch.testing.assert_close(rows.values, first)


def test_betas_may_be_a_list() -> None:
    assert LazyAdam(lr=1.0, betas=cast("Any", [0.9, 0.99])).betas == (0.9, 0.99)


class Own(SGD):
    """Parameter servers do not have it."""


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SGD(lr=0.1, momentum=0.9), r"SGD\(momentum=0.9\) changes every row .* LazyAdam"),
        (
            lambda: Adagrad(lr=0.1, weight_decay=0.01),
            r"Adagrad\(weight_decay=0.01\) changes every row .* loss",
        ),
        (lambda: SGD(lr=-1), r"SGD\(lr=-1\): expected a number >= 0"),
        (lambda: SGD(lr=math.nan), r"lr=nan"),
        (lambda: Adagrad(lr=1, eps=-1), r"eps=-1"),
        (lambda: RowwiseAdagrad(lr=1, eps=math.inf), r"eps=inf"),
        (lambda: LazyAdam(lr=1, betas=(0.9, 1.0)), r"betas=\(0.9, 1.0\)"),
        (lambda: LazyAdam(lr=1, betas=cast("Any", 0.9)), r"betas=0.9"),
        (lambda: SGD(lr=cast("Any", "x")), r"SGD\(lr='x'\): expected a number"),
        (lambda: FTRL(lr=0), r"FTRL divides by it"),
        (lambda: FTRL(lr=1, l1=-1), r"l1=-1"),
        (lambda: check_optimizer(torch.optim.Adam), r"optimizer=Adam: the rows .*RowwiseAdagrad"),
        (lambda: check_optimizer(Own(lr=1.0)), r"optimizer=Own: the rows .*RowwiseAdagrad"),
    ],
)
def test_what_is_out_of_range_or_not_lazy_is_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()
