"""What `elastic_ps.collectives` refuses, and what it does in a process that is alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_ps import collectives
from elastic_ps.collectives.backend import Pending, Reduction
from elastic_ps.collectives.over_torch import TorchGroup
from elastic_ps.contract import env
from elastic_ps.errors import UsageError
from tests.testing import machine


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[collectives.Communicator]:
    for name in (*env.RANKS, "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch sets one with its first group
    yield collectives.world()
    dist.destroy_process_group()


def test_a_process_that_nobody_has_started_with_others_is_alone(alone: collectives.Communicator) -> None:
    assert (alone.rank, alone.size) == (0, 1)
    tensor = torch.arange(3.0)
    assert alone.all_reduce(tensor, "mean").tolist() == [0, 1, 2]
    assert alone.all_gather(tensor).shape == (1, 3)
    assert alone.all_gather_objects("x") == ["x"]
    assert collectives.world().size == collectives.of_group().size == 1, "there is a group now"


def test_the_default_device_is_not_for_what_travels(alone: collectives.Communicator) -> None:
    """`meta` stands in for a GPU that the group's library cannot reach."""
    model = torch.nn.Linear(2, 1)
    model(torch.ones(2)).backward()
    with torch.device("meta"):
        assert alone.all_gather_objects("x") == ["x"]
        assert alone.broadcast_object("x") == "x"
        collectives.synchronize_gradients(model, alone)
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1, 1]]


@pytest.mark.usefixtures("alone")
def test_hooks_on_two_threads_send_each_bucket_once() -> None:
    """Autograd has a thread for each device. The second one comes while the first one sends a bucket."""
    one, two = (torch.nn.Linear(size, 1, bias=False) for size in (1, 2))
    second = threading.Thread(target=lambda: one(torch.ones(1)).backward(), daemon=True)
    sent: list[int] = []

    class Slow(TorchGroup):
        def all_reduce(self, buffer: torch.Tensor, reduction: Reduction) -> Pending:
            sent.append(buffer.numel())
            if len(sent) == 1:
                second.start()
                second.join(0.2)  # it has ended, or waits for this one
            return super().all_reduce(buffer, reduction)

    slow = collectives.Communicator(Slow())
    with collectives.synchronized_backward(torch.nn.ModuleList([one, two]), slow, bucket=1):
        two(torch.ones(2)).backward()
        second.join(60)
    assert sent == [2, 1, 2], "the gradients of both, and which of them there are"
    assert [each.weight.grad.tolist() for each in (one, two) if each.weight.grad is not None] == [
        [[1]],
        [[1, 1]],
    ]


def test_what_is_sent_and_received_at_once_is_one_batch(
    alone: collectives.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL would make one after the other, and all would wait for what nobody has sent."""
    batches: list[list[Any]] = []

    def batch(operations: list[dist.P2POp]) -> list[Any]:
        batches.append([each.op for each in operations])
        return []

    # A public name of torch; one process has nobody to send to.
    monkeypatch.setattr(dist, "batch_isend_irecv", batch)
    given, taken = torch.ones(4, dtype=torch.uint8), torch.ones(8, dtype=torch.uint8)
    TorchGroup().send_receive(given, 0, taken, 0, 0).wait()
    assert batches == [[dist.irecv, dist.isend]]


@pytest.fixture
def nccl(alone: collectives.Communicator, monkeypatch: pytest.MonkeyPatch) -> collectives.Communicator:
    """A communicator that takes its group for one of two, with nccl alone, in a process that uses GPU 1."""
    machine.is_one_of_two(monkeypatch, "cuda:nccl")
    return collectives.of_group()


def test_a_barrier_of_gpus_blocks_this_thread(
    nccl: collectives.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own does; to wait for a sum there is to let the GPU wait for it."""

    class Work:
        waited = False

        def wait(self) -> None:
            self.waited = True

    def barrier(group: dist.ProcessGroup, *, async_op: bool, device_ids: list[int]) -> Work:
        assert async_op, "`begin` does not block"
        assert device_ids == [1]
        return work

    work = Work()
    # A public name of torch; the machine has no GPUs.
    monkeypatch.setattr(dist, "barrier", barrier)
    nccl.barrier()
    assert work.waited


@pytest.mark.parametrize(
    "call",
    [
        lambda nccl: nccl.send(torch.ones(1), 1, tag=3),
        lambda nccl: nccl.receive(torch.ones(1), 1, tag=3),
        lambda nccl: nccl.send_receive(torch.ones(1), to=1, source=1, tag=3),
        lambda nccl: nccl.send_object("x", 1, tag=3),
        lambda nccl: nccl.receive_object(1, tag=3),
    ],
)
def test_a_tag_that_nccl_would_not_look_at_is_refused(
    nccl: collectives.Communicator, call: Callable[[collectives.Communicator], Any]
) -> None:
    with pytest.raises(UsageError, match=r"tag is 3, but nccl.* has no tags"):
        call(nccl)


def test_tags_are_for_tensors_that_do_not_travel_by_nccl(
    alone: collectives.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.is_one_of_two(monkeypatch, "cpu:gloo,cuda:nccl")
    group = TorchGroup()
    assert group.has_tags(torch.device("cpu"))
    assert not group.has_tags(torch.device("cuda", 1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda world: world.broadcast(torch.ones(1), source=1), "rank is 1; expected one from 0 to 0"),
        (lambda world: world.send(torch.ones(1), 0), "rank 0 sends to, or receives from, itself"),
        (
            lambda world: world.all_reduce(torch.ones(1), "median"),
            "op is 'median'; expected one of sum",
        ),
        (lambda world: world.all_reduce(torch.ones(1, dtype=torch.int64), "mean"), "convert the tensor"),
        (lambda world: world.all_reduce(torch.ones(1, dtype=torch.bool)), r"cannot reduce torch\.bool"),
        (lambda world: world.all_reduce(torch.ones(1).to_sparse()), "takes dense tensors"),
        (lambda world: world.reduce_scatter(torch.ones(2)), r"shape \(2,\); expected \(1, \.\.\.\)"),
        (lambda world: world.scatter(None, torch.ones(2)), "rank 0 is the source, but gave None"),
        (lambda world: world.scatter(torch.ones(1, 3), torch.ones(2)), r"a part has shape \(3,\)"),
        (
            lambda world: collectives.synchronize_gradients(torch.nn.ReLU(), world),
            "ReLU has no parameters that require a gradient",
        ),
    ],
)
def test_what_cannot_work_is_refused(
    alone: collectives.Communicator, call: Callable[[collectives.Communicator], Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        call(alone)


def test_the_workers_of_a_job_have_no_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{env.PREFIX}ROLE", "worker")
    with pytest.raises(UsageError, match=r"called by a worker of a job.* with torchrun or mpirun"):
        collectives.world()


def test_a_group_has_to_be_there_first() -> None:
    with pytest.raises(UsageError, match=r"call torch\.distributed\.init_process_group"):
        collectives.of_group()


def test_a_single_process_of_a_batch_system_is_alone_without_mpi(
    alone: collectives.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist.destroy_process_group()
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert collectives.world().size == 1
