"""Three processes check each operation of `elastic_ps.collectives` together, and write down what fails.

Every function `check_...` is called by all of them, in order. After one that fails nothing more is called,
since the processes are not at the same operation any more.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from elastic_ps import collectives
from elastic_ps.contract import env
from elastic_ps.errors import CollectiveFailed, ModelMismatch, UsageError
from examples.ring_all_reduce import ring
from tests.testing.polling import eventually

SIZE = 3
PATIENCE = timedelta(seconds=120)
"""How long an operation waits for the others; it only ends one that has failed."""
MPI = env.started_by_mpirun()
"""Whether mpirun has started this process."""
LARGE = 300_000
"""Elements that do not fit into a message that is sent at once."""


def own(world: collectives.Communicator, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Six numbers that differ from rank to rank, in a memory that is not contiguous."""
    return (torch.arange(6).reshape(2, 3) + 10 * (world.rank + 1)).to(dtype).t().contiguous().t()


def check_broadcast_gives_everybody_the_tensor_of_one(world: collectives.Communicator) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int16):
        tensor = own(world, dtype)
        assert world.broadcast(tensor, source=1) is tensor
        assert tensor.tolist() == own_of(1, dtype).tolist(), dtype


def own_of(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(6).reshape(2, 3) + 10 * (rank + 1)).to(dtype)


def check_all_reduce_is_the_sum_mean_or_extreme_of_all(world: collectives.Communicator) -> None:
    everybody = torch.stack([own_of(rank) for rank in range(SIZE)])
    expected = {
        "sum": everybody.sum(0),
        "mean": everybody.mean(0),
        "min": everybody.amin(0),
        "max": everybody.amax(0),
        "product": everybody.prod(0),
    }
    for op, result in expected.items():
        tensor = own(world)
        assert world.all_reduce(tensor, op) is tensor  # type: ignore[arg-type]
        torch.testing.assert_close(tensor, result)
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8):
        assert world.all_reduce(own(world, dtype)).tolist() == everybody.sum(0).tolist(), dtype


def check_a_parameter_can_be_reduced(world: collectives.Communicator) -> None:
    parameter = torch.nn.Parameter(torch.full((2,), float(world.rank)))
    world.all_reduce(parameter)
    assert parameter.tolist() == [3.0, 3.0]


def check_reduce_changes_one_tensor_only(world: collectives.Communicator) -> None:
    for make in (own, lambda world: own(world).contiguous()):
        tensor = make(world)
        world.reduce(tensor, "mean", to=2)
        expected = own_of(1) if world.rank == 2 else own_of(world.rank)
        assert tensor.tolist() == expected.tolist()


def check_gathering_keeps_the_order_of_ranks(world: collectives.Communicator) -> None:
    expected = [own_of(rank, torch.bfloat16).tolist() for rank in range(SIZE)]
    assert world.all_gather(own(world, torch.bfloat16)).tolist() == expected
    gathered = world.gather(own(world, torch.bfloat16), to=1)
    assert (gathered.tolist() if gathered is not None else None) == (expected if world.rank == 1 else None)


def check_scattered_parts(world: collectives.Communicator) -> None:
    parts = torch.arange(12.0).reshape(SIZE, 4)
    out = torch.zeros(4)
    assert world.scatter(parts if world.rank == 0 else None, out) is out
    assert out.tolist() == parts[world.rank].tolist()
    assert world.reduce_scatter(parts, "sum").tolist() == (3 * parts[world.rank]).tolist()
    ours = parts + world.rank
    product = parts * (parts + 1) * (parts + 2)
    reductions: list[tuple[collectives.Op, torch.Tensor]] = [("min", parts), ("max", parts + 2)]
    for op, expected in [*reductions, ("product", product)]:
        handle = world.begin.reduce_scatter(ours, op)
        eventually(handle.done, "it is done without a wait")
        assert handle.wait().tolist() == expected[world.rank].tolist()
    half = world.reduce_scatter(parts.to(torch.bfloat16), "mean")
    assert (half.dtype, half.tolist()) == (torch.bfloat16, parts[world.rank].tolist())


def check_messages_of_two_tags_do_not_mix(world: collectives.Communicator) -> None:
    if world.rank == 0:
        world.send(torch.ones(LARGE), 1, tag=1)
        world.send(torch.zeros(2, dtype=torch.bool), 1, tag=2)
    if world.rank == 1:
        second = world.begin.receive(torch.ones(2, dtype=torch.bool), 0, tag=2)
        assert world.receive(torch.zeros(LARGE), 0, tag=1).sum() == LARGE
        assert not second.wait().any()


