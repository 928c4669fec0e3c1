"""How the operator carries a thousand jobs: what it takes to start them, and what it costs while they train.

    ELASTIC_PS_KUBERNETES_BIN=DIR python -m benchmarks.fleet --jobs 1000

Needs root, and a directory with etcd, kube-apiserver, kube-controller-manager, kube-scheduler and kwok. All
of it runs in a network namespace of its own, and ends with the benchmark. kwok says of nodes and pods that
they are ready; nobody runs them. In the place of the parameter servers one small server answers `GET /status`
for all pods, whose addresses are the loopback's, with progress that moves on. `--silent N` lets the servers
of the first N jobs accept and never answer.

Printed are the time until all jobs are Running; the operator's API requests, CPU seconds and memory for that;
and the same for a minute (`--idle`) in which all of them train and nothing else happens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from elastic_operator.api import Api, ApiError
from elastic_operator.crd import crd
from elastic_operator.metrics import Metrics
from elastic_operator.poller import POLLS_PER_SECOND
from elastic_operator.settings import Settings
from elastic_ps.api.status import MemberStatus, Progress, ServerStatus
from elastic_ps.contract.env import DEFAULT_HTTP_PORT
from elastic_ps.errors import ConnectionLost
from tests.testing.operator_process import requests
from tests.testing.simulation import job_document

ROOT = Path(__file__).parents[1]
INSIDE = "ELASTIC_PS_FLEET_NAMESPACE"
JOBS = "/apis/elastic-ps.dev/v1alpha1/trainingjobs"
NODES = 20
LIMIT = 900.0
"""Seconds that a thousand jobs may take until they run; more of them may take longer in proportion."""
ADDRESS = "10.99.0.1"
ETCD, PEER, API, METRICS = 2379, 2380, 6443, 9090
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"

READY = """
{{ $now := Now }}
phase: Running
startTime: {{ $now | Quote }}
hostIP: {{ NodeIPWith .spec.nodeName | Quote }}
podIP: {{ PodIPWith .spec.nodeName false .metadata.uid .metadata.name .metadata.namespace | Quote }}
conditions:
{{ range $kind := list "Initialized" "ContainersReady" "Ready" }}
- {type: {{ $kind | Quote }}, status: "True", lastTransitionTime: {{ $now | Quote }}}
{{ end }}
containerStatuses:
{{ range .spec.containers }}
- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  imageID: ""
  ready: true
  restartCount: 0
  state: {running: {startedAt: {{ $now | Quote }}}}
{{ end }}
"""
"""What kwok writes into a pod's status once the scheduler has found a node for it."""


def stages() -> list[dict[str, Any]]:
    """kwok's rules: a pod starts at once, and is gone when it is deleted. Nodes have a rule, too."""

    def stage(
        name: str, conditions: dict[str, str], then: dict[str, Any], kind: str = "Pod"
    ) -> dict[str, Any]:
        expressions = [{"key": key, "operator": operator} for key, operator in conditions.items()]
        spec = {
            "resourceRef": {"apiGroup": "v1", "kind": kind},
            "selector": {"matchExpressions": expressions},
            "next": then,
        }
        document = {"apiVersion": "kwok.x-k8s.io/v1alpha1", "kind": "Stage"}
        return {**document, "metadata": {"name": name}, "spec": spec}

    deleted, started = ".metadata.deletionTimestamp", ".status.podIP"
    start = {deleted: "DoesNotExist", started: "DoesNotExist"}
    return [
        stage("start", start, {"statusTemplate": READY}),
        stage("node", {".status.phase": "DoesNotExist"}, {"statusTemplate": "phase: Running"}, "Node"),
        stage("delete", {deleted: "Exists"}, {"delete": True, "finalizers": {"empty": True}}),
    ]


