"""The measurements of a worker: its traffic, and the phases of its script."""

from __future__ import annotations

import threading
import time

import torch

from elastic_ps.process.telemetry import Trace
from elastic_ps.transport import messages_pb2 as pb


class Traffic:
    """The traffic of one incarnation of a worker, over all shards. Thread-safe.

    Attributes:
        overlap: the name of the worker's `core.overlap.Overlap`; "" if gradients are not sent to shards.
    """

    def __init__(self) -> None:
        self.overlap = ""
        self._lock = threading.Lock()
        self._counts = pb.Traffic()

    def reset(self) -> None:
        """Another incarnation begins."""
        with self._lock:
            self._counts = pb.Traffic()

    def add(self, **counts: float) -> None:
        """Add to these fields of the message: the bytes sent or received, or seconds."""
        with self._lock:
            for name, count in counts.items():
                setattr(self._counts, name, getattr(self._counts, name) + count)

    def chose(self, codec: str) -> None:
        """Gradients are sent with this codec from now on."""
        with self._lock:
            self._counts.codec = codec

    def counts(self) -> pb.Traffic:
        """A copy."""
        with self._lock:
            copy = pb.Traffic()
            self._counts.overlap = self.overlap
            copy.CopyFrom(self._counts)
            return copy


class Phases:
    """Notes the phases of each step. Belongs to the training thread; costs nothing without a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._forward_at = self._forward_end = self._backward_at = self._last_gradient = 0

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
