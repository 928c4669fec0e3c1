"""What a template may hold: nothing that gives a pod more than whoever wrote the job may be meant to have."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_operator.permissions import Permissions, Policy, read_policy
from elastic_operator.plan import Options
from elastic_operator.settings import parse
from elastic_ps.errors import UsageError
from tests.testing.simulation import Simulation, job_document, running
from tests.testing.templates import FORBIDDEN, PERMITTED, volume


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
    assert refused.services == set()
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


@pytest.mark.parametrize("template", PERMITTED)
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
