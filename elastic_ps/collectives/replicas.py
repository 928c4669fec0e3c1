"""Replicas of a model, one in each process of a communicator, with equal values and gradients."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence

import torch

from elastic_ps.collectives.communicator import Communicator
from elastic_ps.collectives.operations import Handle, Op, Operations
from elastic_ps.errors import ModelMismatch, UsageError

BUCKET = 25 << 20
"""The bytes of one operation, as in DistributedDataParallel."""


def synchronize_parameters(model: torch.nn.Module, communicator: Communicator, *, source: int = 0) -> None:
    """Give all processes the parameters and buffers of rank `source`. Blocks.

    Raises:
        ModelMismatch: names, shapes or dtypes differ.
    """
    tensors = _tensors(model)
    _check_described(tensors, communicator)
    with torch.no_grad():
        sent = []
        for bucket in _buckets(list(tensors.values()), BUCKET):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            sent.append((bucket, communicator.begin.broadcast(flat, source)))
        for bucket, handle in sent:
            for tensor, values in zip(bucket, _parts(handle.wait(), bucket), strict=True):
                tensor.copy_(values)


def synchronize_gradients(model: torch.nn.Module, communicator: Communicator, *, op: Op = "mean") -> None:
    """Replace each gradient by the mean (sum, ...) over all processes. Blocks; call it after `backward()`.

    A missing gradient counts as zero, unless no process has one.
    """
    _Gradients(model, communicator, op, BUCKET).finish()


@contextlib.contextmanager
def synchronized_backward(
    model: torch.nn.Module, communicator: Communicator, *, op: Op = "mean", bucket: int = BUCKET
) -> Iterator[None]:
    """Synchronize gradients during the `backward()` in the block: a complete bucket is sent at once.

    ::

        with synchronized_backward(model, communicator):
            loss.backward()
        optimizer.step()

    To accumulate gradients, run the other `backward()` calls before the block. The end of the block waits for
    all gradients.

    Args:
        bucket: the bytes of gradients in one operation.

    Raises:
        UsageError: there are two `backward()` calls in the block.
    """
    gradients = _Gradients(model, communicator, op, bucket)
    hooks = [p.register_post_accumulate_grad_hook(gradients.ready) for p in gradients.parameters]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    gradients.finish()


def check_replicas(model: torch.nn.Module, communicator: Communicator) -> None:
    """Compare the parameters and buffers of all processes, bit by bit. Blocks.

    Raises:
        ModelMismatch: they differ. Every process raises it, with the names and the ranks.
    """
    tensors = _tensors(model)
    _check_described(tensors, communicator)
    digests = {name: _digest(tensor) for name, tensor in tensors.items()}
    everybody = communicator.all_gather_objects(digests)
    differing = {
        name: [rank for rank, other in enumerate(everybody) if other[name] != everybody[0][name]]
        for name in tensors
    }
    found = [f"{name} (ranks {_joined(ranks)})" for name, ranks in differing.items() if ranks]
    if found:
        shown = ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
        raise ModelMismatch(
            f"{len(found)} of {len(tensors)} tensors differ from rank 0's: {shown}. Call "
            "synchronize_parameters before training, and step every replica with the same gradients. Call it "
            "again before this check if the model has buffers, because those of BatchNorm follow the batches"
        )


class _Gradients:
    """Sends the gradients of a model through a communicator, in buckets, last parameter first.

    Processes begin the buckets in the same order, so a bucket waits for those before it.
    """

    def __init__(self, model: torch.nn.Module, communicator: Communicator, op: Op, limit: int) -> None:
        self.parameters = [p for p in reversed(list(model.parameters())) if p.requires_grad]
        if not self.parameters:
            raise UsageError(f"{type(model).__name__} has no parameters that require a gradient")
        self._operations: Operations = communicator.begin
        self._op: Op = op
        self._buckets = _buckets(self.parameters, limit)
        self._of = {id(p): number for number, bucket in enumerate(self._buckets) for p in bucket}
        self._missing = [{id(p) for p in bucket} for bucket in self._buckets]
        self._sent: list[Handle[torch.Tensor]] = []
        self._lock = threading.Lock()

    def ready(self, parameter: torch.Tensor) -> None:
        """Note a complete gradient. Thread-safe: autograd runs the hooks of each device in another thread."""
        with self._lock:
            missing = self._missing[self._of[id(parameter)]]
            if id(parameter) not in missing:
                raise UsageError(
                    "backward() ran twice within synchronized_backward, which sends gradients in the first; "
                    "run earlier ones before it"
                )
            missing.remove(id(parameter))
            while len(self._sent) < len(self._buckets) and not self._missing[len(self._sent)]:
                self._send()

    def finish(self) -> None:
        """Send the rest, and store the results. Blocks."""
        while len(self._sent) < len(self._buckets):
            self._send()
        flags = [p.grad is not None for p in self.parameters]
        present = torch.tensor(flags, dtype=torch.uint8, device="cpu")
        anywhere = self._operations.all_reduce(present, "max").wait().tolist()
        has = {id(p): bool(flag) for p, flag in zip(self.parameters, anywhere, strict=True)}
        for bucket, handle in zip(self._buckets, self._sent, strict=True):
            for p, values in zip(bucket, _parts(handle.wait(), bucket), strict=True):
                if p.grad is not None:
                    p.grad.copy_(values)
                elif has[id(p)]:
                    p.grad = values.clone(memory_format=torch.contiguous_format)

    def _send(self) -> None:
        bucket = self._buckets[len(self._sent)]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        if any(gradient.layout is not torch.strided for gradient in gradients):
            raise UsageError("a gradient is sparse, and only dense ones can be summed; use sparse=False")
        with torch.no_grad():
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self._sent.append(self._operations.all_reduce(flat, self._op))


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _buckets(tensors: Sequence[torch.Tensor], limit: int) -> list[list[torch.Tensor]]:
    """Divide tensors, in order, into runs of one dtype and device with at most `limit` bytes."""
    buckets: list[list[torch.Tensor]] = []
    size = 0
    for tensor in tensors:
        last = buckets[-1][0] if buckets else None
        same = last is not None and (last.dtype, last.device) == (tensor.dtype, tensor.device)
        if not same or size + tensor.nbytes > limit:
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += tensor.nbytes
    return buckets


def _parts(flat: torch.Tensor, bucket: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = flat.split([tensor.numel() for tensor in bucket])
    return [part.view(tensor.shape) for part, tensor in zip(parts, bucket, strict=True)]


def _check_described(tensors: Mapping[str, torch.Tensor], communicator: Communicator) -> None:
    """Raise ModelMismatch on every process if the tensors of the ranks do not match."""
    mine = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}
    for rank, other in enumerate(everybody := communicator.all_gather_objects(mine)):
        first = everybody[0]
        if list(other) != list(first):
            names = sorted(set(first) ^ set(other)) or list(other)
            raise ModelMismatch(f"the model of rank {rank} differs from that of rank 0: {_joined(names[:5])}")
        for name in first:
            if first[name] != other[name]:
                raise ModelMismatch(f"{name} is {other[name]} on rank {rank}, but {first[name]} on rank 0")


def _digest(tensor: torch.Tensor) -> bytes:
    content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(content.numpy().tobytes(), digest_size=16).digest()


def _joined(items: Sequence[object]) -> str:
    return ", ".join(map(str, items))
