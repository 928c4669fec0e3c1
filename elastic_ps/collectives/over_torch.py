"""The operations of a process group of torch.distributed, with any backend (gloo, nccl, ...)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elastic_ps.collectives.backend import Backend, Both, Pending, Reduction
from elastic_ps.errors import UsageError

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""From torch 2.13 on these are the names, and the old ones warn."""


class _Work:
    """A `torch.distributed.Work`; None if this process takes no part."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()

    def done(self) -> bool:
        return self._work is None or bool(self._work.is_completed())


class _Part(_Work):
    """An all-reduce whose result this process needs a part of."""

    def __init__(self, work: Any, part: torch.Tensor, out: torch.Tensor) -> None:
        super().__init__(work)
        self._part, self._out = part, out

    def wait(self) -> None:
        super().wait()
        self._out.copy_(self._part)


class TorchGroup(Backend):
    """A process group.

    Args:
        group: None is the default group.
        timeout: the timeout of groups that are split off; None is torch's default.
        owned: whether `close` destroys the group.
    """

    name = "torch.distributed"
    reducible = frozenset(
        {
            *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
            *(torch.uint8, torch.int8, torch.int32, torch.int64),
        }
    )

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, timeout: timedelta | None = None, owned: bool = False
    ) -> None:
        self._group = group if group is not None else dist.group.WORLD
        self._whole = self._group is dist.group.WORLD
        self._timeout = timeout
        self._owned = owned
        self.rank = dist.get_rank(self._group)
        self.size = dist.get_world_size(self._group)
        self._config = str(dist.get_backend_config(self._group))

    def device(self, wanted: torch.device) -> torch.device:
        only_cuda = "nccl" in self._config and "cpu" not in self._config
        return torch.device("cuda", torch.cuda.current_device()) if only_cuda else wanted

    def has_tags(self, device: torch.device) -> bool:
        return not (device.type == "cuda" and "cuda:nccl" in self._config)

    def _global(self, rank: int) -> int:
        if self._whole or self._group is None:
            return rank
        return dist.get_global_rank(self._group, rank)

    def broadcast(self, buffer: torch.Tensor, source: int) -> Pending:
        return _Work(dist.broadcast(buffer, self._global(source), group=self._group, async_op=True))

    def all_reduce(self, buffer: torch.Tensor, reduction: Reduction) -> Pending:
        return _Work(dist.all_reduce(buffer, _OPS[reduction], group=self._group, async_op=True))

    def reduce(self, buffer: torch.Tensor, reduction: Reduction, to: int) -> Pending:
        root = self._global(to)
        return _Work(dist.reduce(buffer, root, _OPS[reduction], group=self._group, async_op=True))

    def reduce_scatter(self, parts: torch.Tensor, out: torch.Tensor, reduction: Reduction) -> Pending:
        op = _OPS[reduction]
        if not self.has_tags(parts.device):  # NCCL
            return _Work(_reduce_scatter(out, parts, op, group=self._group, async_op=True))
        # As gloo does it. Some versions of torch add up whatever `op` is, and never say that it is done.
        whole = parts.clone()
        work = dist.all_reduce(whole, op, group=self._group, async_op=True)
        first = self.rank * out.numel()
        return _Part(work, whole.view(-1)[first : first + out.numel()].view_as(out), out)

    def all_gather(self, buffer: torch.Tensor, out: torch.Tensor) -> Pending:
        return _Work(_all_gather(out, buffer, group=self._group, async_op=True))

    def gather(self, buffer: torch.Tensor, out: torch.Tensor | None, to: int) -> Pending:
        places = None if out is None else list(out.view(self.size, -1))
        return _Work(dist.gather(buffer, places, self._global(to), group=self._group, async_op=True))

    def scatter(self, parts: torch.Tensor | None, out: torch.Tensor, source: int) -> Pending:
        places = None if parts is None else list(parts.view(self.size, -1))
        return _Work(dist.scatter(out, places, self._global(source), group=self._group, async_op=True))

    def send(self, buffer: torch.Tensor, to: int, tag: int) -> Pending:
        return _Work(dist.isend(buffer, self._global(to), group=self._group, tag=tag))

    def receive(self, buffer: torch.Tensor, source: int, tag: int) -> Pending:
        return _Work(dist.irecv(buffer, self._global(source), group=self._group, tag=tag))

    def send_receive(
        self, given: torch.Tensor, to: int, taken: torch.Tensor, source: int, tag: int
    ) -> Pending:
        # NCCL runs the operations of a stream in order: all would receive, and nobody send.
        receiving = dist.P2POp(dist.irecv, taken, self._global(source), self._group, tag)
        sending = dist.P2POp(dist.isend, given, self._global(to), self._group, tag)
        return Both(*map(_Work, dist.batch_isend_irecv([receiving, sending])))

    def barrier(self) -> Pending:
        here = self.device(torch.device("cpu"))
        if here.type == "cuda":  # a sum blocks the GPU's next operations of this thread, not the thread
            return _Work(dist.barrier(self._group, async_op=True, device_ids=[here.index]))
        return self.all_reduce(torch.zeros(1, device=here), "sum")

    def split(self, groups: Sequence[Sequence[int]], own: int | None) -> Backend | None:
        if not self._whole:
            raise UsageError(
                "over torch.distributed, only a communicator of all processes can be split, because all have "
                "to make a new group together. Split that one, by a pair of keys: world.split((key, other))"
            )
        made = [dist.new_group(list(ranks), timeout=self._timeout, backend=self._config) for ranks in groups]
        if own is None:
            return None
        return TorchGroup(made[own], timeout=self._timeout, owned=True)

    def close(self) -> None:
        if self._owned:
            self._owned = False
            dist.destroy_process_group(self._group)
