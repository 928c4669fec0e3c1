"""With a fixed schedule a job's final parameters are the same to the bit, whatever dies on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.worker.session import Session
from tests.testing.harness import Job, Numbers, make_mlp, running_job
from tests.testing.polling import eventually
from tests.testing.tiers import per_change
from tests.testing.transports import whole_jobs

WORKERS, EPOCHS, RECORDS, BATCH = 3, 9, 60, 4


def final_parameters(
    tmp_path: Path,
    disturb: Callable[[Job], None] | None = None,
    *,
    shards: int = 1,
    optimizer: str = "SGD",
    late: int | None = None,
    server: dict[str, Any] | None = None,
    compression: dict[str, Any] | None = None,
    transport: str = "inproc",
) -> torch.Tensor:
    """The parameters at the end of a job of three workers, disturbed while it runs.

    Worker `late` computes for longer than the others, so that its contributions are the last to come.
    """
    finals: dict[int, torch.Tensor] = {}

    def script(session: Session) -> None:
        model = make_mlp(seed=session.worker)
        options: dict[str, Any] = {"momentum": 0.9} if optimizer == "SGD" else {}
        wrapped = getattr(torch.optim, optimizer)(model.parameters(), lr=0.05, **options)
        stepper = session.optimizer(wrapped, model)
        session.scheduler(torch.optim.lr_scheduler.ExponentialLR(stepper, 0.99), interval="step")
        for x, y in session.loader(Numbers(RECORDS), batch_size=BATCH, epochs=EPOCHS):
            stepper.zero_grad()
            for _ in range(200 if session.worker == late else 0):
                model(x)
            ((model(x) - y) ** 2).mean().backward()
            stepper.step()
        finals[session.worker] = torch.cat([p.detach().flatten() for p in model.parameters()])

    with running_job(
        tmp_path,
        transport=transport,
        checkpoints=tmp_path / "checkpoints",
        consistency={"deterministic": True},
        worker={"replicas": WORKERS},
        data={"shardRecords": 8},
        parameterServer={
            "replicas": shards,
            "bucketBytes": 1024,
            "checkpoint": {"interval": "20ms", "keep": 2},
            **(server or {}),
        },
        compression=compression or {},
    ) as job:
        job.start(0, script)
        eventually(lambda: bool(job.status().ready), "worker 0 brings the model")
        for worker in range(1, WORKERS):
            job.start(worker, script)
        if disturb is not None:
            disturb(job)
        job.join()
        assert job.status().progress.records_applied == RECORDS * EPOCHS
    assert len(finals) == WORKERS
    assert all(torch.equal(finals[0], other) for other in finals.values())
    return finals[0]


def _at_version(job: Job, version: int) -> None:
    eventually(lambda: job.version >= version, f"version {version}")


Undisturbed = Callable[[int, str], torch.Tensor]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The parameters for so many shards, and this optimizer."""
    return cache(
        lambda shards, optimizer: final_parameters(
            tmp_path_factory.mktemp("undisturbed"), shards=shards, optimizer=optimizer
        )
    )


@pytest.mark.nightly
def test_two_runs_agree(undisturbed: Undisturbed, tmp_path: Path) -> None:
    assert torch.equal(final_parameters(tmp_path), undisturbed(1, "SGD"))


@whole_jobs
def test_every_transport_gives_the_same_bits(
    undisturbed: Undisturbed, tmp_path: Path, transport: str
) -> None:
    """Also over the loss of a shard."""

    def disturb(job: Job) -> None:
        _at_version(job, 9)
        job.restart(1)

    assert torch.equal(
        final_parameters(tmp_path, disturb, shards=2, transport=transport), undisturbed(2, "SGD")
    )


@pytest.mark.parametrize("late", per_change(range(WORKERS), keep=[2]))
def test_who_comes_last_does_not_matter(undisturbed: Undisturbed, tmp_path: Path, late: int) -> None:
    assert torch.equal(final_parameters(tmp_path, shards=2, late=late), undisturbed(2, "SGD"))


@pytest.mark.parametrize("version", per_change(range(1, 40, 2), keep=[21, 39]))
def test_the_parameter_server_dies(undisturbed: Undisturbed, tmp_path: Path, version: int) -> None:
    optimizer = "Adam" if version % 4 == 1 else "SGD"

    def disturb(job: Job) -> None:
        _at_version(job, version)
        job.restart(0)
        assert job.servers[0].term == 2

    assert torch.equal(final_parameters(tmp_path, disturb, optimizer=optimizer), undisturbed(1, optimizer))


