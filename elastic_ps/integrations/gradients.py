"""Replaces what other libraries do to gradients: only the parameter server has those of all workers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from elastic_ps.core.settings import MAX_GRAD_NORM
from elastic_ps.errors import UsageError
from elastic_ps.worker.optimizer import ElasticOptimizer


def of_second_step(strategy: str) -> str:
    """The message about a second step with one batch, by another optimizer; see `ElasticOptimizer`.

    Args:
        strategy: how a script writes it.
    """
    return (
        "a second step is made with the same batch, but each batch of the training DataLoader allows one "
        f"step of one optimizer. Choose the optimizer by {strategy}.session.version, which is the same on "
        'all workers, or in mode local by the number of the batch. See "Two networks in turn" in '
        "docs/cookbook.md"
    )


class ClippedSteps:
    """The parameter server clips those steps for which a script asks, and no others.

    Args:
        limit: that was named at the start; None: no step is clipped.
    """

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._next, self._last = False, True  # so a step that the script does not make itself is clipped

    def ask(self) -> None:
        """The script clips its next step, or the one under way."""
        self._next = True

    def as_last(self) -> None:
        """The next step is made for the script, and clipped if the last one was."""
        self._next = self._last

    def begin(self, optimizer: ElasticOptimizer | None) -> None:
        """A step begins. It may call the script, which may ask."""
        if optimizer is not None and self._limit is not None and not self._next:
            for group in optimizer.param_groups:
                group[MAX_GRAD_NORM] = sys.float_info.max  # infinity is refused in hyperparameters

    def end(self) -> None:
        """The step has ended."""
        self._next, self._last = False, self._next

    @contextmanager
    def step(self, optimizer: ElasticOptimizer | None) -> Iterator[None]:
        """From `begin` to `end`."""
        self.begin(optimizer)
        try:
            yield
        finally:
            self.end()

    def clip(
        self,
        optimizer: ElasticOptimizer | None,
        parameters: Iterable[torch.Tensor] | torch.Tensor,
        max_norm: float,
        norm_type: float,
        *,
        call: str,
        how: str,
    ) -> torch.Tensor:
        """Ask for the next step: the gradient of all workers is clipped. Does not change gradients.

        Returns the 2-norm of this worker's own gradient, of shape ().

        Args:
            max_norm: infinity: only tell the norm.
            call: what the script calls.
            how: how the limit is named at the start.

        Raises:
            UsageError: the parameter server does not know of a limit, or it is another norm.
        """
        clips = max_norm != float("inf")
        if norm_type != 2:
            raise UsageError(
                f"{call}: norm_type is {norm_type}, but the parameter server clips by the 2-norm. Leave "
                "norm_type out"
            )
        if optimizer is None or (self._limit is None and clips):
            raise UsageError(
                f"{call}: the parameter server clips the gradient of all workers. Tell it the limit at the "
                f"start, with {how}(max_grad_norm={max_norm})"
            )
        each = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        norms = [torch.linalg.vector_norm(p.grad.detach()) for p in each if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        if clips:
            for group in optimizer.param_groups:
                group[MAX_GRAD_NORM] = float(max_norm)
            self.ask()
        return norm
