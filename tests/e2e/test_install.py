"""Install with Helm, train the digits for real, scale while it runs, uninstall: what a person does first."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from helm_python import Config, HelmError

from tests.e2e.cluster import GivenCluster, wait_for
from tests.e2e.cluster.shell import run
from tests.e2e.conftest import knows_rules, restrict
from tests.testing.operator_process import HISTORIES, ROOT, TRAINING_IMAGE, Jobs, digits, requests

# Its operator serves all namespaces, and its definition is made anew.
pytestmark = pytest.mark.alone

CHART = ROOT / "charts" / "elastic-ps"
SYSTEM = "elastic-ps-system"
TRAINED = timedelta(minutes=10)


@pytest.fixture(scope="module")
def helm(cluster: GivenCluster) -> Iterator[Config]:
    with Config(kubeconfig_path=cluster.kubeconfig, namespace=SYSTEM) as config:
        yield config


class HelmCommand:
    """The `helm` command, used as the library is."""

    def __init__(self, program: Path, kubeconfig: Path) -> None:
        self._command: list[str | Path] = [program, "--namespace", SYSTEM, "--kubeconfig", kubeconfig]

    def install(self, chart: str, release: str, values: dict[str, Any]) -> None:
        run([*self._command, "install", release, chart, "--values=-"], stdin=json.dumps(values))

    def upgrade(self, chart: str, release: str, values: dict[str, Any]) -> None:
        run([*self._command, "upgrade", release, chart, "--values=-"], stdin=json.dumps(values))

    def test(self, release: str, *, timeout: int) -> None:
        run(
            [*self._command, "test", release, f"--timeout={timeout}s"],
            timeout=timedelta(seconds=timeout + 10),
        )

    def uninstall(self, release: str, *, ignore_not_found: bool = False) -> None:
        run([*self._command, "uninstall", release, *(["--ignore-not-found"] if ignore_not_found else [])])


@pytest.fixture(scope="module")
def command(cluster: GivenCluster, helm: Config) -> HelmCommand | Config:
    """The `helm` command where it is at hand, else the library once more."""
    places = [os.environ.get("ELASTIC_PS_KUBERNETES_BIN", ""), os.environ.get("PATH", "")]
    program = shutil.which("helm", path=os.pathsep.join(filter(None, places)))
    return HelmCommand(Path(program), cluster.kubeconfig) if program else helm


@pytest.fixture(scope="module")
def installed(
    cluster: GivenCluster, helm: Config, command: HelmCommand | Config, training_images: None
) -> Iterator[None]:
    if not knows_rules(cluster):
        pytest.skip("the chart needs Kubernetes 1.29")
    # Another test may have made the definition without Helm; Helm takes over nothing that is not its own.
    helm.uninstall("elastic-ps", ignore_not_found=True)
    cluster.kubectl("delete", "crd", "trainingjobs.elastic-ps.dev", "--ignore-not-found")
    cluster.kubectl("create", "namespace", SYSTEM, check=False)
    restrict(cluster, SYSTEM)
    try:
        command.install(str(CHART), "elastic-ps", {"operator": {"poll": "2s"}})
        cluster.kubectl("-n", SYSTEM, "rollout", "status", "deployment/elastic-ps", "--timeout=120s")
        yield
    finally:
        _remove(cluster, helm)


def _remove(cluster: GivenCluster, helm: Config) -> None:
    log = cluster.kubectl("-n", SYSTEM, "logs", "deployment/elastic-ps", check=False).stdout
    print(log[-8000:])
    helm.uninstall("elastic-ps", ignore_not_found=True)
    cluster.kubectl("delete", "namespace", SYSTEM, "--wait=false")


@pytest.fixture
def jobs(cluster: GivenCluster, restricted: str) -> Jobs:
    return Jobs(cluster, restricted, TRAINING_IMAGE)


UNHURRIED = """
import pathlib, time, torch
from examples.digits import train

HURRY = pathlib.Path("/tmp/hurry")

