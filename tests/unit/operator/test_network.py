"""The NetworkPolicy of a job: it is there before its servers, and opens no more than it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from elastic_operator import network
from elastic_operator.permissions import Permissions, Policy
from elastic_operator.plan import Create, Options
from elastic_operator.settings import parse
from tests.testing.api_server import ApiServer
from tests.testing.simulation import Simulation, job_document, running
from tests.unit.operator.test_cluster import Operator
from tests.unit.tools.test_chart import EVERYTHING, VERSION, documents

OPERATOR = {"podSelector": {"matchLabels": {"app": "operator"}}}
GUARDED = Options(http_from=[OPERATOR])


def opened(policy: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """By port: who may reach it."""
    return {port["port"]: rule["from"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}


@pytest.mark.parametrize("peers", [[OPERATOR], [OPERATOR, {"namespaceSelector": {}}]])
def test_servers_are_open_to_the_jobs_pods_and_their_http_to_those_who_are_named(
    peers: list[dict[str, Any]],
) -> None:
    policy = network.policy(job_document(), peers)
    kubernetes_validate.validate(policy, VERSION, strict=True)
    own = [{"podSelector": {"matchLabels": {"elastic-ps.dev/job": "digits"}}}]
    assert opened(policy) == {2222: own, 2223: own, 8080: peers}
    assert policy["metadata"]["ownerReferences"][0]["uid"] == "uid-digits"
    selector = policy["spec"]["podSelector"]
    assert selector["matchLabels"] == {"elastic-ps.dev/job": "digits"}
    assert selector["matchExpressions"][0]["values"] == ["ps", "standby"], "side-cars of workers may serve"


def test_a_list_of_nobody_does_not_let_everybody_in() -> None:
    assert 8080 not in opened(network.policy(job_document(), []))


def test_workers_that_add_up_gradients_are_open_to_each_other_alone() -> None:
    """At any port, since the system chooses those; and only in a job with strategy all-reduce."""
    job = job_document(strategy="all-reduce", worker={"replicas": 2})
    policy = network.among_workers(job)
    kubernetes_validate.validate(policy, VERSION, strict=True)
    workers = {"matchLabels": {"elastic-ps.dev/job": "digits", "elastic-ps.dev/role": "worker"}}
    assert policy["spec"] == {
        "podSelector": workers,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": workers}]}],
    }
    simulation = Simulation(job)
    simulation.options = GUARDED
    simulation.settle()
    assert simulation.policies == {"digits-servers", "digits-workers"}
    for pod in simulation.pods.values():
        selected = workers["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert selected == ("-worker-" in pod["metadata"]["name"])


ON_HOSTS = replace(GUARDED, policy=Policy({"default": Permissions(host_namespaces=True)}))


def test_the_ports_stay_closed_for_the_host_network_where_nobody_has_certificates() -> None:
    template = {"spec": {"hostNetwork": True}}
    simulation = Simulation(job_document(worker={"replicas": 1, "template": template}))
    simulation.options = ON_HOSTS
    simulation.settle()
    assert simulation.policies == {"digits-servers"}


def test_pods_on_the_host_network_reach_the_servers_whose_names_they_can_look_up() -> None:
    """Selectors of pods do not find them, and the DNS of a node does not know Services."""
    simulation = Simulation(job_document(worker={"replicas": 1}))
    simulation.options = replace(ON_HOSTS, secured=True)
    simulation.settle()
    assert simulation.policies == {"digits-servers"}
    template = {"spec": {"hostNetwork": True}}
    simulation.edit(worker={"replicas": 2, "template": template})
    plan = simulation.plan()
    (created,) = (a for a in plan.actions if isinstance(a, Create) and a.kind == "NetworkPolicy")
    assert created.name == "digits-host-network"
    kubernetes_validate.validate(created.manifest, VERSION, strict=True)
    (rule,) = created.manifest["spec"]["ingress"]
    assert ([port["port"] for port in rule["ports"]], "from" in rule) == ([2222, 2223], False)
    servers = network.policy(job_document(), [])["spec"]["podSelector"]
    assert created.manifest["spec"]["podSelector"] == servers
    simulation.settle()
    assert simulation.pods["digits-worker-1"]["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert "dnsPolicy" not in simulation.pods["digits-ps-0"]["spec"]


def test_the_policy_comes_before_the_servers_and_comes_again() -> None:
    simulation = Simulation(job_document())
    simulation.options = GUARDED
    first = simulation.plan().actions[0]
    assert isinstance(first, Create)
    assert (first.kind, first.name) == ("NetworkPolicy", "digits-servers")
    simulation.settle()
    assert simulation.step().actions == ()
    simulation.policies.clear()
    simulation.settle()
    assert simulation.policies == {"digits-servers"}
    assert simulation.status["phase"] == "Running"
    assert running().policies == set(), "only where it is asked for"


def test_the_operator_finds_its_policy_again(tmp_path: Path) -> None:
    server = ApiServer()
    try:
        server.add_job()
        operator = Operator(server, tmp_path, options=GUARDED)
        operator.turns(3)
        assert server.names("networkpolicies") == ["digits-servers"]
        assert len(server.asked("POST", "networkpolicies")) == 1
    finally:
        server.close()


def test_the_chart_lets_the_operator_read_status_and_turns_it_off() -> None:
    values = {"jobNetworkPolicy": {"httpFrom": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]}}
    found = list(documents(values))
    (deployment,) = (d for d in found if d["kind"] == "Deployment")
    template = deployment["spec"]["template"]
    (argument,) = (a for a in template["spec"]["containers"][0]["args"] if a.startswith("--http-from"))
    peers = parse([argument]).options.http_from
    assert peers is not None
    operator, prometheus = peers
    labels = operator["podSelector"]["matchLabels"]
    assert labels.items() <= template["metadata"]["labels"].items()
    namespace = operator["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
    assert namespace == deployment["metadata"]["namespace"]
    assert prometheus == {"namespaceSelector": {"matchLabels": {"a": "b"}}}
    off = list(documents({**EVERYTHING, "jobNetworkPolicy": {"enabled": False}}))
    assert "networkpolicies" in str([d for d in found if d["kind"] == "ClusterRole"])
    assert "networkpolicies" not in str([d for d in off if d["kind"] in ("Role", "ClusterRole")])
    assert "--http-from" not in str([d for d in off if d["kind"] == "Deployment"])
    assert parse([]).options.http_from is None


@pytest.mark.parametrize("text", ["{", "{}", "[{}]", '["a"]', '[{"podselector": {}}]'])
def test_peers_that_are_none_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--http-from", text])
    assert text in capsys.readouterr().err
