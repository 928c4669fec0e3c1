"""What a template may hold: nothing that gives a pod more than whoever wrote the job may be meant to have."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_operator.permissions import Permissions, Policy, read_policy
from elastic_operator.plan import Options
from elastic_operator.settings import parse
from elastic_ps.errors import UsageError
from tests.unit.simulation import Simulation, job_document, running


def own(**fields: Any) -> dict[str, Any]:
    """A template's spec with these fields of the worker's own container."""
    return {"containers": [{"name": "worker", **fields}]}


def volume(**source: Any) -> dict[str, Any]:
    return {"volumes": [{"name": "v", **source}]}


def projected(**source: Any) -> dict[str, Any]:
    return volume(projected={"sources": [{"configMap": {"name": "c"}}, source]})


def secured(**fields: Any) -> dict[str, Any]:
    return own(securityContext=fields)


IN_OWN = "spec.containers[worker]"
FORBIDDEN: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    (volume(hostPath={"path": "/data/a"}), "spec.volumes[v].hostPath", {"hostPaths": ["/data"]}),
    (volume(hostPath={}), "spec.volumes[v].hostPath", {"hostPaths": ["/"]}),
    (volume(nfs={"server": "s", "path": "/"}), "spec.volumes[v].nfs", {"volumes": ["nfs"]}),
    (volume(csi={"driver": "secrets"}), "spec.volumes[v].csi", {"volumes": ["*"]}),
    (volume(secret={"secretName": "s"}), "spec.volumes[v].secret", {"secrets": ["s"]}),
    (projected(secret={"name": "s"}), "spec.volumes[v].projected.sources[1].secret", {"secrets": ["s*"]}),
    (
        projected(serviceAccountToken={"path": "t"}),
        "spec.volumes[v].projected.sources[1].serviceAccountToken",
        {"serviceAccounts": ["default"]},
    ),
    (own(envFrom=[{"secretRef": {"name": "s"}}]), f"{IN_OWN}.envFrom[0]", {"secrets": ["s"]}),
    (
        own(env=[{"name": "E", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]),
        f"{IN_OWN}.env[E]",
        {"secrets": ["s"]},
    ),
    ({"hostNetwork": True}, "spec.hostNetwork", {"hostNamespaces": True}),
    ({"hostPID": True}, "spec.hostPID", {"hostNamespaces": True}),
    ({"hostIPC": True}, "spec.hostIPC", {"hostNamespaces": True}),
    (
        own(ports=[{"containerPort": 1, "hostPort": 1}]),
        f"{IN_OWN}.ports[1].hostPort",
        {"hostNamespaces": True},
    ),
    (
        own(livenessProbe={"httpGet": {"port": 80, "host": "169.254.169.254"}}),
        f"{IN_OWN}.livenessProbe.httpGet.host",
        {"hostNamespaces": True},
    ),
    (
        own(lifecycle={"preStop": {"tcpSocket": {"port": 1, "host": "h"}}}),
        f"{IN_OWN}.preStop.tcpSocket.host",
        {"hostNamespaces": True},
    ),
    ({"serviceAccountName": "admin"}, "spec.serviceAccountName", {"serviceAccounts": ["admin"]}),
    ({"serviceAccount": "admin"}, "spec.serviceAccount", {"serviceAccounts": ["*"]}),
    (
        {"automountServiceAccountToken": True},
        "spec.automountServiceAccountToken",
        {"serviceAccounts": ["default"]},
    ),
    ({"nodeName": "n"}, "spec.nodeName", {"nodeNames": True}),
    ({"priorityClassName": "default"}, "spec.priorityClassName", {"priorityClasses": ["*"]}),
    ({"priorityClassName": "high"}, "spec.priorityClassName", {"priorityClasses": ["high"]}),
    (
        secured(capabilities={"add": ["CHOWN", "SYS_ADMIN"]}),
        f"{IN_OWN}.securityContext.capabilities.add[SYS_ADMIN]",
        {"capabilities": ["SYS_ADMIN"]},
    ),
    *(
        (secured(**fields), f"{IN_OWN}.securityContext.{path}", {"privileged": True})
        for fields, path in (
            ({"privileged": True}, "privileged"),
            ({"procMount": "Unmasked"}, "procMount"),
            ({"seccompProfile": {"type": "Unconfined"}}, "seccompProfile.type"),
            ({"appArmorProfile": {"type": "Unconfined"}}, "appArmorProfile.type"),
            ({"seLinuxOptions": {"type": "spc_t"}}, "seLinuxOptions.type"),
            ({"seLinuxOptions": {"user": "u"}}, "seLinuxOptions.user"),
            ({"seLinuxOptions": {"role": "r"}}, "seLinuxOptions.role"),
            ({"windowsOptions": {"hostProcess": True}}, "windowsOptions.hostProcess"),
        )
    ),
    (
        {"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}},
        "spec.securityContext.sysctls[kernel.msgmax]",
        {"privileged": True},
    ),
    (
        {"initContainers": [{"name": "i", "image": "i", "securityContext": {"privileged": True}}]},
        "spec.initContainers[i].securityContext.privileged",
        {"privileged": True},
    ),
    (
        {"containers": [{"name": "side", "image": "i", "envFrom": [{"secretRef": {"name": "s"}}]}]},
        "spec.containers[side].envFrom[0]",
        {"secrets": ["s"]},
    ),
]


def simulated(template: dict[str, Any], policy: Policy | None = None, role: str = "worker") -> Simulation:
    """A job with this template, after the operator has done all that it does."""
    simulation = Simulation(job_document("digits", **{role: {"template": {"spec": template}}}))
    simulation.options = Options(policy=policy or Policy())
    simulation.settle()
    return simulation


@pytest.mark.parametrize(("template", "path", "permissions"), FORBIDDEN, ids=[f[1] for f in FORBIDDEN])
def test_what_is_not_permitted_is_refused_by_its_path_and_said_how_to_permit(
    template: dict[str, Any], path: str, permissions: dict[str, Any]
) -> None:
    refused = simulated(template)
    assert refused.pods == {}
    assert refused.services == {}
    failed = refused.condition("Failed")
    assert failed["reason"] == "InvalidSpec"
    (permission,) = permissions
    said = f"spec.worker.template.{path} is not permitted in the namespace default"
    assert said in failed["message"]
    assert f"templatePermissions: {{default: {{{permission}: " in failed["message"]
    for namespace in ("default", "*"):
        opened = Policy({namespace: Permissions.model_validate(permissions)})
        assert simulated(template, opened).status["phase"] == "Running"
    elsewhere = Policy({"another": Permissions.model_validate(permissions)})
    assert simulated(template, elsewhere).status["phase"] == "Failed"


def test_servers_are_bound_by_the_same_rules() -> None:
    failed = simulated({"hostNetwork": True}, role="parameterServer").condition("Failed")
    assert "spec.parameterServer.template.spec.hostNetwork" in failed["message"]


def test_an_annotation_that_takes_a_profile_away_is_refused() -> None:
    key = "container.apparmor.security.beta.kubernetes.io/worker"
    template = {"metadata": {"annotations": {key: "unconfined"}}}
    simulation = Simulation(job_document(worker={"template": template}))
    simulation.settle()
    assert key in simulation.condition("Failed")["message"]


@pytest.mark.parametrize(
    "template",
    [
        {"imagePullSecrets": [{"name": "registry"}]},
        {"serviceAccountName": "default"},
        {"nodeSelector": {"gpu": "yes"}, "runtimeClassName": "gvisor"},
        volume(persistentVolumeClaim={"claimName": "data"}),
        volume(configMap={"name": "c"}),
        volume(ephemeral={"volumeClaimTemplate": {}}),
        projected(downwardAPI={"items": []}),
        own(env=[{"name": "E", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]),
        secured(runAsUser=0, runAsNonRoot=False, capabilities={"add": ["NET_BIND_SERVICE"]}),
        {"securityContext": {"sysctls": [{"name": "net.ipv4.tcp_syncookies", "value": "1"}]}},
    ],
)
def test_what_stays_within_a_namespace_needs_no_permission(template: dict[str, Any]) -> None:
    assert simulated(template).status["phase"] == "Running"


@pytest.mark.parametrize("path", ["/data/../etc", "/database", "/", "/data/a/../../etc"])
def test_a_folder_beside_the_permitted_one_is_another(path: str) -> None:
    policy = Policy({"*": Permissions(host_paths=["/data/"])})
    assert simulated(volume(hostPath={"path": path}), policy).status["phase"] == "Failed"


def test_permissions_of_all_namespaces_and_of_one_add_up() -> None:
    policy = read_policy(
        '{"*": {"secrets": ["a"]}, "team": {"secrets": ["b"], "privileged": true}, "x": null}'
    )
    assert policy.of("team") == Permissions(secrets=["a", "b"], privileged=True)
    assert policy.of("x") == policy.of("other") == Permissions(secrets=["a"])


def test_a_running_job_goes_on_when_it_is_edited_to_what_is_not_permitted() -> None:
    simulation = running()
    simulation.edit(worker={"template": {"spec": {"hostNetwork": True}}})
    simulation.settle()
    assert simulation.status["phase"] == "Running"
    assert simulation.condition("Degraded")["reason"] == "InvalidSpec"
    assert "hostNetwork is not permitted" in simulation.condition("Degraded")["message"]
    assert not any("hostNetwork" in pod["spec"] for pod in simulation.pods.values())


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "JSON object"),
        ("[]", "JSON object"),
        ('{"team": {"secret": ["a"]}}', "known fields: hostPaths"),
        ('{"team": {"secrets": "a"}}', "secrets"),
    ],
)
def test_a_policy_that_cannot_be_read_is_refused_in_words(
    text: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=word):
        read_policy(text)
    with pytest.raises(SystemExit):
        parse(["--template-permissions", text])
    assert word in capsys.readouterr().err
    given = parse(["--template-permissions", '{"team": {"nodeNames": true}}'])
    assert given.options.policy.of("team").node_names