@pytest.mark.parametrize("shard", per_change([0, 1], keep=[0]))
def test_one_of_two_shards_dies_and_its_standby_has_every_round(
    undisturbed: Undisturbed, tmp_path: Path, shard: int
) -> None:
    def disturb(job: Job) -> None:
        for version in (5, 20):
            _at_version(job, version)
            eventually(lambda: job.followed, "the standbys have every round")
            job.restart(shard)

    server = {"durability": "standby", "checkpoint": {"interval": "1h"}}
    assert torch.equal(final_parameters(tmp_path, disturb, shards=2, server=server), undisturbed(2, "SGD"))


@pytest.mark.parametrize("shard", per_change([0, 1], keep=[1]))
def test_one_of_two_shards_dies(undisturbed: Undisturbed, tmp_path: Path, shard: int) -> None:
    def disturb(job: Job) -> None:
        _at_version(job, 12)
        job.restart(shard)
        eventually(lambda: job.status().term == 2, "all shards go back to a checkpoint")

    assert torch.equal(final_parameters(tmp_path, disturb, shards=2), undisturbed(2, "SGD"))


def test_the_parameter_server_dies_again_and_again(undisturbed: Undisturbed, tmp_path: Path) -> None:
    def disturb(job: Job) -> None:
        for version in (5, 15, 25, 35):
            _at_version(job, version)
            job.restart(0)

    assert torch.equal(final_parameters(tmp_path, disturb), undisturbed(1, "SGD"))


@pytest.mark.nightly
@pytest.mark.parametrize("lossless", ["zstd", "blosc"])
def test_what_is_compressed_without_loss_has_the_same_bits(
    undisturbed: Undisturbed, tmp_path: Path, lossless: str
) -> None:
    def disturb(job: Job) -> None:
        _at_version(job, 9)
        job.restart(0)

    found = final_parameters(tmp_path, disturb, compression={"lossless": lossless})
    assert torch.equal(found, undisturbed(1, "SGD"))


@pytest.mark.nightly
@pytest.mark.parametrize("durability", ["checkpoint", "standby"])
def test_rounded_values_are_the_same_when_the_parameter_server_has_died(
    tmp_path: Path, durability: str
) -> None:
    """It makes them of the float32 ones, which it has from a checkpoint or its standby."""
    expected, found = with_and_without_a_loss(tmp_path, durability, {"codec": "int8", "values": "bf16"})
    assert torch.equal(expected, expected.bfloat16().float())
    assert torch.equal(found, expected)


@pytest.mark.parametrize("durability", per_change(["checkpoint", "standby"], keep=["standby"]))
@pytest.mark.parametrize("values", per_change(["int8", "topk", "changed"], keep=["topk"]))
def test_deltas_are_the_same_when_the_parameter_server_has_died(
    tmp_path: Path, durability: str, values: str
) -> None:
    """What workers have is in the checkpoint, and on the standby."""
    compression = {
        "codec": "int8",
        "values": values,
        "valuesOptions": {"ratio": 0.1} if values == "topk" else {},
    }
    expected, found = with_and_without_a_loss(tmp_path, durability, compression)
    assert torch.equal(found, expected)


def with_and_without_a_loss(
    tmp_path: Path, durability: str, compression: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The parameters at the end of two jobs, of which one loses its parameter server."""
    server = {"durability": durability, "checkpoint": {"interval": "20ms"}}

    def disturb(job: Job) -> None:
        _at_version(job, 11)
        eventually(lambda: durability != "standby" or job.followed, "the standby has every round")
        job.restart(0)

    expected = final_parameters(tmp_path / "undisturbed", compression=compression)
    found = final_parameters(tmp_path / "disturbed", disturb, server=server, compression=compression)
    return expected, found


def test_no_thread_of_a_lost_parameter_server_stays(tmp_path: Path) -> None:
    before = threading.active_count()

    def disturb(job: Job) -> None:
        _at_version(job, 3)
        job.restart(0)

    final_parameters(tmp_path, disturb)
    eventually(lambda: threading.active_count() <= before, "the threads end")
