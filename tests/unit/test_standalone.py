"""What a script that runs alone takes over from a job."""

from __future__ import annotations

from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.standalone import alone


def test_only_processes_and_checkpoints_of_the_server_are_left_out() -> None:
    server = {"replicas": 2, "durability": "standby", "checkpoint": {"path": "/tmp"}}
    kept = {"overlap": "never", "tensorBytes": 1 << 31, "bucketBytes": 4096, "optimizers": ["my:Own"]}
    given = TrainingJobSpec.model_validate({"entrypoint": "a:b", "parameterServer": server | kept})
    left = alone(given).parameter_server.model_dump(by_alias=True, exclude_defaults=True)
    assert left == kept
