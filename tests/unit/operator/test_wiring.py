"""How the processes of a job find each other, also in a job that an earlier operator has started."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_operator import builders, names, wiring
from elastic_operator.wiring import HEADLESS, Wiring
from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.contract import env
from elastic_ps.contract.env import Role
from tests.testing.simulation import Simulation, job_document, named, running

CLAIM = {"volumeClaim": {"storage": "1Gi", "accessMode": "ReadWriteMany"}}
SERVERS = {"parameterServer": {"replicas": 2, "durability": "standby", "checkpoint": CLAIM}}
OLD = {f"digits-{role}-{shard}" for role in ("ps", "standby") for shard in range(2)}


def told(pod: dict[str, Any]) -> env.ProcessEnvironment:
    variables = pod["spec"]["containers"][0]["env"]
    return env.read({item["name"]: item.get("value", "") for item in variables})


def started_before(**spec: Any) -> Simulation:
    """A job that runs as the operator that gave each server a Service has made it."""
    simulation = Simulation(job_document(**spec))
    parsed = TrainingJobSpec.model_validate(simulation.job and simulation.job["spec"])
    servers: list[tuple[Role, int]] = [("ps", 0), ("ps", 1), ("standby", 0), ("standby", 1)]
    made = Wiring(headless=False).services(simulation.job or {}, servers, revision=builders.revision(parsed))
    for name, manifest in made.items():
        simulation.services[name] = manifest["metadata"]["annotations"].get(names.SPEC_ANNOTATION)
    simulation.settle()
    return simulation


def test_a_server_is_found_by_its_pods_own_name() -> None:
    simulation = running(**SERVERS)
    assert set(simulation.services) == {"digits-servers"}
    for name in OLD:
        spec = simulation.pods[name]["spec"]
        assert (spec["hostname"], spec["subdomain"]) == (name, "digits-servers")
    assert "subdomain" not in simulation.pods["digits-worker-0"]["spec"]
    known = told(simulation.pods["digits-worker-0"]).addresses
    assert known == ("digits-ps-0.digits-servers:2222", "digits-ps-1.digits-servers:2222")


def test_the_service_leads_to_servers_alone() -> None:
    job = job_document()
    spec = TrainingJobSpec.model_validate(job["spec"])
    (service,) = HEADLESS.services(job, [("ps", 0)], revision="{}").values()
    selector = service["spec"]["selector"].items()
    roles: tuple[Role, ...] = ("ps", "standby", "worker", "evaluator")
    pods = {role: builders.pod(job, spec, role, 0)["metadata"]["labels"] for role in roles}
    assert {role for role, labels in pods.items() if selector <= labels.items()} == {"ps", "standby"}
    other = builders.pod(job_document("other"), spec, "ps", 0)["metadata"]["labels"]
    assert not selector <= other.items()


def test_a_job_that_was_started_before_keeps_its_services() -> None:
    """Its processes know no other names; those of a new server or worker fit theirs."""
    simulation = started_before(**SERVERS)
    assert set(simulation.services) == OLD
    assert simulation.status["phase"] == "Running"
    del simulation.pods["digits-ps-1"]
    simulation.scale(2)
    simulation.settle()
    assert set(simulation.services) == OLD
    for pod in ("digits-ps-1", "digits-worker-1"):
        assert told(simulation.pods[pod]).addresses == ("digits-ps-0:2222", "digits-ps-1:2222")
        assert "subdomain" not in simulation.pods[pod]["spec"]
    del simulation.services["digits-standby-1"]
    assert named(simulation.step()) == ["digits-standby-1"], "one that was deleted is made again"
    assert simulation.plan().actions == ()


@pytest.mark.parametrize(
    "services", [{"digits-servers": "{}"}, {"digits-servers": "{}", "digits-ps-0": "{}"}, {}]
)
def test_a_new_job_stays_as_it_is_if_an_older_operator_was_back_for_a_while(services: dict[str, str]) -> None:
    simulation = Simulation(job_document())
    simulation.services |= services
    assert wiring.of("digits", simulation.services, secured=False).headless
