"""Where checkpoints are: claims that outlive their job, that exist already, or that an earlier job had."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from elastic_operator import builders, names
from elastic_operator.manifests import owner
from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.api.status import Progress, ServerStatus
from elastic_ps.contract import env
from tests.testing.api_server import JOBS, ApiServer, Refusal
from tests.testing.simulation import Simulation, job_document, running
from tests.unit.operator.test_cluster import Operator, refusing

RETAINED: dict[str, Any] = {"checkpoint": {"volumeClaim": {"storage": "1Gi", "retain": True}}}


def resuming(**earlier: str) -> dict[str, Any]:
    return {"checkpoint": {"resumeFrom": earlier}}


def spec_of(server: dict[str, Any]) -> TrainingJobSpec:
    return TrainingJobSpec.model_validate(job_document(parameterServer=server)["spec"])


def mounted(simulation: Simulation, pod: str = "digits-ps-0") -> str:
    """The claim that a server's checkpoints are on."""
    volumes = simulation.pods[pod]["spec"]["volumes"]
    (volume,) = (volume for volume in volumes if volume["name"] == "checkpoints")
    return str(volume["persistentVolumeClaim"]["claimName"])


def contract(simulation: Simulation, pod: str = "digits-ps-0") -> env.ProcessEnvironment:
    variables = simulation.pods[pod]["spec"]["containers"][0]["env"]
    return env.read({item["name"]: item.get("value", "") for item in variables})


def test_a_claim_that_is_retained_has_no_owner_that_it_is_deleted_with() -> None:
    job = job_document(parameterServer=RETAINED)
    claim = builders.claim(job, spec_of(RETAINED))
    assert "ownerReferences" not in claim["metadata"]
    assert "app.kubernetes.io/instance" not in claim["metadata"]["labels"], "Argo CD would delete it"
    assert claim["metadata"]["annotations"] == {names.RUN_ANNOTATION: job["metadata"]["uid"]}
    plain = {"checkpoint": {"volumeClaim": {"storage": "1Gi", "retain": False}}}
    assert builders.claim(job, spec_of(plain))["metadata"]["ownerReferences"] == [owner(job)]


@pytest.fixture
def server() -> Iterator[ApiServer]:
    server = ApiServer()
    yield server
    server.close()


def test_a_retained_claim_is_the_jobs_and_is_not_taken_by_the_next_of_the_same_name(
    server: ApiServer, tmp_path: Path
) -> None:
    operator = Operator(server, tmp_path)
    job = server.add_job(parameterServer=RETAINED)
    operator.turns(3)
    assert len(server.asked("POST", "persistentvolumeclaims")) == 1
    assert not [c for c in operator.status.conditions if c.reason == "NameTaken"]
    for resource in ("pods", "services"):
        for name in server.names(resource):
            server.remove(resource, name)
    server.remove(JOBS, "digits")
    server.put(JOBS, {**job, "metadata": {**job["metadata"], "uid": "uid-of-the-next"}, "status": {}})
    operator.turns()
    degraded = next(c for c in operator.status.conditions if c.type == "Degraded")
    assert degraded.reason == "NameTaken"
    way = "create the job again with parameterServer.checkpoint.resumeFrom: {claim: digits-ps-0} in place of"
    assert f"{way} volumeClaim. To train from the start, delete the claim" in degraded.message
    assert server.names("pods") == ["digits-worker-0"], "no server uses the claim while it is another job's"
    user = {"apiVersion": "elastic-ps.dev/v1alpha1", "kind": "TrainingJob", "name": "next", "uid": "uid-next"}
    server.get("persistentvolumeclaims", "digits-ps-0")["metadata"]["ownerReferences"] = [user]
    operator.turns()
    degraded = next(c for c in operator.status.conditions if c.type == "Degraded")
    assert "belong to this job, but to next. Choose another name for this job" in degraded.message
    assert "delete the claim" not in degraded.message
    server.remove("persistentvolumeclaims", "digits-ps-0")
    operator.turns()
    assert server.names("pods") == ["digits-ps-0", "digits-worker-0"]


def test_a_claim_whose_owner_a_person_has_removed_is_still_the_jobs(
    server: ApiServer, tmp_path: Path
) -> None:
    """So its checkpoints outlive the job; that uses it as before."""
    operator = Operator(server, tmp_path)
    server.add_job(parameterServer={"checkpoint": {"volumeClaim": {"storage": "1Gi"}}})
    operator.turns(3)
    claim = server.get("persistentvolumeclaims", "digits-ps-0")
    del claim["metadata"]["ownerReferences"]
    server.put("persistentvolumeclaims", claim)
    server.remove("pods", "digits-ps-0")
    operator.turns(3)
    assert not [c for c in operator.status.conditions if c.reason == "NameTaken"]
    assert "digits-ps-0" in server.names("pods")