def check_everybody_passes_a_large_tensor_on(world: collectives.Communicator) -> None:
    tensor = torch.full((LARGE,), float(world.rank))
    after, before = (world.rank + 1) % SIZE, (world.rank - 1) % SIZE
    assert world.send_receive(tensor, to=after, source=before) is tensor
    assert set(tensor.tolist()) == {float(before)}
    more = torch.zeros(before + 1, dtype=torch.float64)
    handle = world.begin.send_receive(own(world), to=after, source=before, into=torch.zeros(2, 3), tag=1)
    counted = torch.ones(world.rank + 1, dtype=torch.float64)
    assert world.send_receive(counted, to=after, source=before, into=more) is more
    assert more.tolist() == [1.0] * (before + 1)
    assert handle.wait().tolist() == own_of(before).tolist()


def check_operations_begin_without_waiting(world: collectives.Communicator) -> None:
    """Rank 0 begins both long before it looks at the first; the others look in another order."""
    first = world.begin.all_reduce(torch.full((LARGE,), 1.0))
    second = world.begin.all_gather(torch.tensor(world.rank))
    handles = (first, second) if world.rank == 0 else (second, first)
    for handle in handles:
        handle.wait()
        assert handle.done()
    assert first.wait().sum() == SIZE * LARGE
    assert second.wait().tolist() == [0, 1, 2]


def check_a_handle_may_be_dropped(world: collectives.Communicator) -> None:
    if world.rank == 0:
        for number in range(5):
            world.begin.send(torch.full((LARGE,), float(number)), 1)
    if world.rank == 1:
        for number in range(5):
            assert world.receive(torch.zeros(LARGE), 0).mean() == number
    world.barrier()


def check_barrier_waits_for_the_last(world: collectives.Communicator) -> None:
    if world.rank == 0:
        barrier = world.begin.barrier()
        assert not barrier.done(), "rank 1 has not called it"
        world.send_object("go on", 1)
        barrier.wait()
    elif world.rank == 1:
        assert world.receive_object(0) == "go on"
        world.barrier()
    else:
        world.barrier()


def check_objects_of_different_sizes(world: collectives.Communicator) -> None:
    item = {"rank": world.rank, "text": "x" * world.rank * 1000}
    everybody = [{"rank": rank, "text": "x" * rank * 1000} for rank in range(SIZE)]
    assert world.all_gather_objects(item) == everybody
    assert world.gather_objects(item, to=2) == (everybody if world.rank == 2 else None)
    assert world.broadcast_object(item, source=1) == everybody[1]
    all_gathered, gathered = world.begin.all_gather_objects(item), world.begin.gather_objects(item)
    told = world.begin.broadcast_object(item if world.rank == 2 else None, source=2)
    assert told.wait() == everybody[2]
    assert gathered.wait() == (everybody if world.rank == 0 else None)
    assert all_gathered.wait() == everybody


def check_objects_arrive_in_the_order_in_which_they_were_sent(world: collectives.Communicator) -> None:
    if world.rank == 0:
        sent = [world.begin.send_object(["x" * size], 1, tag=7) for size in (10, LARGE, 1)]
        for handle in sent:
            handle.wait()
    if world.rank == 1:
        received = [world.begin.receive_object(0, tag=7) for _ in range(3)]
        assert [len(handle.wait()[0]) for handle in reversed(received)] == [1, LARGE, 10]


def check_split_makes_a_communicator_for_each_key(world: collectives.Communicator) -> None:
    part = world.split("even" if world.rank % 2 == 0 else "odd")
    assert part is not None
    assert (part.rank, part.size) == (world.rank // 2, 2 if world.rank % 2 == 0 else 1)
    members = part.all_gather(torch.tensor(world.rank)).tolist()
    assert members == ([0, 2] if world.rank % 2 == 0 else [1])
    assert part.broadcast(torch.tensor(world.rank), source=part.size - 1) == members[-1]
    again = world.split((1, None) if world.rank else None)
    assert (again is None) == (world.rank == 0)
    if again is not None:
        assert again.all_gather(torch.tensor(world.rank)).tolist() == [1, 2]
        again.close()
    if MPI:
        smaller = part.split(0)
        assert smaller is not None
        assert smaller.size == part.size
    else:
        with pytest.raises(UsageError, match=r"only a communicator of all processes"):
            part.split(0)
    part.close()


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
    )


def check_parameters_become_those_of_one(world: collectives.Communicator) -> None:
    replica = model(seed=world.rank)
    with pytest.raises(ModelMismatch, match=r"0\.weight \(ranks 1, 2\)"):
        collectives.check_replicas(replica, world)
    collectives.synchronize_parameters(replica, world, source=2)
    expected = model(seed=2).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in replica.state_dict().items())
    collectives.check_replicas(replica, world)
    if world.rank == 1:
        with torch.no_grad():
            replica.get_buffer("1.running_mean")[3] += 1e-7
    with pytest.raises(ModelMismatch, match=r"1 of 11 tensors .*: 1\.running_mean \(ranks 1\)"):
        collectives.check_replicas(replica, world)


