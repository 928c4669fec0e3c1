"""Ring all-reduce, written with sends and receives only.

`torchrun --nproc-per-node 3 examples/ring_all_reduce/ring.py`, or `mpirun -n 3 python -m mpi4py
examples/ring_all_reduce/ring.py`. Each of n processes sends 2 (n - 1) / n times its tensor: less than twice,
however many there are. For real work use `all_reduce`, which is faster.

The algorithm: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009.
"""

from __future__ import annotations

import torch

from elastic_ps import collectives


def ring_all_reduce(tensor: torch.Tensor, world: collectives.Communicator) -> None:
    """Replace everybody's tensor, in place, by the sum of all. Blocks.

    The tensor is divided into as many parts as there are processes. In the first half, each part goes once
    around the ring and collects what each process has of it; in the second half the sums go around.

    Args:
        tensor: contiguous, of any shape, the same on all processes.
    """
    rank, size = world.rank, world.size
    after, before = (rank + 1) % size, (rank - 1) % size
    parts = tensor.view(-1).tensor_split(size)
    for step in range(size - 1):
        given, taken = (rank - step) % size, (rank - step - 1) % size
        received = torch.empty_like(parts[taken])
        parts[taken].add_(world.send_receive(parts[given], to=after, source=before, into=received))
    for step in range(size - 1):
        given, taken = (rank - step + 1) % size, (rank - step) % size
        world.send_receive(parts[given], to=after, source=before, into=parts[taken])


def main() -> None:
    """Sum random numbers both ways, and compare."""
    world = collectives.world()
    tensor = torch.randn(1000, 7, generator=torch.Generator().manual_seed(world.rank))
    expected = world.all_reduce(tensor.clone())
    ring_all_reduce(tensor, world)
    torch.testing.assert_close(tensor, expected)
    if world.rank == 0:
        print(f"{world.size} processes have summed {tensor.numel()} numbers around a ring")


if __name__ == "__main__":
    main()
