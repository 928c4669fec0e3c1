"""The benchmark of what remains of the speed under faults: its schedule, and the jobs that it measures."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from benchmarks.goodput import LASTING, schedule
from benchmarks.goodput_systems import Kind, make_job, modes


def test_the_faults_follow_from_the_seed() -> None:
    faults = schedule(7, 600.0, 3, 10.0)
    assert faults == schedule(7, 600.0, 3, 10.0)
    assert faults != schedule(8, 600.0, 3, 10.0)
    assert faults == sorted(faults)
    assert {fault.kind for fault in faults} == set(get_args(Kind))
    assert {fault.worker for fault in faults} == {0, 1, 2}
    assert all(0 < fault.at < 540 and LASTING[0] <= fault.lasting <= LASTING[1] for fault in faults)
    assert 30 < len(faults) < 80


@pytest.mark.parametrize("workers", [1, 3])
def test_each_mode_is_one_that_a_job_can_have(tmp_path: Path, workers: int) -> None:
    for consistency in modes(workers).values():
        assert make_job(tmp_path, workers, consistency).spec.worker.replicas == workers
