"""An API server in trouble: it refuses with 409, 410, 429 and 500, cuts watches off, and answers get lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from typing import get_args

import pytest

from tests.e2e.cluster import Cluster, GivenCluster, wait_for
from tests.testing.faulty_api import FAULTS, Fault, FaultyApi
from tests.testing.operator_process import Jobs, OperatorProcess

pytestmark = pytest.mark.usefixtures("definition")

LIMIT = timedelta(minutes=3)
ALL = get_args(Fault)


@pytest.fixture
def api(cluster: GivenCluster) -> Iterator[FaultyApi]:
    proxy = FaultyApi(cluster.kubeconfig, seed=7)
    yield proxy
    proxy.close()


@pytest.fixture
def behind(api: FaultyApi, namespace: str, tmp_path: Path) -> Iterator[OperatorProcess]:
    """An operator that sees the API server through the proxy."""
    path = tmp_path / "kubeconfig"
    path.write_text(api.kubeconfig())
    process = OperatorProcess(path, namespace, tmp_path / "operator.log")
    process.start("--resync=2s")
    yield process
    process.close()
    print(process.log.read_text()[-6000:])


@pytest.mark.nightly
def test_job_gets_where_it_should(
    local_cluster: Cluster, namespace: str, python_image: str, api: FaultyApi, behind: OperatorProcess
) -> None:
    """Every change of the job meets some trouble; those who train never notice."""
    jobs = Jobs(local_cluster, namespace, python_image)
    with api.storm(ALL, probability=0.1):
        jobs.apply("digits")
        jobs.wait_status("digits", phase="Running", workers="2/2", timeout=LIMIT)
    first = jobs.identities("digits")
    meetings = [(call, fault) for call, faults in FAULTS.items() for fault in faults]
    for replicas, (call, fault) in zip(cycle((3, 2)), meetings, strict=False):
        began = time.monotonic()
        with api.storm([fault], calls=[call]):
            before = api.happened[call, fault]
            jobs.kubectl("scale", "tj/digits", f"--replicas={replicas}")
            wait_for(
                lambda: api.happened[call, fault] > before,  # noqa: B023 (it ends before the next turn)
                what=f"a {call} meets {fault}",
                timeout=LIMIT,
            )
        jobs.wait_status("digits", workers=f"{replicas}/{replicas}", timeout=LIMIT)
        print(f"{call} and {fault}: {replicas} workers after {time.monotonic() - began:.1f} s")
    assert first.items() <= jobs.identities("digits").items()
    with api.storm(ALL, probability=0.1):
        known = jobs.identities("digits")
        os.kill(local_cluster.pod_pid("digits-worker-1", namespace=namespace), signal.SIGKILL)
        jobs.wait_replaced("digits", "digits-worker-1", known, timeout=LIMIT)
        jobs.kubectl("scale", "tj/digits", "--replicas=1")
        wait_for(
            lambda: jobs.identities("digits").keys() == {"digits-ps-0", "digits-worker-0"},
            what="digits has one worker",
            timeout=LIMIT,
            explain=lambda: str(jobs.identities("digits")),
        )
        jobs.wait_status("digits", workers="1/1", timeout=LIMIT)
    assert jobs.identities("digits").items() <= first.items()
    status = jobs.job("digits")["status"]["worker"]
    assert (status["failures"], status["restarts"]) == (1, 1), "what was lost was counted once"
    assert behind.alive
    assert behind.get("/healthz") == "ok"