def check_models_that_do_not_fit_are_named(world: collectives.Communicator) -> None:
    replica = torch.nn.Linear(4, 3 if world.rank == 1 else 2)
    with pytest.raises(ModelMismatch, match=r"weight is .*3, 4.* on rank 1, but .*2, 4.* on rank 0"):
        collectives.synchronize_parameters(replica, world)
    other = torch.nn.Linear(4, 2, bias=world.rank != 2)
    with pytest.raises(ModelMismatch, match="the model of rank 2 differs from that of rank 0: bias"):
        collectives.check_replicas(other, world)


def check_gradients_are_those_of_the_whole_batch(world: collectives.Communicator) -> None:
    """As in one process; also during backward, with accumulation, and with a layer that is not used."""
    batch = torch.randn(6 * SIZE, 4, generator=torch.Generator().manual_seed(1))
    own_part = batch[world.rank :: SIZE]
    for bucket in (1, 200, 1 << 20):
        alone, after, during, accumulated = (plain() for _ in range(4))
        loss_of(alone, batch).backward()
        loss_of(after, own_part).backward()
        collectives.synchronize_gradients(after, world)
        with collectives.synchronized_backward(during, world, bucket=bucket):
            loss_of(during, own_part).backward()
        (loss_of(accumulated, own_part[:3]) / 2).backward()
        with collectives.synchronized_backward(accumulated, world, bucket=bucket):
            (loss_of(accumulated, own_part[3:]) / 2).backward()
        for replica in (after, during, accumulated):
            for (name, parameter), expected in zip(
                replica.named_parameters(), alone.parameters(), strict=True
            ):
                assert (parameter.grad is None) == (expected.grad is None), name
                if parameter.grad is not None:
                    torch.testing.assert_close(parameter.grad, expected.grad, msg=name)


def plain() -> torch.nn.Module:
    """A model of which a layer has no gradient, and another one is frozen."""
    torch.manual_seed(3)
    made = torch.nn.ModuleDict(
        {"in": torch.nn.Linear(4, 8), "unused": torch.nn.Linear(8, 8), "out": torch.nn.Linear(8, 1)}
    )
    made["frozen"] = torch.nn.Linear(8, 8).requires_grad_(False)
    return made


def loss_of(replica: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    assert isinstance(replica, torch.nn.ModuleDict)
    loss = replica["out"](replica["frozen"](torch.tanh(replica["in"](batch)))).square().mean()
    assert isinstance(loss, torch.Tensor)
    return loss


def check_a_gradient_that_some_lack_counts_as_zero(world: collectives.Communicator) -> None:
    replica = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in range(2)])
    with collectives.synchronized_backward(replica, world, op="sum", bucket=1):
        replica[world.rank % 2](torch.ones(1)).backward()
    assert [p.grad.item() for p in replica.parameters() if p.grad is not None] == [2.0, 1.0]


def check_two_backward_calls_are_refused(world: collectives.Communicator) -> None:
    replica = torch.nn.Linear(1, 1)
    with collectives.synchronized_backward(replica, world):
        replica(torch.ones(1)).backward()
        with pytest.raises(UsageError, match="ran twice"):
            replica(torch.ones(1)).backward()


def check_the_ring_of_the_example(world: collectives.Communicator) -> None:
    for shape in ((LARGE,), (2, 2), (1,)):
        tensor = torch.randn(shape, generator=torch.Generator().manual_seed(world.rank))
        expected = world.all_reduce(tensor.clone())
        ring.ring_all_reduce(tensor, world)
        torch.testing.assert_close(tensor, expected)


def check_a_process_outside_of_a_communicator_is_told(world: collectives.Communicator) -> None:
    if MPI:
        from mpi4py import MPI as mpi

        with pytest.raises(UsageError, match=r"of_mpi got MPI\.COMM_NULL"):
            collectives.of_mpi(mpi.COMM_NULL)


def check_who_ends_makes_the_others_fail(world: collectives.Communicator) -> None:
    """The last one. Under mpirun all processes would be ended."""
    if MPI or world.rank == 2:
        return

    def go_on() -> None:
        while True:
            world.all_reduce(torch.ones(10))

    with pytest.raises(CollectiveFailed, match=r"all_reduce on rank [01] of 3 has failed: .*fixed"):
        go_on()


def main(directory: Path) -> None:
    """Call all checks; what becomes of each is in `RANK.json` of the directory."""
    world = collectives.world(timeout=PATIENCE)
    assert world.size == SIZE
    found: dict[str, str] = {}
    try:
        for name, check in list(globals().items()):
            if name.startswith("check_"):
                try:
                    check(world)
                except BaseException:
                    found[name] = traceback.format_exc()
                    raise
                found[name] = ""
    finally:
        (directory / f"{world.rank}.json").write_text(json.dumps(found))
        sys.stdout.flush()
        os._exit(any(found.values()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
