"""A Trainer in a worker of several processes."""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import Trainer

from elastic_ps.errors import UsageError
from elastic_ps.integrations.transformers import prepare_trainer
from elastic_ps.worker.session import Session
from tests.testing.harness import running_job
from tests.testing.trainers import BATCH, IN_ORDER, Records, TokenNet, arguments, assert_same_model, make


def test_each_process_of_a_worker_has_a_gpu_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, given in {"ELASTIC_PS_JOB": "test", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, given)
    present = list[torch.device]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", present.append)
    made = arguments(tmp_path, use_cpu=False)
    own = torch.device("cuda", 1)
    assert made.device == made.distributed_state.device == present[-1] == own
    assert (made.n_gpu, made.train_batch_size) == (1, made.per_device_train_batch_size)


class SliceUnlabelled(Records):
    """Each second record of most batches has no label that counts, and no record of the third batch has."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x, y = super().__getitem__(index).values()
        none = index % BATCH >= BATCH // 2 or index // BATCH == 2
        return {"x": x, "labels": torch.full_like(y, -100) if none else y}


def test_a_slice_without_labels_does_not_count(tmp_path: Path) -> None:
    """Process 1 has no label in any batch, and process 0 none in the third one."""
    options: dict[str, Any] = {"eval_strategy": "no", "num_train_epochs": 1}
    options["lr_scheduler_type"] = "constant"
    trainers, lock = dict[int, Any](), threading.Lock()

    def script(session: Session, rank: int) -> None:
        with lock:  # the processes are threads, which share torch's seed
            trainer = Trainer(TokenNet(), arguments(tmp_path, **options), train_dataset=SliceUnlabelled(16))
            trainers[rank] = prepare_trainer(trainer, session=session)
        trainer.train()

    with running_job(tmp_path / "job", data=IN_ORDER, worker={"processes": 2}) as job:
        job.start_processes(0, script)
        job.join()
        progress = job.status().progress
        assert math.isfinite(progress.loss)
        assert (progress.records_applied, progress.records_skipped) == (3 * BATCH, BATCH)
    labelled = torch.utils.data.Subset(SliceUnlabelled(16), [*range(2 * BATCH), *range(3 * BATCH, 4 * BATCH)])
    alone = Trainer(TokenNet(), arguments(tmp_path, **options), train_dataset=labelled)
    alone.train()
    for trainer in trainers.values():
        assert_same_model(trainer, alone)


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "WORLD_SIZE"])
def test_ranks_of_another_launcher_are_refused(tmp_path: Path, name: str) -> None:
    restored = mock.patch.dict(os.environ, {name: "2"})  # accelerate sets other variables, too
    with restored, pytest.raises(UsageError, match="elastic-ps run SCRIPT --workers N"):
        prepare_trainer(make(tmp_path))
