"""The chart, the CRD and the manifests: generated files are up to date, what is rendered is valid."""

from __future__ import annotations

import base64
import copy
import itertools
import json
import re
import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from helm_python import Chart, HelmError, lint

from elastic_operator import builders, crd, names, settings
from elastic_operator.permissions import Permissions
from elastic_operator.wiring import service
from elastic_ps import __version__
from elastic_ps.api.job import TrainingJobSpec, load_job
from tests.testing.simulation import job_document
from tools.chart_values import PAGE, page, values
from tools.render_install import CHART, ROOT, TARGET, install_manifest, render

VERSION = "1.34"
EVERYTHING = {
    "namespaces": ["one", "two"],
    "replicas": 2,
    "networkPolicy": {"enabled": True},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "imagePullSecrets": [{"name": "registry"}],
    "templatePermissions": {"*": {"secrets": ["a"]}, "one": {"hostPaths": ["/data"], "privileged": True}},
    "podLabels": {"a": "b"},
    "podAnnotations": {"c": "d"},
    "nodeSelector": {"e": "f"},
    "tolerations": [{"operator": "Exists"}],
    "operator": {"extraArgs": ["--watch-limit=60s"]},
    "image": {"repository": "r/operator", "digest": f"sha256:{'0' * 64}"},
    "commonLabels": {"team": "platform"},
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy"}],
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"},
        {
            "maxSkew": 2,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {"a": "b"}},
        },
    ],
    "podMonitor": {"enabled": True},
    "podDisruptionBudget": {"enabled": True},
}


def documents(values: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    for name, text in render(values).items():
        if name.endswith(".yaml"):
            yield from (document for document in yaml.safe_load_all(text) if document)


def test_metrics_of_jobs_keep_their_label() -> None:
    (monitor,) = (each for each in documents(EVERYTHING) if each["kind"] == "PodMonitor")
    first, second = monitor["spec"]["podMetricsEndpoints"][0]["metricRelabelings"]
    assert (first["sourceLabels"], first["targetLabel"]) == (["exported_job"], "job")
    assert (second["action"], second["regex"]) == ("labeldrop", "exported_job")


def test_a_version_with_a_commit_is_a_valid_label(tmp_path: Path) -> None:
    """Flux adds one to the version of a chart in a repository."""
    shutil.copytree(CHART, tmp_path / "chart")
    chart = tmp_path / "chart" / "Chart.yaml"
    chart.write_text(re.sub("(?m)^version: .*$", "version: 0.1.0+53d9c5dffd49", chart.read_text()))
    with Chart.load(tmp_path / "chart") as found:
        texts = found.render(name="elastic-ps", namespace="default").values()
    assert any("helm.sh/chart: elastic-ps-0.1.0_53d9c5dffd49" in text for text in texts)


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["default", "everything"])
def test_rendering_is_valid_for_a_current_kubernetes(values: dict[str, Any]) -> None:
    kinds = set()
    for document in documents(values):
        kinds.add(document["kind"])
        if document["kind"] in ("ServiceMonitor", "PodMonitor"):
            continue
        if document["kind"] == "CustomResourceDefinition":
            continue  # its schema is recursive, and no longer published; the API server is the judge
        kubernetes_validate.validate(document, VERSION, strict=True)
    assert {"Deployment", "Service", "ServiceAccount", "CustomResourceDefinition"} <= kinds
    assert ("ClusterRole" in kinds) != bool(values)


def test_pods_and_services_of_a_job_are_valid_for_a_current_kubernetes() -> None:
    job = job_document()
    spec = TrainingJobSpec.model_validate(
        {**job["spec"], "parameterServer": {"checkpoint": {"volumeClaim": {"storageClassName": "fast"}}}}
    )
    for manifest in (
        builders.pod(job, spec, "ps", 0),
        builders.pod(job, spec, "worker", 1),
        service(job),
        builders.claim(job, spec),
        builders.event(job, name="e", kind="Normal", reason="R", message="m", now="2026-01-01T00:00:00Z"),
    ):
        kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_chart_has_no_findings() -> None:
    findings = lint(str(CHART), strict=True)
    assert findings["errors"] == []
    assert findings["messages"] == []


