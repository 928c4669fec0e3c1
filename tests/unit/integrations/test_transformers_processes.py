"""A Trainer in a worker of several processes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

from elastic_ps.integrations import transformers
from tests.testing.trainers import arguments


def test_each_process_of_a_worker_has_a_gpu_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, given in {"ELASTIC_PS_JOB": "test", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, given)
    present = list[torch.device]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", present.append)
    monkeypatch.setattr(TrainingArguments, "__post_init__", TrainingArguments.__post_init__)
    spec = importlib.util.spec_from_file_location("imported_in_a_job", transformers.__file__)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    made = arguments(tmp_path, use_cpu=False)
    own = torch.device("cuda", 1)
    assert made.device == made.distributed_state.device == present[-1] == own
    assert (made.n_gpu, made.train_batch_size) == (1, made.per_device_train_batch_size)
