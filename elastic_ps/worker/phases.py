"""What the training thread is doing, for the trace: forward, backward, waiting for the new version."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

import torch

from elastic_ps.process.telemetry import Trace


class Phases:
    """Notes the phases of each step. Belongs to the training thread; costs nothing without a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._forward_at = 0
        self._backward_at = 0
        self._forward_end = 0
        self._last_gradient = 0

    def watch(self, model: torch.nn.Module) -> None:
        """Note when the model's forward ends, which is about when backward begins."""
        if self._trace.enabled:
            model.register_forward_hook(self._forward_ended)

    def _forward_ended(self, _module: torch.nn.Module, _inputs: object, _output: object) -> None:
        self._forward_end = time.monotonic_ns()

    def forward(self) -> None:
        """A batch is handed to the script."""
        self._forward_at = time.monotonic_ns()
        self._forward_end = self._backward_at = self._last_gradient = 0

    def backward(self) -> None:
        """The first gradient of a step is there."""
        if not self._trace.enabled:
            return
        self._backward_at = self._forward_end or time.monotonic_ns()
        self._trace.complete("forward", self._forward_at, self._backward_at)

    def gradient(self) -> None:
        """A bucket is complete."""
        self._last_gradient = time.monotonic_ns()

    def backward_ended(self) -> None:
        """The script calls `optimizer.step`."""
        if self._trace.enabled and self._backward_at:
            self._trace.complete("backward", self._backward_at, self._last_gradient or time.monotonic_ns())

    def waiting(self, step: int) -> AbstractContextManager[None]:
        """The block waits for the new version."""
        return self._trace.span("wait", step=step)
