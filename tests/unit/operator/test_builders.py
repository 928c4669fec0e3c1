"""The pods of a job: secure by default, the template merged over them, the contract on top."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_operator import builders, names
from elastic_operator.manifests import owner
from elastic_operator.wiring import host, service
from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.contract import env
from tests.testing.simulation import job_document


def build(role: env.Role, index: int = 0, **spec: Any) -> dict[str, Any]:
    job = job_document(**spec)
    return builders.pod(job, TrainingJobSpec.model_validate(job["spec"]), role, index)


def container(pod: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = pod["spec"]["containers"][0]
    return found


@pytest.mark.parametrize("role", ["ps", "worker"])
def test_pod_security_restricted(role: env.Role) -> None:
    pod = build(role)
    security = pod["spec"]["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(pod)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert pod["spec"]["automountServiceAccountToken"] is False
    kinds = {key for volume in pod["spec"]["volumes"] for key in volume if key != "name"}
    assert kinds <= {"emptyDir", "persistentVolumeClaim", "downwardAPI"}


@pytest.mark.parametrize(
    ("role", "module"),
    [("ps", "elastic_ps.server"), ("standby", "elastic_ps.server"), ("worker", "elastic_ps.worker")],
)
def test_each_role_runs_its_program(role: env.Role, module: str) -> None:
    assert container(build(role))["command"] == ["python", "-m", module]


@pytest.mark.parametrize("role", ["ps", "standby", "worker", "evaluator"])
def test_kubernetes_decides_when_an_image_is_pulled_again(role: env.Role) -> None:
    """It pulls `latest` each time: otherwise pods of one job would run different code on different nodes."""
    job = job_document(image="me/train:latest", evaluator={"entrypoint": "train:evaluate"})
    pod = builders.pod(job, TrainingJobSpec.model_validate(job["spec"]), role, 0)
    assert container(pod)["image"] == "me/train:latest"
    assert "imagePullPolicy" not in container(pod)


def test_the_process_is_told_who_it_is() -> None:
    pod = build("worker", 3, parameterServer={"replicas": 2}, worker={"template": {"spec": {}}})
    variables = {item["name"]: item.get("value", "") for item in container(pod)["env"]}
    told = env.read(variables)
    assert told.run, "so that two jobs of one name are told apart on a volume"
    assert (told.job, told.role, told.index) == ("digits", "worker", 3)
    assert told.addresses == tuple(f"digits-ps-{shard}.digits-servers:2222" for shard in range(2))
    assert told.checkpoints is None
    assert told.spec.entrypoint == "examples.digits.train:main"
    template = {"spec": {"hostNetwork": True, "hostname": "another"}}
    pod = build("worker", 3, worker={"template": template})
    told = env.read({item["name"]: item.get("value", "") for item in container(pod)["env"]})
    assert told.hostname == pod["metadata"]["name"], "by which its incarnations are found"
    server = env.read({item["name"]: item.get("value", "") for item in container(build("ps"))["env"]})
    assert str(server.checkpoints) == names.CHECKPOINT_DIRECTORY
    assert server.resume == "auto"


def test_the_template_is_merged_and_cannot_break_what_is_relied_on() -> None:
    template = {
        "metadata": {"labels": {"team": "a", names.JOB_LABEL: "other"}, "annotations": {"note": "x"}},
        "spec": {
            "restartPolicy": "Always",
            "nodeSelector": {"gpu": "yes"},
            "volumes": [{"name": "data", "emptyDir": {}}],
            "containers": [
                {
                    "name": "worker",
                    "image": "mine:1",
                    "restartPolicy": "Always",
                    "restartPolicyRules": [{"action": "Restart"}],
                    "env": [
                        {"name": "ELASTIC_PS_JOB", "value": "other"},
                        {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
                    ],
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                },
                {"name": "sidecar", "image": "side:1"},
            ],
        },
    }
    pod = build("worker", worker={"template": template})
    assert pod["metadata"]["annotations"]["note"] == "x"
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["labels"][names.JOB_LABEL] == "digits"
    assert pod["spec"]["restartPolicy"] == "Never"
    assert [c["name"] for c in pod["spec"]["containers"]] == ["worker", "sidecar"]
    assert [v["name"] for v in pod["spec"]["volumes"]] == ["tmp", "shm", "data"]
    main = container(pod)
    assert main["image"] == "mine:1"
    assert not main.keys() & {"restartPolicy", "restartPolicyRules"}
    assert main["securityContext"]["readOnlyRootFilesystem"] is True
    assert {m["mountPath"] for m in main["volumeMounts"]} == {"/tmp", "/dev/shm", "/data"}
    variables = {item["name"]: item for item in main["env"]}
    assert variables["ELASTIC_PS_JOB"]["value"] == "digits"
    assert "valueFrom" in variables["SECRET"]


@pytest.mark.parametrize(
    ("resources", "threads"),
    [
        ({"limits": {"cpu": "4"}, "requests": {"cpu": "1"}}, "4"),
        ({"limits": {"memory": "1Gi"}, "requests": {"cpu": 3}}, "3"),
        ({"limits": {"cpu": "2500m"}}, "2"),
        ({"limits": {"cpu": "4000m"}}, "4"),
        ({"requests": {"cpu": "100m"}}, "1"),
        ({"limits": {"cpu": 1.5}}, "1"),
        ({"limits": {"memory": "1Gi"}}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("role", ["ps", "worker"])
def test_as_many_threads_as_cores(role: env.Role, resources: dict[str, Any], threads: str | None) -> None:
    template = {"spec": {"containers": [{"name": names.CONTAINER[role], "resources": resources}]}}
    built = container(build(role, parameterServer={"template": template}, worker={"template": template}))
    variables = {item["name"]: item.get("value", "") for item in built["env"]}
    assert [variables.get(name) for name in env.THREAD_VARIABLES] == [threads] * 3


def test_threads_that_a_person_has_set_stay() -> None:
    limit: dict[str, Any] = {"limits": {"cpu": "4"}}
    own = {"name": "OMP_NUM_THREADS", "value": "2"}
    assert builders.with_threads([own], limit) == [own]
    other = {"name": "MKL_NUM_THREADS", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}
    variables = builders.with_threads([other], limit)
    assert variables[0] == other
    assert sorted(item["name"] for item in variables) == sorted(env.THREAD_VARIABLES)


def test_an_empty_probe_removes_the_default() -> None:
    probes: dict[str, Any] = {
        "containers": [{"name": "parameter-server", "livenessProbe": {}, "startupProbe": None}]
    }
    main = container(build("ps", parameterServer={"template": {"spec": probes}}))
    assert "livenessProbe" not in main
    assert "startupProbe" not in main
    assert "readinessProbe" in main


LOST = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
NOT_READY, UNREACHABLE = "node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"


@pytest.mark.parametrize("role", ["ps", "worker"])
def test_a_lost_node_is_noticed_soon(role: env.Role) -> None:
    assert build(role)["spec"]["tolerations"] == [{"key": NOT_READY, **LOST}, {"key": UNREACHABLE, **LOST}]


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ([{"key": "gpu", "operator": "Exists"}], [NOT_READY, UNREACHABLE]),
        ([{"key": UNREACHABLE, "operator": "Exists", "tolerationSeconds": 900}], [NOT_READY]),
        ([{"key": NOT_READY, "effect": "NoSchedule"}], [NOT_READY, UNREACHABLE]),
        ([{"operator": "Exists"}], []),
    ],
)
def test_tolerations_that_a_person_has_set_stay(given: list[dict[str, Any]], added: list[str]) -> None:
    template = {"spec": {"tolerations": given}}
    tolerations = build("worker", worker={"template": template})["spec"]["tolerations"]
    assert tolerations[: len(given)] == given
    assert [item["key"] for item in tolerations[len(given) :]] == added


def test_names_are_short_enough() -> None:
    longest = names.pod("x" * 52, "worker", 99999)
    assert len(longest) <= 65
    assert len(names.service("x" * 52)) <= 63
    assert max(map(len, host("x" * 52, "standby", 63).split("."))) <= 63, "a label of DNS"


def test_the_jobs_objects_are_its_own() -> None:
    job = job_document()
    reference = owner(job)
    assert reference["controller"] is True
    assert (reference["kind"], reference["uid"]) == ("TrainingJob", job["metadata"]["uid"])


def test_an_events_message_is_as_long_as_the_api_allows() -> None:
    made = builders.event(
        job_document(),
        name="e",
        kind="Warning",
        reason="Failed",
        message="x" * 2000,
        now="2026-01-01T00:00:00Z",
    )
    assert made["message"] == "x" * 1024
    assert made["count"] == 1
    assert (made["type"], made["reason"]) == ("Warning", "Failed")


def test_a_server_has_an_address_before_it_is_ready() -> None:
    """It becomes ready by what workers send to it."""
    job = job_document()
    made = service(job)
    assert made["spec"]["clusterIP"] == "None"
    assert made["spec"]["publishNotReadyAddresses"] is True
    assert {port["name"]: (port["port"], port["targetPort"]) for port in made["spec"]["ports"]} == {
        "grpc": (2222, 2222),
        "data": (2223, 2223),
        "http": (8080, 8080),
    }


def test_a_server_has_nine_minutes_to_start_and_one_to_answer() -> None:
    """It may have to load a large model; and its threads may be held up for a while."""
    main = container(build("ps"))
    lasts = {}
    for kind in ("livenessProbe", "readinessProbe"):
        probe = main[kind]
        assert 0 < probe["timeoutSeconds"] <= probe["periodSeconds"], "one at a time"
        lasts[kind] = probe["periodSeconds"] * probe["failureThreshold"]
    assert lasts == {"livenessProbe": 60, "readinessProbe": 6}
    start = main["startupProbe"]
    assert (start["failureThreshold"], start["timeoutSeconds"]) == (2, 300), (
        "see the tests of the probe itself"
    )


def test_a_worker_is_ready_when_it_has_joined() -> None:
    main = container(build("worker"))
    (python, *_, script) = main["readinessProbe"]["exec"]["command"]
    assert python == "python"
    (joined,) = (item["value"] for item in main["env"] if item["name"] == "ELASTIC_PS_JOINED")
    assert repr(joined) in script
    assert "startupProbe" not in main, "a script may take its time before that"
    assert "readinessProbe" not in container(build("evaluator", evaluator={"entrypoint": "a:b"}))


def test_a_claim_asks_for_what_the_job_asks_for() -> None:
    def claim(**wanted: str) -> dict[str, Any]:
        job = job_document(parameterServer={"checkpoint": {"volumeClaim": wanted}})
        made = builders.claim(job, TrainingJobSpec.model_validate(job["spec"]))
        assert made["metadata"]["name"] == names.claim("digits")
        labels = {"app.kubernetes.io/instance": "digits"} | made["metadata"]["labels"]
        assert labels == names.pod_labels("digits", "ps", 0), "shard 0's, which all share"
        body: dict[str, Any] = made["spec"]
        return body

    requests = {"requests": {"storage": "2Gi"}}
    assert claim(storage="2Gi") == {"accessModes": ["ReadWriteOnce"], "resources": requests}
    asked = claim(storage="2Gi", storageClassName="fast", accessMode="ReadWriteMany")
    assert asked == {"accessModes": ["ReadWriteMany"], "resources": requests, "storageClassName": "fast"}
    job = job_document()
    with pytest.raises(ValueError, match=r"no parameterServer\.checkpoint\.volumeClaim"):
        builders.claim(job, TrainingJobSpec.model_validate(job["spec"]))


@pytest.mark.parametrize(("role", "module"), [("ps", "server"), ("standby", "server"), ("worker", "worker")])
def test_each_role_runs_its_own_program_and_servers_alone_keep_checkpoints(
    role: env.Role, module: str
) -> None:
    pod = build(role)
    main = container(pod)
    assert main["name"] == names.CONTAINER[role]
    assert main["command"][-2:] == ["-m", f"elastic_ps.{module}"]
    mounted = [mount["mountPath"] for mount in main["volumeMounts"]]
    assert (names.CHECKPOINT_DIRECTORY in mounted) == (module == "server")
    assert ("livenessProbe" in main) == (module == "server")
    assert {mount["name"] for mount in main["volumeMounts"]} == {v["name"] for v in pod["spec"]["volumes"]}


def test_a_server_has_the_time_to_keep_the_last_version_before_it_is_killed() -> None:
    """And no pod is told of all services of its namespace, or runs as root."""
    specs = {role: build(role)["spec"] for role in ("ps", "standby", "worker")}
    grace = {role: spec["terminationGracePeriodSeconds"] for role, spec in specs.items()}
    assert grace == {
        "ps": builders.PS_GRACE_SECONDS,
        "standby": builders.PS_GRACE_SECONDS,
        "worker": builders.WORKER_GRACE_SECONDS,
    }
    for spec in specs.values():
        assert spec["enableServiceLinks"] is False
        security = spec["securityContext"]
        assert len({security[key] for key in ("runAsUser", "runAsGroup", "fsGroup")} - {0}) == 1
    assert [v["emptyDir"] for v in specs["worker"]["volumes"] if v["name"] == "shm"] == [{"medium": "Memory"}]
