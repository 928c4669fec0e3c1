"""With durability standby: what is built, replaced, told and cleaned up; and without it, nothing of that."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from elastic_operator import builders, names
from elastic_operator.plan import Create, Options
from elastic_operator.wiring import service
from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.api.status import Progress, ServerStatus
from elastic_ps.contract import env
from tests.testing.simulation import Simulation, job_document

CLAIM: dict[str, Any] = {"volumeClaim": {"storage": "1Gi"}}
STANDBY: dict[str, Any] = {"durability": "standby", "checkpoint": CLAIM}


def told(*following: bool, finished: bool = False) -> ServerStatus:
    """What shard 0 says."""
    progress = Progress(finished=finished, records_expected=10, records_applied=10 if finished else 4)
    return ServerStatus(
        job="digits",
        shard=0,
        shards=len(following),
        term=1,
        ready=True,
        progress=progress,
        standbys=list(following),
    )


def running(shards: int = 1, **spec: Any) -> Simulation:
    """A job whose standbys follow."""
    server = {**STANDBY, "replicas": shards}
    simulation = Simulation(job_document(**{"parameterServer": server, "worker": {"replicas": 2}, **spec}))
    simulation.server = told(*[True] * shards)
    simulation.settle()
    assert simulation.status["phase"] == "Running"
    assert simulation.condition("Degraded")["status"] == "False"
    return simulation


def environment_of(pod: dict[str, Any]) -> env.ProcessEnvironment:
    variables = pod["spec"]["containers"][0]["env"]
    return env.read({item["name"]: item.get("value", "") for item in variables})


def volumes(pod: dict[str, Any]) -> dict[str, Any]:
    return {volume["name"]: volume for volume in pod["spec"]["volumes"]}


def test_each_shard_has_a_standby_that_sees_the_same_checkpoints() -> None:
    simulation = running(shards=2)
    servers = {f"digits-{role}-{shard}" for role in ("ps", "standby") for shard in range(2)}
    assert set(simulation.pods) - set(simulation.workers()) == servers
    assert set(simulation.services) == {"digits-servers"}, "the standbys have their names from it, too"
    assert simulation.claims == {"digits-ps-0"}
    shared = {"claimName": "digits-ps-0"}
    for name in servers:
        assert volumes(simulation.pods[name])["checkpoints"]["persistentVolumeClaim"] == shared
    assert simulation.status["parameterServer"] == {"ready": 2, "term": 1, "standbys": 2}


def test_a_standby_is_told_who_it_is_and_its_shard_where_it_is() -> None:
    simulation = running(shards=2)
    standby = environment_of(simulation.pods["digits-standby-1"])
    assert (standby.role, standby.index) == ("standby", 1)
    assert str(standby.checkpoints) == names.CHECKPOINT_DIRECTORY
    for shard in range(2):
        server = environment_of(simulation.pods[f"digits-ps-{shard}"])
        assert server.standbys == tuple(f"digits-standby-{i}.digits-servers:2222" for i in range(2))
        assert server.addresses == tuple(f"digits-ps-{i}.digits-servers:2222" for i in range(2))
    assert environment_of(simulation.pods["digits-worker-0"]).standbys == ()


def test_a_standby_is_a_pod_like_its_shard() -> None:
    own = {"containers": [{"name": "parameter-server", "resources": {"limits": {"memory": "8Gi"}}}]}
    job = job_document(parameterServer={**STANDBY, "template": {"spec": own}})
    spec = TrainingJobSpec.model_validate(job["spec"])
    server, standby = (builders.pod(job, spec, role, 0) for role in ("ps", "standby"))
    assert standby["spec"]["containers"][0]["resources"] == {"limits": {"memory": "8Gi"}}
    assert standby["spec"]["restartPolicy"] == "Always"
    assert standby["metadata"]["labels"][names.ROLE_LABEL] == "standby"
    assert standby["metadata"]["ownerReferences"] == server["metadata"]["ownerReferences"]
    for pod in (server, standby):
        del pod["spec"]["containers"][0]["env"]
    address = service(job)
    for pod in (server, standby):
        assert pod["spec"].pop("subdomain") == address["metadata"]["name"]
        assert pod["spec"].pop("hostname") == pod["metadata"]["name"]
        assert address["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    told = server["spec"]["volumes"], server["spec"]["containers"][0]["volumeMounts"]
    for items in told:  # in which shard 0 is told what of the job has changed
        items.remove(next(item for item in items if item["name"] == "desired"))
    assert standby["spec"] == server["spec"]


def test_a_volume_for_many_nodes_lets_the_standby_prefer_another() -> None:
    claim = {"volumeClaim": {"storage": "1Gi", "accessMode": "ReadWriteMany"}}
    job = job_document(parameterServer={**STANDBY, "checkpoint": claim, "replicas": 2})
    spec = TrainingJobSpec.model_validate(job["spec"])
    assert builders.claim(job, spec)["spec"]["accessModes"] == ["ReadWriteMany"]
    apart = builders.pod(job, spec, "standby", 1)["spec"]["affinity"]
    assert apart.keys() == {"podAntiAffinity"}
    (preferred,) = apart["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    term = preferred["podAffinityTerm"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    server = builders.pod(job, spec, "ps", 1)
    assert term["labelSelector"]["matchLabels"].items() <= server["metadata"]["labels"].items()
    assert "affinity" not in server["spec"]


def test_a_volume_for_one_node_keeps_the_servers_together() -> None:
    job = job_document(parameterServer=STANDBY)
    spec = TrainingJobSpec.model_validate(job["spec"])
    assert builders.claim(job, spec)["spec"]["accessModes"] == ["ReadWriteOnce"]
    for role in ("ps", "standby"):
        pod = builders.pod(job, spec, "ps" if role == "ps" else "standby", 0)
        affinity = pod["spec"]["affinity"]["podAffinity"]
        (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
        selector, labels = term["labelSelector"], pod["metadata"]["labels"]
        assert selector["matchLabels"].items() <= labels.items(), "else the first one fits nowhere"
        (expression,) = selector["matchExpressions"]
        assert labels[expression["key"]] in expression["values"]
    assert "affinity" not in builders.pod(job, spec, "worker", 0)["spec"]


def test_without_standbys_everything_is_as_it_was() -> None:
    simulation = Simulation(job_document(parameterServer={"checkpoint": CLAIM}))
    manifests = {a.name: a.manifest for a in simulation.plan().actions if isinstance(a, Create)}
    assert manifests.keys() == {"digits-servers", "digits-ps-0", "digits-worker-0"}
    pod = dict(manifests["digits-ps-0"])
    assert volumes(pod)["checkpoints"]["persistentVolumeClaim"] == {"claimName": "digits-ps-0"}
    assert "affinity" not in pod["spec"]
    assert env.PREFIX + "STANDBYS" not in str(pod)
    assert "accessMode" not in str(pod)
    simulation.settle()
    simulation.server = ServerStatus(job="digits", shard=0, shards=1, term=1, ready=True)
    simulation.settle()
    assert simulation.condition("Degraded")["status"] == "False"
    assert "standbys" not in simulation.status["parameterServer"]


@pytest.mark.parametrize("evicted", [True, False])
def test_a_standby_that_ends_is_replaced_and_nobody_waits_for_it(evicted: bool) -> None:
    simulation = running()
    before = {name: pod["metadata"]["uid"] for name, pod in simulation.pods.items()}
    if evicted:
        status = {"phase": "Failed", "reason": "Evicted", "message": "disk"}
        simulation.pods["digits-standby-0"]["status"] = status
    else:
        del simulation.pods["digits-standby-0"]
    simulation.server = told(False)
    simulation.step()
    assert simulation.status["phase"] == "Running"
    assert simulation.condition("Degraded")["status"] == "True"
    simulation.settle()
    after = {name: pod["metadata"]["uid"] for name, pod in simulation.pods.items()}
    assert {name for name in after if after[name] != before.get(name)} == {"digits-standby-0"}
    assert simulation.status["worker"]["restarts"] == 0
    degraded = simulation.condition("Degraded")
    assert degraded["reason"] == "StandbyNotFollowing", "a pod is not enough: it has to have every version"
    assert "standby of shard 0 does not have every version yet" in degraded["message"]
    assert simulation.status["parameterServer"]["standbys"] == 0
    simulation.server = told(True)
    simulation.settle()
    assert simulation.condition("Degraded")["status"] == "False"
    assert simulation.status["parameterServer"]["standbys"] == 1


def test_the_shard_that_is_not_followed_is_named() -> None:
    simulation = running(shards=2)
    simulation.server = told(True, False)
    simulation.step()
    message = simulation.condition("Degraded")["message"]
    assert "shard 1" in message
    assert "shard 0" not in message


def test_a_standby_that_just_starts_is_no_problem() -> None:
    simulation = Simulation(job_document(parameterServer=STANDBY))
    simulation.step()
    simulation.start_pods()
    simulation.server = told(False)
    simulation.step()
    assert simulation.status["phase"] == "Running"
    assert simulation.condition("Degraded")["status"] == "False"
    simulation.now += Options().follow_limit
    simulation.step()
    assert simulation.condition("Degraded")["reason"] == "StandbyNotFollowing"


def test_a_standby_that_fits_nowhere_is_told_and_the_job_runs() -> None:
    simulation = Simulation(job_document(parameterServer=STANDBY))
    simulation.step()
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no cpu"}
    held = {"phase": "Pending", "held": True, "conditions": [condition]}
    simulation.pods["digits-standby-0"]["status"] = held
    simulation.step()
    assert simulation.condition("Running")["reason"] == "WaitingForParameterServer"
    simulation.start_pods()
    simulation.server = told(False)
    simulation.step()
    assert simulation.status["phase"] == "Running"
    assert simulation.condition("Degraded")["reason"] == "Unschedulable"
    assert "digits-standby-0" in simulation.condition("Degraded")["message"]


def test_what_shard_0_does_not_tell_is_not_known() -> None:
    simulation = running()
    simulation.server = None
    simulation.step()
    assert simulation.status["parameterServer"] == {"ready": 1, "term": 1}
    assert simulation.condition("Degraded")["status"] == "False"


def test_scaling_leaves_the_standbys_alone() -> None:
    simulation = running()
    before = simulation.pods["digits-standby-0"]["metadata"]["uid"]
    for replicas in (4, 1):
        simulation.scale(replicas)
        simulation.settle()
        assert len(simulation.workers()) == replicas
        assert simulation.pods["digits-standby-0"]["metadata"]["uid"] == before


def test_suspend_stops_the_standbys_with_the_servers() -> None:
    simulation = running()
    simulation.edit(runPolicy={"suspend": True})
    simulation.server = None
    simulation.step()
    assert set(simulation.pods) == {"digits-ps-0", "digits-standby-0"}
    simulation.step()
    simulation.step()
    assert simulation.pods == {}
    assert simulation.status["phase"] == "Suspended"
    simulation.edit(runPolicy={"suspend": False})
    simulation.settle()
    assert "digits-standby-0" in simulation.pods


@pytest.mark.parametrize(("policy", "left"), [("Running", 2), ("None", 4), ("All", 0)])
def test_a_finished_job_treats_standbys_as_servers(policy: str, left: int) -> None:
    simulation = running(runPolicy={"cleanPodPolicy": policy})
    simulation.server = told(True, finished=True)
    for worker in simulation.workers():
        simulation.end(worker, 0)
    simulation.settle()
    assert simulation.status["phase"] == "Succeeded"
    assert len(simulation.pods) == left
    assert "standbys" not in simulation.status["parameterServer"]


@pytest.mark.parametrize("server", [{"durability": "standby"}, {"replicas": 2}])
def test_no_several_servers_without_a_volume_to_share(server: dict[str, Any]) -> None:
    simulation = Simulation(job_document(parameterServer=server))
    simulation.settle()
    assert simulation.pods == {}
    failed = simulation.condition("Failed")
    assert failed["reason"] == "InvalidSpec"
    assert f"{next(iter(server))} {next(iter(server.values()))} needs" in failed["message"]
    assert "checkpoint.volumeClaim, existingClaim or resumeFrom" in failed["message"]
    simulation.edit(parameterServer=STANDBY)
    simulation.settle()
    assert simulation.status["phase"] == "Running"


@pytest.mark.parametrize("writes", range(8))
def test_killed_after_any_write_it_comes_to_the_same_rest(writes: int) -> None:
    simulation = Simulation(job_document(parameterServer=STANDBY))
    simulation.server = told(True)
    simulation.step(writes)
    simulation.now += timedelta(seconds=5)
    simulation.settle()
    assert set(simulation.pods) == {"digits-ps-0", "digits-standby-0", "digits-worker-0"}
    assert simulation.made == 3
    before = simulation.writes
    assert simulation.step().actions == ()
    assert simulation.writes == before


def test_the_standby_of_the_last_shard_has_a_valid_name() -> None:
    assert len(names.pod("x" * 52, "standby", 63)) <= 63