class Fleet:
    """A control plane, kwok's nodes, and stand-ins for parameter servers, in `directory`."""

    def __init__(self, binaries: Path, directory: Path, *, silent: int) -> None:
        self._binaries, self._directory = binaries, directory
        self._silent = silent
        self._children: list[subprocess.Popen[bytes]] = []
        self._jobs: dict[str, str] = {}
        self.kubeconfig = directory / "kubeconfig"
        self.asked = 0

    def close(self) -> None:
        for child in reversed(self._children):
            child.terminate()
        for child in self._children:
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def start(self) -> None:
        directory = self._directory
        certificate = directory / "certificates" / "apiserver.crt"
        cluster = {"server": f"https://{ADDRESS}:{API}", "certificate-authority": str(certificate)}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fleet",
            "clusters": [{"name": "fleet", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": "fleet"}}],
            "contexts": [{"name": "fleet", "context": {"cluster": "fleet", "user": "admin"}}],
        }
        self.kubeconfig.write_text(json.dumps(document))
        (directory / "tokens").write_text("fleet,admin,1,system:masters\n")
        key = directory / "key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        client, peer = f"http://127.0.0.1:{ETCD}", f"http://127.0.0.1:{PEER}"
        self._spawn(
            "etcd",
            f"--data-dir={directory / 'etcd'}",
            *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
            *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
            *(f"--initial-cluster=default={peer}", "--unsafe-no-fsync"),
        )
        self._spawn(
            "kube-apiserver",
            *(
                f"--etcd-servers={client}",
                f"--bind-address={ADDRESS}",
                f"--advertise-address={ADDRESS}",
                f"--secure-port={API}",
            ),
            *(f"--cert-dir={directory / 'certificates'}", f"--token-auth-file={directory / 'tokens'}"),
            *(f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}"),
            *("--service-account-issuer=https://fleet", "--service-cluster-ip-range=10.96.0.0/16"),
            *(
                "--authorization-mode=AlwaysAllow",
                "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
            ),
        )
        self.wait("the API server has a certificate", certificate.is_file)
        self.wait("the API server is ready", lambda: self._get("/api/v1/namespaces/default"))
        # Endpoints do not take the loopback's addresses, and nobody asks for them.
        controllers = "--controllers=garbage-collector-controller,namespace-controller"
        for name, more in (("kube-controller-manager", [controllers]), ("kube-scheduler", [])):
            limits = ["--kube-api-qps=1000", "--kube-api-burst=2000", "--leader-elect=false"]
            self._spawn(name, f"--kubeconfig={self.kubeconfig}", *limits, *more)
        rules = directory / "stages.yaml"
        rules.write_text("\n---\n".join(map(json.dumps, stages())))
        self._spawn(
            "kwok",
            f"--config={rules}",
            *(f"--kubeconfig={self.kubeconfig}", "--manage-all-nodes=true", "--cidr=127.64.0.1/16"),
            *("--node-lease-duration-seconds=0", "--node-ip=127.0.0.1"),
        )
        self._create_nodes()
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True, name="servers").start()

    def _spawn(self, name: str, *arguments: str) -> None:
        with (self._directory / f"{name}.log").open("wb") as log:
            command = [str(self._binaries / name), *arguments]
            self._children.append(subprocess.Popen(command, stdout=log, stderr=log))

    def wait(self, what: str, check: Any, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for child in self._children:
                if child.poll() is not None:
                    raise SystemExit(f"{child.args!r} has ended; its log is in {self._directory}")
            with contextlib.suppress(OSError, ApiError, ConnectionLost):
                if check():
                    return
            time.sleep(0.2)
        raise SystemExit(f"not within {seconds:g} s: {what}")

    def _get(self, path: str) -> bool:
        self.api().request("get", "any", path)
        return True

    def api(self) -> Api:
        return Api(Settings(kubeconfig=self.kubeconfig, concurrency=16), Metrics())

    def _create_nodes(self) -> None:
        api = self.api()
        amounts = {"cpu": "1000", "memory": "10Ti", "pods": "1000"}
        ready = {"type": "Ready", "status": "True", "reason": "Fake", "message": "nobody is there"}
        for index in range(NODES):
            node = {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": f"kwok-{index}", "annotations": {"kwok.x-k8s.io/node": "fake"}},
                "status": {"allocatable": amounts, "capacity": amounts, "conditions": [ready]},
            }
            api.request("create", "nodes", "/api/v1/nodes", body=node)
        crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        api.request("create", "customresourcedefinitions", crds, body=crd())
        self.wait("the definition is served", lambda: self._get(JOBS))

    def apply(self, number: int) -> None:
        """Create the jobs, eight at a time, in ten namespaces."""
        api = self.api()
        for index in range(10):
            body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": f"team-{index}"}}
            api.request("create", "namespaces", "/api/v1/namespaces", body=body)

        def create(index: int) -> None:
            job = job_document(f"job-{index}", worker={"replicas": 2})
            job["metadata"] = {"name": f"job-{index}", "namespace": f"team-{index % 10}"}
            path = f"/apis/elastic-ps.dev/v1alpha1/namespaces/team-{index % 10}/trainingjobs"
            api.request("create", "trainingjobs", path, body=job)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(create, range(number)))

    def phases(self) -> dict[str, int]:
        """How many jobs there are in each phase, by the table that `kubectl get` shows."""
        request = urllib.request.Request(
            f"https://{ADDRESS}:{API}{JOBS}", headers={"Accept": TABLE, "Authorization": "Bearer fleet"}
        )
        context = ssl.create_default_context(cafile=self._directory / "certificates" / "apiserver.crt")
        with urllib.request.urlopen(request, timeout=60, context=context) as answer:
            table = json.load(answer)
        column = [c["name"] for c in table["columnDefinitions"]].index("Phase")
        found: dict[str, int] = {}
        for row in table["rows"]:
            phase = str(row["cells"][column] or "")
            found[phase] = found.get(phase, 0) + 1
        return found

    def train(self) -> None:
        """From now on the parameter servers answer."""
        query = {"labelSelector": "elastic-ps.dev/role=ps"}
        pods = self.api().request("list", "pods", "/api/v1/pods", query=query)["items"]
        self._jobs = {pod["status"]["podIP"]: pod["metadata"]["labels"]["elastic-ps.dev/job"] for pod in pods}

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._answer, "0.0.0.0", DEFAULT_HTTP_PORT, backlog=1000)
        await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            self.asked += 1
            job = self._jobs.get(writer.get_extra_info("sockname")[0])
            if job is None:
                return
            if int(job.rpartition("-")[2]) < self._silent:
                await asyncio.sleep(3600)
            body = status(job).model_dump_json(by_alias=True).encode()
            writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            """It has gone."""
        finally:
            writer.close()