def lent(
    server: ApiServer,
    operator: Operator,
    checkpoint: dict[str, Any],
    *,
    suspend: bool = False,
    **claim: Any,
) -> list[str]:
    """The uids of the owners of an ended job's claim after another job has named it."""
    ended = server.add_job("earlier", parameterServer={"checkpoint": {"volumeClaim": claim}})
    ended["status"] = {"completionTime": "2026-01-01T00:00:00Z"}
    server.put("persistentvolumeclaims", builders.claim(ended, spec_of(ended["spec"]["parameterServer"])))
    server.add_job(parameterServer=checkpoint, runPolicy={"suspend": suspend})
    operator.turns(3)
    assert ("digits-ps-0" in server.names("pods")) is not suspend
    owners = server.get("persistentvolumeclaims", "earlier-ps-0")["metadata"].get("ownerReferences", [])
    assert sum(each["controller"] for each in owners) <= 1, "Kubernetes refuses more"
    return [each["uid"] for each in owners]


@pytest.mark.parametrize("suspend", [False, True])
@pytest.mark.parametrize(
    "checkpoint", [resuming(job="earlier"), {"checkpoint": {"existingClaim": "earlier-ps-0"}}]
)
def test_a_claim_is_kept_as_long_as_any_job_that_uses_it(
    server: ApiServer, tmp_path: Path, checkpoint: dict[str, Any], suspend: bool
) -> None:
    """The garbage collector deletes an object when none of its owners is left."""
    both = ["uid-earlier", "uid-digits"]
    assert lent(server, Operator(server, tmp_path), checkpoint, suspend=suspend) == both
    assert len(server.asked("PATCH", "persistentvolumeclaims")) == 1
    assert server.asked("PATCH", "persistentvolumeclaims")[0].path.endswith("/earlier-ps-0")


def test_a_claim_without_an_owner_stays_without(server: ApiServer, tmp_path: Path) -> None:
    assert lent(server, Operator(server, tmp_path), resuming(job="earlier"), retain=True) == []


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        (
            'User "operator" cannot patch resource "persistentvolumeclaims" in API group ""',
            "Upgrade the chart",
        ),
        ("cannot set an ownerRef on a resource you can't delete", "only who may delete"),
    ],
)
def test_a_job_that_may_not_keep_its_claim_says_so_and_trains(
    server: ApiServer, tmp_path: Path, message: str, advice: str
) -> None:
    operator = Operator(server, tmp_path)
    server.refuse = refusing("PATCH", "earlier-ps-0", Refusal(403, "Forbidden", message))
    assert lent(server, operator, resuming(job="earlier")) == ["uid-earlier"]
    degraded = next(c for c in operator.status.conditions if c.type == "Degraded")
    assert (degraded.status, degraded.reason) == ("True", "RoleTooOld")
    assert "the claim is deleted with the earlier job that created it" in degraded.message
    assert message in degraded.message
    assert advice in degraded.message


def test_a_job_whose_claim_a_policy_keeps_from_it_says_so(server: ApiServer, tmp_path: Path) -> None:
    operator, denied = Operator(server, tmp_path), "ValidatingAdmissionPolicy 'y' denied request: no label"
    server.refuse = refusing("PATCH", "earlier-ps-0", Refusal(422, "Invalid", denied))
    assert lent(server, operator, resuming(job="earlier")) == ["uid-earlier"]
    degraded = next(c for c in operator.status.conditions if c.type == "Degraded")
    assert (degraded.status, denied in degraded.message) == ("True", True)


@pytest.mark.parametrize(
    ("checkpoint", "claim", "resume"),
    [
        (resuming(job="earlier"), "earlier-ps-0", "require"),
        (resuming(claim="archive"), "archive", "require"),
        ({"checkpoint": {"existingClaim": "archive"}}, "archive", "auto"),
    ],
)
def test_a_job_uses_a_claim_that_is_there(checkpoint: dict[str, Any], claim: str, resume: str) -> None:
    simulation = Simulation(job_document(parameterServer={**checkpoint, "replicas": 2}))
    simulation.settle()
    assert simulation.status["phase"] == "Running"
    assert simulation.claims == set(), "none is created"
    for pod in ("digits-ps-0", "digits-ps-1"):
        assert mounted(simulation, pod) == claim
        assert contract(simulation, pod).resume == resume
        assert "podAffinity" in simulation.pods[pod]["spec"]["affinity"], "it may be a volume for one node"
    simulation.edit(runPolicy={"suspend": True})
    simulation.settle()
    assert "continues from the last checkpoint" in simulation.condition("Suspended")["message"]