class Unhurried(torch.utils.data.Dataset):
    def __init__(self, data):
        self.data = data
    def __len__(self):
        return len(self.data)
    def __getitem__(self, index):
        if not HURRY.exists():
            time.sleep(0.01)
        return self.data[index]

def main(**arguments):
    training, test = train.digits()
    train.digits = lambda: (Unhurried(training), test)
    train.main(**arguments)
"""
"""The example, which no machine trains to its end before the test tells its last worker to hurry."""


def with_script(jobs: Jobs, job: dict[str, Any], script: str) -> None:
    """Let workers run a script of a ConfigMap, as in docs/cookbook."""
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "script"},
        "data": {"train.py": script},
    }
    jobs.cluster.apply(config, namespace=jobs.namespace)
    job["spec"]["entrypoint"] = "train:main"
    template = job["spec"]["worker"]["template"]["spec"]
    template["volumes"] = [{"name": "script", "configMap": {"name": "script"}}]
    (container,) = template["containers"]
    container |= {"workingDir": "/script", "volumeMounts": [{"name": "script", "mountPath": "/script"}]}


def test_digits_from_install_to_accuracy(installed: None, jobs: Jobs) -> None:
    job = digits(epochs=30)
    with_script(jobs, job, UNHURRIED)
    job["spec"]["evaluator"] = {
        "entrypoint": "examples.digits.evaluate:main",
        "every": 100,
        "backlog": 100,
        "best": {"metric": "prec@1", "mode": "max"},
    }
    jobs.cluster.apply(job, namespace=jobs.namespace)
    jobs.wait_status("digits", phase="Running", workers="2/2", timeout=timedelta(minutes=10))
    jobs.wait_version("digits", 0)
    wait_for(
        lambda: "digits-evaluator-0" in jobs.identities("digits"),
        what="the evaluator's pod",
        timeout=timedelta(minutes=10),
    )
    before = jobs.identities("digits")
    jobs.kubectl("scale", "tj/digits", "--replicas=4")
    jobs.wait_status("digits", workers="4/4", timeout=timedelta(minutes=10))
    assert before.items() <= jobs.identities("digits").items()
    version = jobs.progress("digits")["version"]
    jobs.wait_version("digits", version + 50)
    print(jobs.kubectl("get", "tj").stdout)
    jobs.kubectl("scale", "tj/digits", "--replicas=1")
    wait_for(
        lambda: set(jobs.identities("digits")) == {"digits-ps-0", "digits-worker-0", "digits-evaluator-0"},
        what="three workers leave",
        timeout=timedelta(minutes=10),
    )
    stayed = jobs.identities("digits")
    assert stayed == {name: before[name] for name in stayed}
    assert jobs.progress("digits")["finished"] is False, (
        "the job ended before it was scaled down; give it more epochs"
    )
    jobs.kubectl("exec", "digits-worker-0", "--", "touch", "/tmp/hurry")
    jobs.wait_status("digits", phase="Succeeded", timeout=TRAINED)
    status = jobs.job("digits")["status"]
    print(jobs.kubectl("get", "tj").stdout, json.dumps(status["progress"]))
    assert status["progress"]["metrics"]["test_accuracy"] >= 0.95
    assert status["progress"]["recordsApplied"] == status["progress"]["recordsExpected"]
    evaluation = status["progress"]["evaluation"]
    assert evaluation["version"] == status["progress"]["version"], "the last one is evaluated, too"
    assert evaluation["metrics"]["prec@1"] == pytest.approx(
        100 * status["progress"]["metrics"]["test_accuracy"], abs=0.01
    )
    assert evaluation["evaluated"] >= 3
    assert evaluation["missed"] == evaluation["waiting"] == 0
    assert "Evaluated" in jobs.kubectl("get", "events").stdout
    assert status["worker"]["failures"] == 0
    assert status["parameterServer"]["term"] == 1
    print(jobs.kubectl("describe", "tj", "digits").stdout.partition("Events:")[2])
    jobs.kubectl("delete", "tj", "digits")
    jobs.wait_gone("digits")


@pytest.mark.nightly
def test_flags_become_a_job_that_trains(installed: None, jobs: Jobs, tmp_path: Path) -> None:
    """`elastic-ps train --apply`, in a shell that knows the cluster and nothing else of it."""
    claim = HISTORIES["metadata"]["name"]
    jobs.cluster.apply(HISTORIES, namespace=jobs.namespace)

    def train(namespace: str) -> subprocess.CompletedProcess[str]:
        flags = "--network LeNet --dataset digits --num-workers 1 --max-steps 20 --eval-freq 5 --name flags "
        where = f"--apply --image {TRAINING_IMAGE} --train-claim {claim} --namespace {namespace}"
        return subprocess.run(
            [sys.executable, "-m", "elastic_ps.cli", "train", *flags.split(), *where.split()],
            env={
                "KUBECONFIG": str(jobs.cluster.kubeconfig),
                "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'operator'}",
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    made = train(jobs.namespace)
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("trainingjob flags is created")
    again = train(jobs.namespace)
    assert (again.returncode, again.stdout) == (2, "")
    assert "has a TrainingJob flags already: delete it with `kubectl" in again.stderr
    nowhere = train(f"no-{jobs.namespace}")
    assert (nowhere.returncode, nowhere.stdout) == (2, "")
    assert f"the cluster has no namespace no-{jobs.namespace}: create it" in nowhere.stderr
    jobs.wait_status("flags", phase="Succeeded", timeout=TRAINED)
    progress = jobs.progress("flags")
    assert (progress["version"], progress["durableVersion"]) == (20, 20)
    assert progress["metrics"].keys() >= {"test_loss", "prec@1", "prec@5"}


def test_suspended_training_goes_on_from_its_checkpoint(installed: None, jobs: Jobs) -> None:
    jobs.cluster.apply(digits(epochs=200), namespace=jobs.namespace)
    jobs.wait_status("digits", phase="Running", timeout=timedelta(minutes=10))
    jobs.wait_version("digits", 100)
    jobs.patch("digits", {"runPolicy": {"suspend": True}})
    jobs.wait_status("digits", phase="Suspended", timeout=timedelta(minutes=10))
    version = jobs.progress("digits")["version"]
    jobs.patch("digits", {"runPolicy": {"suspend": False}})
    jobs.wait_status("digits", phase="Running", timeout=timedelta(minutes=10))
    jobs.wait_version("digits", version)
    assert jobs.job("digits")["status"]["parameterServer"]["term"] == 2


def test_helm_test_upgrade_and_schema(
    installed: None,
    cluster: GivenCluster,
    helm: Config,
    command: HelmCommand | Config,
    jobs: Jobs,
    tmp_path: Path,
) -> None:
    """A job that runs meanwhile notices nothing."""
    jobs.apply("trains", worker={"replicas": 1})
    command.test("elastic-ps", timeout=120)
    with pytest.raises(HelmError, match="concurrency"):
        helm.upgrade(str(CHART), "elastic-ps", {"operator": {"concurrency": 0}})
    with pytest.raises(HelmError, match="there is no namespace no-such-namespace"):
        helm.upgrade(str(CHART), "elastic-ps", {"namespaces": [jobs.namespace, "no-such-namespace"]})
    # Its own namespace may not be there yet.
    own = {"namespaces": ["fresh"], "crd": {"install": False}}
    helm.install(str(CHART), "fresh", own, namespace="fresh", create_namespace=True, dry_run="server")
    jobs.wait_status("trains", phase="Running", workers="1/1")
    before = jobs.identities("trains")
    older = tmp_path / "elastic-ps"
    shutil.copytree(CHART, older)
    template = older / "templates" / "crd.yaml"
    template.write_text(template.read_text().replace("    - tj\n", "    - tj\n    - tjob\n"))
    for chart, short in ((older, ["tj", "tjob"]), (CHART, ["tj"])):
        another = {"operator": {"poll": "2s"}, "podAnnotations": {"chart": chart.parent.name}}
        command.upgrade(str(chart), "elastic-ps", another)
        names = cluster.get("crd", "trainingjobs.elastic-ps.dev")["spec"]["names"]
        assert names["shortNames"] == short, "an upgrade of the chart upgrades the definition"
    cluster.kubectl("-n", SYSTEM, "rollout", "status", "deployment/elastic-ps", "--timeout=120s")
    jobs.kubectl("scale", "tj/trains", "--replicas=2")
    jobs.wait_status("trains", phase="Running", workers="2/2")
    assert before.items() <= jobs.identities("trains").items()


@pytest.mark.nightly
def test_granted_is_what_is_used(installed: None, cluster: GivenCluster, jobs: Jobs) -> None:
    """Every verb of the role is used in the life of jobs, and none is missing: nothing is refused."""
    invalid = digits()
    invalid["spec"] |= {"entrypoint": "no.such.module:main", "runPolicy": {"ttlSecondsAfterFinished": 5}}
    jobs.cluster.apply(invalid, namespace=jobs.namespace)
    wait_for(
        lambda: not cluster.get("-n", jobs.namespace, "tj")["items"],
        what="the job fails and is deleted",
        timeout=timedelta(minutes=10),
    )
    metrics = cluster.kubectl(
        "get", "--raw", f"/api/v1/namespaces/{SYSTEM}/services/elastic-ps:http/proxy/metrics"
    ).stdout
    used = set(requests(metrics))
    # Only looked at when a name is taken: by what of an earlier job is still being deleted.
    named = ("pods", "services", "persistentvolumeclaims", "networkpolicies")
    used |= {("get", resource) for resource in named}
    # Certificates are renewed; a running job is changed.
    used |= {("update", "secrets"), ("patch", "pods"), ("patch", "services")}
    used |= {("patch", "persistentvolumeclaims")}  # a job that uses another one's claim becomes an owner
    used -= {("get", "secrets")}  # the operator's own one, by its name, in its own namespace
    used -= {("get", "apis")}  # kopf looks up which resources there are, as each account may
    role = cluster.get("clusterrole", "elastic-ps")
    granted = {
        (verb, resource) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]
    }
    assert used == granted
    # Another test's namespace may be on its way out while its jobs are still seen.
    refused = [
        line
        for line in metrics.splitlines()
        if "request_errors_total{" in line and '"403"' in line and '"NamespaceTerminating"' not in line
    ]
    assert refused == []


def make(target: str, cluster: GivenCluster) -> None:
    """What `make install` and `make uninstall` do."""
    run(
        [sys.executable, "tools/install_chart.py", target],
        env={"KUBECONFIG": str(cluster.kubeconfig), "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        timeout=timedelta(minutes=10),
    )


@pytest.mark.nightly
def test_make_install_and_the_helm_command_take_turns(
    installed: None, cluster: GivenCluster, command: HelmCommand | Config
) -> None:
    """One upgrades what the other has installed: the API server takes them for one (server-side apply)."""
    if not isinstance(command, HelmCommand):
        pytest.skip("there is no helm command")
    make("install", cluster)
    command.upgrade(str(CHART), "elastic-ps", {"operator": {"poll": "3s"}})
    command.uninstall("elastic-ps")
    make("install", cluster)
    for replicas in (2, 1):  # what belongs to several operators only is taken away again
        command.upgrade(str(CHART), "elastic-ps", {"replicas": replicas, "operator": {"poll": "2s"}})
    cluster.kubectl("-n", SYSTEM, "rollout", "status", "deployment/elastic-ps", "--timeout=120s")


def test_uninstall_keeps_definition_and_jobs(
    installed: None, cluster: GivenCluster, command: HelmCommand | Config, jobs: Jobs
) -> None:
    jobs.cluster.apply(digits(), namespace=jobs.namespace)
    command.uninstall("elastic-ps")
    assert cluster.get("crd", "trainingjobs.elastic-ps.dev")
    assert [item["metadata"]["name"] for item in cluster.get("-n", jobs.namespace, "tj")["items"]] == [
        "digits"
    ]