def status(job: str) -> ServerStatus:
    """What a parameter server in the middle of training says."""
    version = int(time.monotonic() * 10)
    progress = Progress(
        version=version,
        epoch=1,
        epochs=100,
        percent=version % 100,
        samples_per_second=1234.5,
        loss=1 / version,
        records_applied=version * 64,
        records_expected=10**9,
    )
    members = [
        MemberStatus(
            worker=index,
            incarnation=index + 1,
            pid=1,
            host=f"{job}-worker-{index}",
            state="training",
            joined_version=0,
            steps=version,
            records=version * 32,
        )
        for index in range(2)
    ]
    return ServerStatus(job=job, shard=0, shards=1, term=1, ready=True, progress=progress, members=members)


class Operator:
    """The operator as a process, and what it costs."""

    def __init__(self, kubeconfig: Path, log: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "elastic_operator", f"--kubeconfig={kubeconfig}"]
        command += [f"--health=127.0.0.1:{METRICS}", "--tls-secret=default/authority", *arguments]
        with log.open("wb") as stream:
            self._child = subprocess.Popen(command, stderr=stream, cwd=ROOT)

    def close(self) -> None:
        self._child.terminate()
        self._child.wait(60)

    def page(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{METRICS}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def ready(self) -> bool:
        assert self._child.poll() is None, "the operator has ended"
        return self.page("/readyz") == "ok"

    def requests(self) -> dict[str, float]:
        """Requests to the API server so far, as `verb resource`."""
        return {f"{verb} {resource}": n for (verb, resource), n in requests(self.page("/metrics")).items()}

    def cpu(self) -> float:
        """CPU seconds so far."""
        fields = Path(f"/proc/{self._child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self, field: str) -> float:
        """MiB, now (VmRSS) or at most so far (VmHWM)."""
        lines = Path(f"/proc/{self._child.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def measure(fleet: Fleet, operator: Operator, jobs: int, idle: float) -> dict[str, Any]:
    fleet.wait("the operator is ready", operator.ready)
    before, cpu, begin = operator.requests(), operator.cpu(), time.monotonic()
    fleet.apply(jobs)
    applied = time.monotonic() - begin
    while fleet.phases().get("Running", 0) < jobs:
        if time.monotonic() - begin > LIMIT * max(1.0, jobs / 1000):
            raise SystemExit(f"not all jobs run: {fleet.phases()}")
        time.sleep(1 if jobs < 500 else 3)
    running = time.monotonic() - begin
    spent = _difference(operator.requests(), before)
    figures: dict[str, Any] = {
        "jobs": jobs,
        "apply_seconds": applied,
        "all_running_seconds": running,
        "requests_per_job": sum(spent.values()) / jobs,
        "cpu_seconds": operator.cpu() - cpu,
        "resident_mib": operator.memory("VmRSS"),
        "requests": {key: n / jobs for key, n in spent.items()},
    }
    fleet.train()
    # The first answer of each server is news, which is written at once; then only numbers move.
    time.sleep(max(min(60.0, idle), 1.5 * jobs / POLLS_PER_SECOND))
    before, cpu, begin, asked = operator.requests(), operator.cpu(), time.monotonic(), fleet.asked
    time.sleep(idle)
    seconds = time.monotonic() - begin
    spent = _difference(operator.requests(), before)
    return figures | {
        "idle_requests_per_second": sum(spent.values()) / seconds,
        "idle_percent_of_a_core": 100 * (operator.cpu() - cpu) / seconds,
        "idle_polls_per_second": (fleet.asked - asked) / seconds,
        "idle_requests": {key: n / seconds for key, n in spent.items()},
        "idle_resident_mib": operator.memory("VmRSS"),
        "most_resident_mib": operator.memory("VmHWM"),
        "phases": fleet.phases(),
    }


def _difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {key: n - before.get(key, 0) for key, n in after.items() if n != before.get(key, 0)}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return round(value, 2) if isinstance(value, float) else value


@contextlib.contextmanager
def scratch(keep: bool) -> Iterator[Path]:
    """A directory, removed afterwards unless it is to be kept."""
    if keep:
        yield Path(tempfile.mkdtemp(prefix="elastic-ps-fleet-"))
        return
    with tempfile.TemporaryDirectory(prefix="elastic-ps-fleet-") as directory:
        yield Path(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--silent", type=int, default=0, help="jobs whose servers never answer")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds to measure while nothing changes")
    parser.add_argument("--keep", action="store_true", help="keep the logs")
    parser.add_argument("--operator-args", default="", help="more arguments for the operator")
    given = parser.parse_args()
    binaries = os.environ.get("ELASTIC_PS_KUBERNETES_BIN")
    if not binaries or not (Path(binaries) / "kwok").is_file():
        raise SystemExit("ELASTIC_PS_KUBERNETES_BIN has to name a directory with kube-apiserver and kwok")
    if INSIDE not in os.environ:
        if os.geteuid() or not shutil.which("ip") or not shutil.which("unshare"):
            parser.error("needs root, and the commands ip (iproute2) and unshare (util-linux)")
        script = f'ip link set lo up && ip address add {ADDRESS} dev lo && exec "$@"'
        command = ["unshare", "--net", "sh", "-c", script, "-", sys.executable, "-m", "benchmarks.fleet"]
        os.execvpe(command[0], [*command, *sys.argv[1:]], {**os.environ, INSIDE: "1"})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with scratch(given.keep) as directory:
        fleet = Fleet(Path(binaries), directory, silent=given.silent)
        try:
            fleet.start()
            operator = Operator(fleet.kubeconfig, directory / "operator.log", *given.operator_args.split())
            try:
                figures = measure(fleet, operator, given.jobs, given.idle)
            finally:
                operator.close()
        finally:
            fleet.close()
        if given.keep:
            print(f"logs: {directory}", file=sys.stderr)
    print(json.dumps(_rounded(figures), indent=1))


if __name__ == "__main__":
    main()
