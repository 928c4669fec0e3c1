"""Real training over TLS: who has no certificate of the job is refused, and renewing them breaks nothing."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.e2e.cluster import GivenCluster, wait_for
from tests.testing.operator_process import TRAINING_IMAGE, Jobs, OperatorProcess, digits

pytestmark = pytest.mark.usefixtures("definition", "training_images")

MINUTES = timedelta(minutes=10)
LIFETIME = timedelta(seconds=60)
STRANGER = """
import socket, ssl, sys
for port in (2222, 2223):
    for encrypted in (False, True):
        said = b""
        try:
            with socket.create_connection((sys.argv[1], port), 10) as sock:
                if encrypted:
                    context = ssl._create_unverified_context()
                    context.set_alpn_protocols(["h2"])
                    sock = context.wrap_socket(sock)
                if port == 2222:  # a server of HTTP/2 answers this with its settings
                    preface = b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n"
                    sock.sendall(preface + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
                sock.settimeout(10)
                said = sock.recv(100)
                said = b"" if said[:1] == b"\\x15" else said  # an alert of TLS
        except OSError as error:
            print(port, encrypted, "refused:", error)
            continue
        print(port, encrypted, "answered" if said else "refused")
"""


@pytest.fixture
def jobs(cluster: GivenCluster, namespace: str) -> Jobs:
    return Jobs(cluster, namespace, TRAINING_IMAGE)


@pytest.fixture
def issuing(cluster: GivenCluster, namespace: str, tmp_path: Path) -> OperatorProcess:
    return OperatorProcess(cluster.kubeconfig, namespace, tmp_path / "operator.log")


def shown(jobs: Jobs, pod: str) -> str:
    """The certificate that a pod's process would show now."""
    return jobs.kubectl("exec", pod, "--", "cat", "/etc/elastic-ps/tls/tls.crt", check=False).stdout


def members(jobs: Jobs) -> list[dict[str, object]]:
    path = f"/api/v1/namespaces/{jobs.namespace}/pods/digits-ps-0:8080/proxy/status"
    answer = jobs.kubectl("get", "--raw", path, check=False).stdout
    return list(json.loads(answer)["members"]) if answer else []


@pytest.mark.nightly
def test_certificates_end_during_a_run_and_nobody_notices(issuing: OperatorProcess, jobs: Jobs) -> None:
    issuing.start(
        f"--tls-secret={jobs.namespace}/authority", f"--certificate-lifetime={LIFETIME.total_seconds():g}s"
    )
    try:
        jobs.cluster.apply(digits(epochs=2000), namespace=jobs.namespace)
        jobs.wait_status("digits", phase="Running", workers="2/2", timeout=MINUTES)
        jobs.wait_version("digits", 20)
        assert {member["transport"] for member in members(jobs)} == {"tcp"}
        before, first = jobs.identities("digits"), shown(jobs, "digits-worker-0")
        assert "BEGIN CERTIFICATE" in first

        address = "digits-ps-0.digits-servers"
        told = jobs.kubectl("exec", "digits-worker-0", "--", "python3", "-c", STRANGER, address).stdout
        assert told.count("refused") == 4, told
        assert "answered" not in told

        ends = datetime.fromisoformat(jobs.job("digits")["status"]["certificates"]["expires"])
        wait_for(lambda: datetime.now(UTC) > ends, what="the first certificates have ended", timeout=MINUTES)
        for pod in ("digits-ps-0", "digits-worker-0"):
            assert shown(jobs, pod) != first
        # All of them have to connect again, and one that was not there has to, too.
        jobs.kubectl("delete", "pod", "digits-ps-0", "--wait=false")
        jobs.wait_replaced("digits", "digits-ps-0", before)
        jobs.kubectl("scale", "tj/digits", "--replicas=3")
        wait_for(
            lambda: len([m for m in members(jobs) if m["state"] == "training"]) == 3,
            what="three workers train",
            timeout=MINUTES,
            explain=lambda: f"{members(jobs)}; {jobs.kubectl('logs', 'digits-worker-0').stdout}",
        )
        after = jobs.identities("digits")
        for worker in ("digits-worker-0", "digits-worker-1"):
            assert after[worker] == before[worker], "it was not restarted"
        assert jobs.job("digits")["status"]["worker"]["failures"] == 0
        warnings = jobs.cluster.get("-n", jobs.namespace, "events", "--field-selector=type=Warning")["items"]
        # A pod that ends is not ready any more, and may be told so. A busy kubelet says that its cache is
        # late, and mounts the volume a moment later.
        alive = {uid for uid, _ in after.values()}
        told_of = {
            (event["involvedObject"]["name"], event["reason"], event["message"])
            for event in warnings
            if event["involvedObject"]["uid"] in alive and "failed to sync" not in event["message"]
        }
        wrong = ("Startup probe", "Liveness probe", "elastic-ps-tls")
        assert {each for each in told_of if any(words in each[2] for words in wrong)} == set()
    finally:
        issuing.close()
        print(issuing.log.read_text()[-4000:])
