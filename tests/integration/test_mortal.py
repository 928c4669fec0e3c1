"""With a fixed schedule the parameters are the same to the bit, at whatever moment a process is killed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.testing.mortal import Fate, Mortals

BUCKETS = 5
"""Of the workers' model."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], torch.Tensor]:
    """The parameters for so many shards."""
    return cache(lambda shards: Mortals(tmp_path_factory.mktemp("calm"), shards=shards).run())


@pytest.mark.nightly
@pytest.mark.parametrize("shards", [1, 2])
def test_a_worker_is_killed_at_every_boundary_of_a_step(
    undisturbed: Callable[[int], torch.Tensor], tmp_path: Path, shards: int
) -> None:
    fates: list[Fate] = [("before a push", number) for number in range(BUCKETS)]
    fates += [("after its pushes", BUCKETS), ("after the commit", 0)]
    if shards > 1:  # with one shard the last push is the end of the step
        fates.insert(-1, ("after its end", 0))
    job = Mortals(tmp_path, shards=shards)
    assert torch.equal(job.run(workers=fates), undisturbed(shards))
    assert [fate for _, fate in job.deaths] == fates


@pytest.mark.nightly
def test_the_parameter_server_is_killed_while_it_writes_and_while_it_loads(
    undisturbed: Callable[[int], torch.Tensor], tmp_path: Path
) -> None:
    """Version 0 is on disk before training begins; what is half written or half loaded is not used."""
    fates: list[Fate] = [("within a file", 4), ("within a load", 0)]
    fates += [("before the manifest", 8), ("after the manifest", 12), ("within a load", 0)]
    job = Mortals(tmp_path)
    assert torch.equal(job.run(servers=fates), undisturbed(1))
    assert [fate for _, fate in job.deaths] == fates