def test_a_job_that_continues_a_job_without_a_claim_of_its_own_says_what_to_name() -> None:
    """The earlier job itself continued another one, whose claim it took over."""
    simulation = Simulation(job_document(parameterServer=resuming(job="second")))
    simulation.step()
    text = '0/1 nodes are available: persistentvolumeclaim "second-ps-0" not found.'
    unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}
    held = {"phase": "Pending", "held": True, "conditions": [unplaced]}
    simulation.pods["digits-ps-0"]["status"] = held
    simulation.now += simulation.options.place_limit
    simulation.step()
    message = simulation.condition("Degraded")["message"]
    assert f"{text} The job second has no claim of its own, or it was deleted." in message
    assert "resumeFrom: {claim: NAME}" in message


@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [
        ({"volumeClaim": {}, "resumeFrom": {"job": "a"}}, "volumeClaim and resumeFrom are given"),
        ({"existingClaim": "x", "resumeFrom": {"job": "a"}}, "existingClaim and resumeFrom are given"),
        ({"resumeFrom": {}}, "either job or claim"),
        ({"resumeFrom": {"job": "a", "claim": "b"}}, "either job or claim"),
        ({"existingClaim": "Not a name"}, "existingClaim"),
    ],
)
def test_a_job_has_one_volume(checkpoint: dict[str, Any], words: str) -> None:
    simulation = Simulation(job_document(parameterServer={"checkpoint": checkpoint}))
    simulation.settle()
    assert words in simulation.condition("Failed")["message"]


def durable(version: int) -> ServerStatus:
    progress = Progress(version=version, durable_version=version, records_expected=10, records_applied=4)
    return ServerStatus(job="digits", shard=0, shards=1, term=1, ready=True, progress=progress)


@pytest.mark.parametrize("suspended", [True, False])
def test_a_job_whose_claim_is_gone_says_so_and_goes_on_when_it_is_there_again(suspended: bool) -> None:
    """On a new and empty claim of the same name the parameter server would wait for ever."""
    simulation = running(parameterServer={"checkpoint": {"volumeClaim": {}}})
    simulation.server = durable(5)
    simulation.settle()
    if suspended:
        simulation.edit(runPolicy={"suspend": True})
        simulation.settle()
        assert simulation.pods == {}
    simulation.server = None
    simulation.claims.clear()
    if suspended:
        simulation.settle()
        assert simulation.condition("Suspended")["reason"] == "CheckpointsGone"
    simulation.pods.pop("digits-ps-0", None)
    simulation.edit(runPolicy={"suspend": False})
    simulation.settle()
    assert simulation.claims == set()
    assert "digits-ps-0" not in simulation.pods
    degraded = simulation.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "CheckpointsGone")
    assert "digits-ps-0 is gone, and the checkpoint of version 5" in degraded["message"]
    assert "Delete the job, and create it again" in degraded["message"]
    assert "parameterServer.checkpoint.existingClaim" in degraded["message"]
    assert simulation.status["summary"]["reason"] == "CheckpointsGone"
    assert list(simulation.notes.values()).count("DegradedCheckpointsGone") == 1
    created = simulation.condition("Created")
    assert (created["status"], created["reason"]) == ("False", "CheckpointsGone")
    simulation.claims.add("digits-ps-0")
    simulation.settle()
    told = simulation.pods["digits-ps-0"]["metadata"]["annotations"]
    assert told.items() >= builders.durable_annotation(5).items(), "it begins only with that version"
    assert simulation.status["phase"] == "Running"


def test_a_claim_that_has_no_checkpoint_yet_is_created_again() -> None:
    simulation = running(parameterServer={"checkpoint": {"volumeClaim": {}}})
    simulation.claims.clear()
    simulation.settle()
    assert simulation.claims == {"digits-ps-0"}


@pytest.mark.parametrize("name", ["digits-worker-0", "digits-ps-0"])
def test_a_job_whose_claim_is_gone_is_not_looked_at_without_a_pause(name: str) -> None:
    """A pod of it has ended, and is not replaced."""
    simulation = running(parameterServer={"checkpoint": {"volumeClaim": {}}})
    simulation.server = durable(5)
    simulation.settle()
    simulation.server = None
    simulation.claims.clear()
    assert simulation.end(name, 1)
    for _ in range(3):
        plan = simulation.step()
        assert plan.actions == ()
        assert plan.requeue is not None
        assert plan.requeue > timedelta(0)
        simulation.now += timedelta(minutes=2)
