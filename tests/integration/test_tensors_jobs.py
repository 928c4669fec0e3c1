"""Jobs of real processes whose scripts use `session.server` and nothing else."""

from __future__ import annotations

import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.api.job import TrainingJob, load_job, parse_job
from elastic_ps.contract.schemes import Scheme
from elastic_ps.local import Launcher, Options
from elastic_ps.local.poller import fetch_status
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.launching import forks, wait_for_end
from tests.testing.oracle import mse
from tests.testing.polling import eventually
from tests.testing.scripts import last_pushes
from tests.testing.tiers import per_change

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "guides" / "tensors.md").read_text()


def job(script: str, *, bucket_bytes: int = 1024, **arguments: Any) -> TrainingJob:
    spec = {
        "entrypoint": f"tests.testing.scripts.{script}:main",
        "arguments": arguments,
        "parameterServer": {"replicas": 2, "bucketBytes": bucket_bytes},
        "worker": {"replicas": 2},
        "runPolicy": {"backoffLimit": 0},
    }
    document = {"apiVersion": "elastic-ps.dev/v1alpha1", "kind": "TrainingJob"}
    return parse_job({**document, "metadata": {"name": "counted"}, "spec": spec}, source="test")


@pytest.mark.parametrize(
    ("transport", "shard"), per_change([("shm", 0), ("tcp", 1), ("grpc", 0)], keep=[("tcp", 1)])
)
def test_a_server_is_killed_and_the_job_succeeds(tmp_path: Path, transport: Scheme, shard: int) -> None:
    """With certificates, as every job: all of it is a worker's right."""
    options = Options(forks=forks(), root=tmp_path / "state", transport=transport)
    with Launcher(job("counted", until=str(tmp_path / "enough")), options) as launcher:
        launcher.start()

        def held() -> bool:
            """Whether the shard has its part of the tensor; fails when the job ends."""
            status = launcher.status()
            assert status.phase in ("Pending", "Running"), status.message
            answer = fetch_status(status.http[shard]) if status.http else None
            return answer is not None and answer.tensor_bytes > 0

        def both_say(text: str) -> bool:
            logs = [launcher.directory.log("worker", index) for index in range(2)]
            return held() and all(text in log.read_text() for log in logs)

        eventually(partial(both_say, "begun"), "the tensor is there")
        (pid,) = (p.pid for p in launcher.status().processes if (p.role, p.index) == ("ps", shard))
        os.kill(pid, signal.SIGKILL)
        told = f"told: the tensor 'count' is lost: parameter server {shard}"
        eventually(partial(both_say, told), "the workers are told, and the tensor has begun anew")
        (tmp_path / "enough").touch()
        wait_for_end(launcher)
        outcome = launcher.outcome()
    assert (outcome.verdict.phase, outcome.verdict.message) == (
        "Succeeded",
        "every worker has ended its script",
    )
    assert outcome.status.server is not None
    assert outcome.status.server.ready
    assert outcome.status.failures == 0


@pytest.mark.parametrize("exits", per_change([False, True], keep=[True]))
def test_what_a_script_has_pushed_last_is_carried_out(tmp_path: Path, exits: bool) -> None:
    """It comes to its end, or calls sys.exit, while its pushes are on their way."""
    ending = job("last_pushes", bucket_bytes=1 << 20, exits=exits)
    with Launcher(ending, Options(forks=forks(), root=tmp_path, transport="tcp")) as launcher:
        launcher.start()
        wait_for_end(launcher)
        outcome = launcher.outcome()
    assert outcome.verdict.phase == "Succeeded", outcome.verdict
    assert outcome.status.server is not None
    assert outcome.status.server.progress.metrics == {"least": last_pushes.PUSHES}


@pytest.mark.nightly
def test_elastic_averaging_by_hand_learns_the_digits(tmp_path: Path) -> None:
    """The example; with buckets so small that the centre lies on both parameter servers."""
    example = load_job(str(ROOT / "examples" / "easgd" / "job.yaml"))
    server = example.spec.parameter_server.model_copy(update={"bucket_bytes": 4096})
    spec = example.spec.model_copy(update={"parameter_server": server})
    with Launcher(
        example.model_copy(update={"spec": spec}), Options(forks=forks(), root=tmp_path)
    ) as launcher:
        launcher.start()
        wait_for_end(launcher)
        outcome = launcher.outcome()
    assert outcome.verdict.phase == "Succeeded", outcome.verdict
    assert outcome.status.server is not None
    assert outcome.status.server.progress.metrics["test_accuracy"] > 0.8


def test_downpour_by_hand_as_the_docs_have_it(tmp_path: Path) -> None:
    (code,) = re.findall(r"<!-- runs in [^\n]*test_tensors_jobs.py -->\n```python\n(.*?)```", DOCS, re.DOTALL)
    data, losses = Numbers(400), {}

    def script(session: Session) -> None:
        model = make_mlp(seed=session.worker)  # a script that sets no seed
        names: dict[str, Any] = {
            "torch": torch,
            "session": session,
            "model": model,
            "loss_fn": torch.nn.functional.mse_loss,
            "loader": torch.utils.data.DataLoader(data, 10),
        }
        before = float(mse(model, data.x, data.y).detach())
        exec(code, names)
        losses[session.worker] = (before, float(mse(model, data.x, data.y).detach()))

    with running_job(tmp_path, parameterServer={"replicas": 2, "bucketBytes": 1024}) as running:
        for worker in range(2):
            running.start(worker, script)
        running.join()
    for before, after in losses.values():
        assert after < 0.9 * before
