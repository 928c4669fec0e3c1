"""What a process writes about itself costs it nothing else."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import pytest
import torch

from elastic_ps.process.telemetry import Trace
from elastic_ps.worker.wire.measuring import Phases


def test_a_full_disk_ends_the_trace_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / f"full-{os.getpid()}.jsonl").symlink_to("/dev/full")
    trace = Trace(tmp_path, "full")
    for _ in range(2):
        with trace.span("step"):
            pass
    assert not trace.enabled
    assert [record.message for record in caplog.records] == [
        "the trace of this process ends here: [Errno 28] No space left on device"
    ]


def test_a_model_whose_phases_are_traced_can_be_copied(tmp_path: Path) -> None:
    trace = Trace(tmp_path, "whole")
    model = torch.nn.Linear(2, 1)
    Phases(trace).watch(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(torch.ones(2))
        assert torch.equal(other.weight, model.weight)
    assert trace.enabled
    trace.close()