def test_the_icon_is_that_of_the_file() -> None:
    icon = yaml.safe_load((CHART / "Chart.yaml").read_text())["icon"]
    kind, _, content = icon.partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(content) == (CHART / "icon.svg").read_bytes()


def test_the_page_has_every_value_and_says_what_it_is() -> None:
    assert PAGE.read_text() == page(), "run `make manifests`"
    text = (CHART / "values.yaml").read_text()
    described = {path: said for path, _, said in values(text)}
    assert {path.partition(".")[0] for path in described} == yaml.safe_load(text).keys()
    assert [path for path, said in described.items() if not said] == []


@pytest.mark.parametrize(
    "values",
    [
        {"operator": {"concurrency": 0}},
        {"operator": {"poll": "soon"}},
        {"image": {"repository": ""}},
        {"namespaces": "default"},
        {"imagePolicy": "Always"},
        {"rbac": {"create": "yes"}},
        {"global": {"imagePullSecrets": [{"name": "a"}]}},
        {"admissionPolicy": {"enabled": "yes"}},
        {"admissionPolicy": {"validationActions": ["Refuse"]}},
        {"templatePermissions": {"one": {"secret": ["a"]}}},
        {"templatePermissions": {"one": {"hostPaths": "/data"}}},
        {"tls": {"certificateLifetime": "90d"}},
        {"operator": {"poll": "0s"}},
        {"operator": {"poll": "0h0.0s"}},
        {"operator": {"resync": "0ms"}},
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    with Chart.load(CHART) as chart, pytest.raises(HelmError, match=next(iter(values))):
        chart.validate_schema(values)


def test_a_chart_that_depends_on_it_may_have_a_condition() -> None:
    """Helm checks the values of a chart that another one enables, with `enabled` among them."""
    with Chart.load(CHART) as chart:
        chart.validate_schema({"enabled": True})


@pytest.mark.parametrize("lifetime", ["1s", "59.9s", "0h0.9m"])
def test_certificates_of_less_than_a_minute_are_refused(lifetime: str) -> None:
    with pytest.raises(HelmError, match=f"certificateLifetime is {lifetime}; expected 60s at least"):
        render({"tls": {"certificateLifetime": lifetime}})


def test_times_that_the_operator_takes_are_not_refused() -> None:
    for poll, lifetime in (("500ms", "60s"), ("0h10s", "0.5h"), ("0.5s", "1m0s")):
        render({"operator": {"poll": poll}, "tls": {"certificateLifetime": lifetime}})
        given = settings.parse(["--poll", poll, "--certificate-lifetime", lifetime])
        assert given.options.certificate_lifetime >= timedelta(minutes=1)


def test_role_has_no_wildcard() -> None:
    roles = [d for d in documents() if d["kind"] == "ClusterRole"]
    assert roles
    for role in roles:
        for rule in role["rules"]:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]


def test_the_admins_of_a_namespace_have_all_rights_that_the_chart_grants_there() -> None:
    """Besides those that Kubernetes gives to admins: RBAC lets nobody grant what they do not have."""

    def rights(rules: Any) -> set[tuple[str, str, str]]:
        return {
            (group, resource, verb)
            for rule in rules
            for group, resource, verb in itertools.product(
                *(rule[k] for k in ("apiGroups", "resources", "verbs"))
            )
        }

    installers = yaml.safe_load((ROOT / "manifests" / "installers.yaml").read_text())
    assert installers["metadata"]["labels"] == {"rbac.authorization.k8s.io/aggregate-to-admin": "true"}
    found = documents({**EVERYTHING, "crd": {"install": False}})
    granted = rights(rule for each in found if each["kind"] == "Role" for rule in each["rules"])
    ours = {right for right in granted if right[0] == "elastic-ps.dev" or right[1] == "events"}
    assert ours == rights(installers["rules"])


def test_an_operator_for_some_namespaces_has_no_right_outside_of_them() -> None:
    """With the definition there already, nothing is needed that only a cluster's administrator may make."""
    found = list(documents({**EVERYTHING, "crd": {"install": False}}))
    (account,) = (d for d in found if d["kind"] == "ServiceAccount")
    system = account["metadata"]["namespace"]
    assert {d["metadata"].get("namespace") for d in found} == {"one", "two", system}
    assert not [d for d in found if d["kind"].startswith("Cluster")]
    there = [d for d in found if d["kind"] == "Role" and d["metadata"]["namespace"] == "one"]
    assert {d["metadata"]["name"] for d in there} == {f"elastic-ps{end}" for end in ("", "-edit", "-view")}
    own = [d for d in found if d["kind"] == "Role" and d["metadata"]["namespace"] == system]
    assert [d["metadata"]["name"] for d in own] == ["elastic-ps-lease", "elastic-ps-authority"]


def test_the_operator_may_read_one_secret_by_its_name() -> None:
    """It writes those of jobs, and can read none of them, nor any other."""
    for existing in ("", "issuer"):
        values = {"tls": {"existingSecret": existing}}
        rules = [rule for d in documents(values) for rule in d.get("rules", []) if d["kind"].endswith("Role")]
        granted = [
            (sorted(rule["verbs"]), rule.get("resourceNames"))
            for rule in rules
            if "secrets" in rule["resources"]
        ]
        name = existing or "elastic-ps-authority"
        makes = [] if existing else [(["create"], None)]
        assert granted == [(["create", "update"], None), (["get"], [name]), *makes]
        (deployment,) = (d for d in documents(values) if d["kind"] == "Deployment")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        given = settings.parse([a for a in container["args"] if "tls" in a or "certificate" in a])
        assert given.tls_secret == (deployment["metadata"]["namespace"], name)
        assert given.tls_secret_given == bool(existing)
        assert given.options.secured
        assert given.options.certificate_lifetime.days == 90


def test_without_tls_the_operator_has_no_right_to_secrets() -> None:
    text = "".join(render({"tls": {"enabled": False}}).values())
    assert "secrets" not in text.replace("templatePermissions", "")
    assert "--tls-secret" not in text


def test_roles_for_people_are_added_to_those_of_the_cluster() -> None:
    roles = {d["metadata"]["name"]: d for d in documents() if d["kind"] == "ClusterRole"}
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    added = {
        name: {key.removeprefix(prefix) for key in role["metadata"]["labels"] if key.startswith(prefix)}
        for name, role in roles.items()
    }
    assert added == {"elastic-ps": set(), "elastic-ps-edit": {"admin", "edit"}, "elastic-ps-view": {"view"}}
    (edit,) = roles["elastic-ps-edit"]["rules"]
    assert "delete" in edit["verbs"]
    assert edit["resources"] == ["trainingjobs", "trainingjobs/scale"]
    (view,) = roles["elastic-ps-view"]["rules"]
    assert (view["resources"], view["verbs"]) == (["trainingjobs"], ["get", "list", "watch"])


def test_the_kubelet_restarts_an_operator_that_is_not_healthy() -> None:
    (deployment,) = (d for d in documents() if d["kind"] == "Deployment")
    assert deployment["spec"]["template"]["spec"].get("restartPolicy", "Always") == "Always"
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert [port["containerPort"] for port in container["ports"] if port["name"] == "http"] == [8080]


def test_an_operator_that_is_asked_to_end_while_it_starts_need_not_be_killed() -> None:
    """It is not the first process of its pod, which ignores SIGTERM until it has a handler."""
    (deployment,) = (d for d in documents() if d["kind"] == "Deployment")
    assert deployment["spec"]["template"]["spec"]["shareProcessNamespace"] is True


def test_the_operator_reads_the_permissions_of_the_values() -> None:
    (deployment,) = (d for d in documents(EVERYTHING) if d["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    given = settings.parse([a for a in container["args"] if a.startswith("--template-permissions")])
    expected = Permissions(secrets=["a"], host_paths=["/data"], privileged=True)
    assert given.options.policy.of("one") == expected
    assert given.options.policy.of("two") == Permissions(secrets=["a"])


def test_what_the_values_may_permit_is_what_the_operator_knows() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    known = schema["properties"]["templatePermissions"]["additionalProperties"]["properties"]
    assert known.keys() == {field.alias for field in Permissions.model_fields.values()}


def test_the_admission_policy_is_made_if_asked_for_and_knows_each_permission() -> None:
    kind = "ValidatingAdmissionPolicy"
    assert not [d for d in documents(EVERYTHING) if d["kind"].startswith(kind)]
    values = {**EVERYTHING, "admissionPolicy": {"enabled": True, "validationActions": ["Warn"]}}
    every = [d for d in documents(values) if d["kind"].startswith(kind)]
    policy, binding = (d for d in every if d["metadata"]["name"].endswith("-templates"))
    for document in every:
        kubernetes_validate.validate(document, VERSION, strict=True)
    variables = {variable["name"]: variable["expression"] for variable in policy["spec"]["variables"]}
    assert variables.keys() > {field.alias for field in Permissions.model_fields.values()}
    assert variables["privileged"] == 'request.namespace in ["one"]'
    assert variables["secrets"] == '{"one":[]}[?request.namespace].orValue([]) + ["^a$"]'
    said = " ".join(rule["messageExpression"] for rule in policy["spec"]["validations"])
    assert all(f"{{{field.alias}: " in said for field in Permissions.model_fields.values())
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    assert binding["spec"]["validationActions"] == ["Warn"]
    (selector,) = binding["spec"]["matchResources"]["namespaceSelector"]["matchExpressions"]
    assert selector["values"] == EVERYTHING["namespaces"]


@pytest.mark.parametrize("existing", ["", "issuer"])
def test_the_operator_is_held_to_its_own_secrets_if_asked_for(existing: str) -> None:
    """It never writes one that somebody else creates."""
    values = {"admissionPolicy": {"enabled": True}, "tls": {"existingSecret": existing}}
    name = "elastic-ps-secrets"
    policy, binding = (d for d in documents(values) if d["metadata"]["name"] == name)
    (condition,) = policy["spec"]["matchConditions"]
    assert "'system:serviceaccount:elastic-ps-system:elastic-ps'" in condition["expression"]
    (rule,) = policy["spec"]["validations"]
    own = "object.metadata.namespace == 'elastic-ps-system' && object.metadata.name == 'elastic-ps-authority'"
    expected = f"object.type == '{names.SECRET_TYPE}'" + ("" if existing else f" || ({own})")
    assert rule["expression"] == expected
    assert ("its own one" in rule["message"]) != bool(existing)
    assert (binding["spec"]["policyName"], binding["spec"]["validationActions"]) == (name, ["Deny"])
    without = documents({"admissionPolicy": {"enabled": True}, "tls": {"enabled": False}})
    assert name not in {d["metadata"]["name"] for d in without}


def test_what_is_set_is_rendered() -> None:
    found = list(documents({**EVERYTHING, "fullnameOverride": "training"}))
    (deployment,) = (d for d in found if d["kind"] == "Deployment")
    assert deployment["metadata"]["name"] == "training"
    ours = [d for d in found if d["kind"] != "CustomResourceDefinition"]
    assert all(d["metadata"]["labels"]["team"] == "platform" for d in ours)
    assert "team" not in deployment["spec"]["selector"]["matchLabels"], "a selector cannot be changed"
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["image"] == f"r/operator@sha256:{'0' * 64}"
    assert container["env"] == [{"name": "HTTPS_PROXY", "value": "http://proxy"}]
    zone, host = spec["topologySpreadConstraints"]
    assert zone["labelSelector"] == deployment["spec"]["selector"]
    assert host["labelSelector"] == {"matchLabels": {"a": "b"}}
    (budget,) = (d for d in found if d["kind"] == "PodDisruptionBudget")
    assert budget["spec"] == {"maxUnavailable": 1, "selector": deployment["spec"]["selector"]}
    (monitor,) = (d for d in found if d["kind"] == "PodMonitor")
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["one", "two"]}


def test_a_platform_that_chooses_the_user_is_let_do_so() -> None:
    """OpenShift gives each namespace its own users."""
    (deployment,) = (
        d
        for d in documents({"podSecurityContext": {"runAsUser": None, "runAsGroup": None}})
        if d["kind"] == "Deployment"
    )
    security = deployment["spec"]["template"]["spec"]["securityContext"]
    assert security == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def test_deleting_what_was_installed_from_the_file_deletes_no_job() -> None:
    installed = [d for d in yaml.safe_load_all(install_manifest()) if d]
    assert "CustomResourceDefinition" not in {d["kind"] for d in installed}
    assert "Helm" not in install_manifest()
    assert "helm.sh" not in install_manifest()


def test_roles_are_left_to_the_administrator_if_asked_for() -> None:
    for values_given in ({}, EVERYTHING):
        kinds = {d["kind"] for d in documents({**values_given, "rbac": {"create": False}})}
        assert not {kind for kind in kinds if "Role" in kind}
        assert "ServiceAccount" in kinds


@pytest.mark.parametrize("registry", ["localhost", "ghcr.io/someone"])
def test_the_notes_name_the_training_image_beside_the_operators(registry: str) -> None:
    notes = render({"image": {"repository": f"{registry}/elastic-ps-operator"}})["NOTES.txt"]
    assert f"  image: {registry}/elastic-ps:{__version__}\n" in notes


@pytest.mark.parametrize(("served", "where"), [([], ""), (["team-a", "team-b"], " -n team-a")])
def test_the_job_of_the_notes_is_created_where_it_is_served(served: list[str], where: str) -> None:
    notes = render({"namespaces": served})["NOTES.txt"]
    assert f"\nkubectl{where} apply -f -" in notes
    assert f" kubectl{where} get tj -w\n  kubectl{where} scale tj/digits --replicas=4\n" in notes


@pytest.mark.parametrize("name", ["rbac", "global", "imagePullSecrets"])
def test_values_of_a_release_that_lack_a_part_render_as_before(name: str) -> None:
    """`helm upgrade --reuse-values` brings the values of an older chart."""
    assert list(documents({name: None})) == list(documents())


def test_several_operators_prefer_different_nodes_unless_told_otherwise() -> None:
    def affinity(**given: Any) -> Any:
        (deployment,) = (d for d in documents(given) if d["kind"] == "Deployment")
        return deployment["spec"]["template"]["spec"].get("affinity")

    assert affinity() is None
    (preferred,) = affinity(replicas=2)["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert preferred["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    assert (
        preferred["podAffinityTerm"]["labelSelector"]["matchLabels"]["app.kubernetes.io/instance"]
        == "elastic-ps"
    )
    assert affinity(replicas=2, affinity={"nodeAffinity": {}}) == {"nodeAffinity": {}}


def test_pods_have_the_secrets_of_the_registries_and_resources() -> None:
    given = {"imagePullSecrets": [{"name": "own"}], "global": {"imagePullSecrets": ["shared"], "other": 1}}
    specs = [
        d["spec"].get("template", d)["spec"] for d in documents(given) if d["kind"] in ("Deployment", "Pod")
    ]
    assert len(specs) == 2
    for spec in specs:
        assert spec["imagePullSecrets"] == [{"name": "own"}, {"name": "shared"}]
        assert spec["containers"][0]["resources"]["limits"]["memory"]


@pytest.mark.parametrize("replicas", [1, 2])
def test_several_operators_share_a_lease(replicas: int) -> None:
    found = list(documents({"replicas": replicas}))
    (deployment,) = (d for d in found if d["kind"] == "Deployment")
    assert deployment["spec"]["replicas"] == replicas
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert [a for a in container["args"] if a.startswith("--lease=")] == (
        [f"--lease={deployment['metadata']['namespace']}/{deployment['metadata']['name']}"]
        if replicas > 1
        else []
    )
    rules = [rule for d in found if d["kind"] == "Role" for rule in d["rules"]]
    verbs = {verb for rule in rules if rule["resources"] == ["leases"] for verb in rule["verbs"]}
    assert verbs == ({"get", "create", "patch"} if replicas > 1 else set())


def test_no_number_of_operators_needs_another_kind_of_rollout() -> None:
    """With server-side apply, an upgrade takes away only what it has set: what the API server added stays."""
    found = {}
    for replicas in (1, 2):
        (deployment,) = (d for d in documents({"replicas": replicas}) if d["kind"] == "Deployment")
        found[replicas] = deployment["spec"]["strategy"]
    assert {strategy["type"] for strategy in found.values()} == {"RollingUpdate"}
    assert found[1]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}, "one at a time"
    assert found[2]["rollingUpdate"].keys() == found[1]["rollingUpdate"].keys()


def test_generated_files_are_up_to_date() -> None:
    for path, content in crd.files(ROOT).items():
        assert path.read_text() == content, f"{path}: run `python -m elastic_operator.crd --write`"
    assert TARGET.read_text() == install_manifest(), "run `python tools/render_install.py --write`"


def test_generated_files_are_written_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = ["--root", str(tmp_path)]
    assert crd.main(["--check", *root]) == 1
    assert "trainingjobs.yaml is not up to date; run" in capsys.readouterr().err
    assert crd.main(["--write", *root]) == 0
    assert crd.main(["--check", *root]) == 0
    assert capsys.readouterr().err == ""
    chart = tmp_path / "charts/elastic-ps/templates/crd.yaml"
    assert chart.read_text() == crd.chart_template()
    chart.write_text("another")
    assert crd.main(["--check", *root]) == 1
    assert capsys.readouterr().err.count("not up to date") == 1


def test_chart_holds_the_generated_definition() -> None:
    (rendered,) = (d for d in documents() if d["kind"] == "CustomResourceDefinition")
    assert rendered["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert rendered == crd.crd()
    assert not [d for d in documents({"crd": {"install": False}}) if d["kind"] == rendered["kind"]]


def test_an_older_definition_does_not_prune_or_refuse_a_newer_status() -> None:
    version = crd.crd()["spec"]["versions"][0]
    status = version["schema"]["openAPIV3Schema"]["properties"]["status"]
    objects = [status, *(child for child in status["properties"].values() if "properties" in child)]
    objects.append(status["properties"]["conditions"]["items"])
    assert len(objects) == 8
    assert all(node["x-kubernetes-preserve-unknown-fields"] for node in objects)
    assert "enum" not in str(status)


def test_each_field_of_the_status_is_described() -> None:
    """`kubectl explain tj.status` shows that."""
    version = crd.crd()["spec"]["versions"][0]

    def bare(node: dict[str, Any], path: str) -> Iterator[str]:
        for name, child in node.get("properties", {}).items():
            yield from [] if child.get("description") else [f"{path}.{name}"]
            yield from bare(child, f"{path}.{name}")
            yield from bare(child.get("items", {}), f"{path}.{name}")

    assert list(bare(version["schema"]["openAPIV3Schema"]["properties"]["status"], "status")) == []


def schema_of_spec() -> dict[str, Any]:
    version = crd.crd()["spec"]["versions"][0]
    found: dict[str, Any] = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return found


def test_schema_is_structural() -> None:
    def walk(node: object) -> None:
        if isinstance(node, dict):
            assert not {"$ref", "anyOf", "oneOf", "allOf", "title", "const"} & node.keys()
            if "properties" in node:
                assert node["type"] == "object"
                assert "additionalProperties" not in node
                for child in node["properties"].values():
                    assert "type" in child or child.get("x-kubernetes-preserve-unknown-fields")
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(crd.crd()["spec"]["versions"][0]["schema"])


def test_a_name_is_checked_by_the_definition() -> None:
    root = crd.crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert "^[a-z]([-a-z0-9]{0,50}[a-z0-9])?$" in str(root["x-kubernetes-validations"])


def test_what_cannot_change_has_a_rule_that_says_so() -> None:
    """Each field that a running job keeps as it was, see docs/reference/job.md."""
    spec = schema_of_spec()["properties"]
    server = spec["parameterServer"]["properties"]
    names = ("entrypoint", "arguments", "strategy", "data")
    fixed = [spec[name] for name in names]
    fixed += [server[name] for name in ("replicas", "bucketBytes", "durability")]
    assert all("self == oldSelf" in str(field["x-kubernetes-validations"]) for field in fixed)
    assert all("default" in spec[name] for name in (*names[1:], "consistency", "compression"))
    kept = str(spec["consistency"]["x-kubernetes-validations"])
    assert "self.globalBatchSize == oldSelf.globalBatchSize" in kept
    assert "self == oldSelf" in str(spec["consistency"]["properties"]["deterministic"])
    assert "(self.mode == 'local') == (oldSelf.mode == 'local')" in kept
    assert "self.volumeClaim == oldSelf.volumeClaim" in str(server["checkpoint"]["x-kubernetes-validations"])


def test_defaults_of_the_definition_are_those_of_the_models() -> None:
    """What the API server fills in is what the models would have filled in."""

    def fill(schema: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
        for name, child in schema.get("properties", {}).items():
            if name not in value and "default" in child:
                value[name] = copy.deepcopy(child["default"])
            if isinstance(value.get(name), dict):
                fill(child, value[name])
        return value

    given = fill(schema_of_spec(), {"entrypoint": "a:b"})
    assert TrainingJobSpec.model_validate(given) == TrainingJobSpec(entrypoint="a:b")


def test_the_default_of_an_object_is_whole() -> None:
    """An API server refuses a definition with a rule that fails on a default, as it does on `{}`."""

    def whole(node: dict[str, Any]) -> Any:
        fields = {name: whole(child) for name, child in node.get("properties", {}).items()}
        given = {name: value for name, value in fields.items() if value is not None}
        if node.get("properties") and "default" in node:
            assert node["default"] == given
        return node.get("default")

    whole(crd.crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"])


def test_samples_are_valid() -> None:
    for path in sorted((ROOT / "manifests" / "samples").glob("*.yaml")):
        job = load_job(path)
        document = job.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
        jsonschema.validate(document, schema_of_spec())


def test_the_pod_that_takes_a_model_out_fits_the_sample() -> None:
    """It has the image and the claim of the job `digits`, and is as restricted as the operator's pods."""
    pod = yaml.safe_load((ROOT / "manifests" / "take-model.yaml").read_text())
    kubernetes_validate.validate(pod, VERSION, strict=True)
    sample = load_job(ROOT / "manifests" / "samples" / "digits.yaml")
    job = job_document()
    job["metadata"]["name"] = "digits"
    usual = builders.pod(job, sample.spec, "ps", 0)["spec"]
    (container,), (servers,) = pod["spec"]["containers"], usual["containers"]
    assert pod["spec"]["securityContext"] == usual["securityContext"]
    assert container["securityContext"] == servers["securityContext"]
    assert container["image"] == servers["image"]
    claims = [
        next(v["persistentVolumeClaim"] for v in spec["volumes"] if v["name"] == "checkpoints")
        for spec in (pod["spec"], usual)
    ]
    assert claims[0]["claimName"] == claims[1]["claimName"] == names.claim("digits")


def test_the_operator_image_holds_what_the_operator_imports() -> None:
    lines = (ROOT / "operator" / "Dockerfile").read_text().splitlines()
    assert not [line for line in lines if "torch" in line and not line.startswith("#")]
    copied = {Path(word).name for line in lines if "elastic_ps/" in line for word in line.split()}
    assert {"__init__.py", "errors.py", "version.py", "api", "contract"} <= copied
