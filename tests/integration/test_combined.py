"""Features that are each tested by themselves, together in one job."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.data.shuffle import permutation
from elastic_ps.drill.history import Data, check
from elastic_ps.drill.recorded import read
from elastic_ps.worker.session import Session
from tests.integration.test_global_batch import check_sets, difference
from tests.integration.test_unreliable import Network, Unreliable
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.oracle import mse
from tests.testing.polling import eventually
from tests.testing.tiers import per_change
from tests.testing.trained import sgd

LIMIT = 0.8
Models = dict[tuple[int, int], torch.nn.Module]


def clipped(data: Numbers, *, size: int) -> tuple[torch.nn.Module, list[float]]:
    """What plain torch makes of the data in batches of `size`, in the order of the job; and the norms."""
    model = make_mlp()
    optimizer, norms = sgd(model), []
    for batch in torch.tensor(permutation(len(data), 0, shuffle=True, seed=0)[:]).split(size):
        optimizer.zero_grad()
        mse(model, data.x[batch], data.y[batch]).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)))
        optimizer.step()
    return model, norms


@pytest.mark.parametrize("bucket_bytes", [1024, 1 << 20])
def test_versions_of_a_constant_size_from_slices_of_portions_while_workers_pause(
    tmp_path: Path, bucket_bytes: int
) -> None:
    """Some batches have fewer records than there are processes. The result is that of one process."""
    data, models, size = Numbers(230), Models(), 11

    def script(session: Session, rank: int) -> None:
        model = make_mlp(seed=rank)
        optimizer = session.optimizer(sgd(model), model, max_grad_norm=LIMIT)
        for step, (x, y) in enumerate(session.loader(data, 5)):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            if step % 5 == session.worker + 1:
                session.pause()
        models[session.worker, rank] = model

    with running_job(
        tmp_path,
        worker={"processes": 3, "replicas": 2},
        consistency={"globalBatchSize": size, "balance": "speed"},
        compression={"codec": "auto", "maxError": 0},
        parameterServer={"bucketBytes": bucket_bytes},
    ) as job:
        for worker in range(2):
            job.start_processes(worker, script)
        job.join()
        commits = job.commits()
    check_sets(commits, records=len(data), size=size, epochs=1)
    alike, norms = clipped(data, size=size)
    assert min(norms) < LIMIT < max(norms), "some gradients are clipped, others are not"
    assert len(models) == 6
    for model in models.values():
        assert difference(model, alike) < 2e-6


Z = {"codec": "topk", "values": "int8"}
LOCAL = {"mode": "local", "steps": 4, "fragments": 2}
TWO = {"replicas": 2, "processes": 2}
CASES: dict[str, dict[str, Any]] = {
    "deltas of a worker's processes, and other modes": {
        "worker": TWO,
        "compression": {"codec": "auto", "maxError": 0.5, "values": "topk"},
        "changes": [{"mode": "accumulate", "gradients": 3}, {"mode": "async", "reads": "inconsistent"}, {}],
    },
    "deltas in drafts, standbys, and other modes": {
        "compression": Z,
        "parameterServer": {"replicas": 2, "durability": "standby"},
        "changes": [{"backupWorkers": 1}, {"mode": "bounded", "maxStaleness": 2}, {}],
    },
    "deltas of fragments, a quorum, and fewer steps": {
        "compression": Z,
        "consistency": {**LOCAL, "quorum": 1, "grace": "0s"},
        "changes": [{**LOCAL, "quorum": 1, "grace": "0s", "steps": 2}],
    },
    "deltas of fragments, a standby, and more steps": {
        "compression": Z,
        "consistency": LOCAL,
        "parameterServer": {"durability": "standby"},
        "changes": [{**LOCAL, "steps": 8}],
    },
}


@pytest.mark.parametrize("name", per_change(CASES, keep=[*CASES][2:3]))
def test_nothing_is_lost_and_all_workers_have_the_same_values(tmp_path: Path, name: str) -> None:
    """Over a network that loses messages; a worker pauses, and shard 0 is lost after the last change."""
    case = CASES[name].copy()
    changes = list(enumerate(case.pop("changes"), 1))
    data, models, network, restarted = Numbers(600), Models(), Network(1, 0.05), threading.Event()
    due = [4]

    def script(session: Session, rank: int) -> None:
        model, first = make_mlp(), (session.worker, rank) == (0, 0)
        optimizer = session.optimizer(sgd(model), model)
        for step, (x, y) in enumerate(session.loader(data, 4)):
            if first and session.version >= due[0]:
                if changes:
                    generation, wanted = changes.pop(0)
                    job.change(generation, **wanted)
                    eventually(lambda: job.changed(generation), f"change {generation} is in force")  # noqa: B023 (at once)
                elif not restarted.is_set():
                    job.restart(0)
                    restarted.set()
                due[0] = job.version + 4
            if (session.worker, rank) == (1, 0):  # else no records might be left for what is due
                eventually(lambda: restarted.is_set() or session.version < due[0] + 4, "it is done")
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            if session.worker == 1 and step % 7 == 3:
                session.pause()
        models[session.worker, rank] = model

    server = {"bucketBytes": 1024, "checkpoint": {"everyVersions": 3}, **case.pop("parameterServer", {})}
    with running_job(
        tmp_path,
        checkpoints=tmp_path / "checkpoints",
        data={"shardRecords": 8},
        parameterServer=server,
        **{"worker": {"replicas": 2}, **case},
    ) as job:
        reliable = job.open_connections
        job.open_connections = lambda: [Unreliable(inner, network) for inner in reliable()]
        for worker in range(2):
            job.start_processes(worker, script)
        job.join()
        for timer in network.later:
            timer.join()
        assert job.status().progress.records_applied == len(data)
    assert not changes
    assert restarted.is_set()
    assert check(read(job.history), Data(len(data), 1), max_staleness=float("inf")) == []
    last, *others = models.values()
    for model in others:
        for ours, theirs in zip(model.parameters(), last.parameters(), strict=True):
            assert torch.equal(ours, theirs)
