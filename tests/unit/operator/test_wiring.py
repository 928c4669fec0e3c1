"""How the processes of a job find each other."""

from __future__ import annotations

from typing import Any

from elastic_operator import builders, wiring
from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.contract import env
from elastic_ps.contract.env import Role
from tests.testing.simulation import job_document, running

CLAIM = {"volumeClaim": {"storage": "1Gi", "accessMode": "ReadWriteMany"}}
SERVERS = {"parameterServer": {"replicas": 2, "durability": "standby", "checkpoint": CLAIM}}
NAMES = {f"digits-{role}-{shard}" for role in ("ps", "standby") for shard in range(2)}


def told(pod: dict[str, Any]) -> env.ProcessEnvironment:
    variables = pod["spec"]["containers"][0]["env"]
    return env.read({item["name"]: item.get("value", "") for item in variables})


def test_a_server_is_found_by_its_pods_own_name() -> None:
    simulation = running(**SERVERS)
    assert set(simulation.services) == {"digits-servers"}
    for name in NAMES:
        spec = simulation.pods[name]["spec"]
        assert (spec["hostname"], spec["subdomain"]) == (name, "digits-servers")
    assert "subdomain" not in simulation.pods["digits-worker-0"]["spec"]
    known = told(simulation.pods["digits-worker-0"]).addresses
    assert known == ("digits-ps-0.digits-servers:2222", "digits-ps-1.digits-servers:2222")


def test_the_service_leads_to_servers_alone() -> None:
    job = job_document()
    spec = TrainingJobSpec.model_validate(job["spec"])
    selector = wiring.service(job)["spec"]["selector"].items()
    roles: tuple[Role, ...] = ("ps", "standby", "worker", "evaluator")
    pods = {role: builders.pod(job, spec, role, 0)["metadata"]["labels"] for role in roles}
    assert {role for role, labels in pods.items() if selector <= labels.items()} == {"ps", "standby"}
    other = builders.pod(job_document("other"), spec, "ps", 0)["metadata"]["labels"]
    assert not selector <= other.items()


def test_the_service_tells_a_mesh_that_ports_carry_tls() -> None:
    ports = wiring.service(job_document())["spec"]["ports"]
    assert {port["name"]: port.get("appProtocol") for port in ports} == {
        "grpc": "tcp",
        "data": "tcp",
        "http": None,
    }
