"""`elastic-ps train --apply`, to an API server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_operator import submit
from tests.testing import machine
from tests.testing.api_server import ApiServer, Refusal, Request

ROOT = Path(__file__).parents[3]
JOB = """
apiVersion: elastic-ps.dev/v1alpha1
kind: TrainingJob
metadata: {name: mine}
spec: {entrypoint: "script:main", image: image:1}
"""


@pytest.fixture
def server() -> Iterator[ApiServer]:
    server = ApiServer()
    yield server
    server.close()


@pytest.fixture
def given(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job on standard input, and a kubeconfig."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    machine.is_told(monkeypatch, JOB)


@pytest.mark.usefixtures("given")
def test_another_namespace(server: ApiServer) -> None:
    assert submit.main(["--namespace", "team"]) == 0
    assert server.get("trainingjobs", "mine", "team")["spec"]["image"] == "image:1"


REFUSED = {
    (
        409,
        "AlreadyExists",
        "no",
    ): "has a TrainingJob mine already: delete it with `kubectl --namespace default",
    (404, "NotFound", 'namespaces "default" not found'): "has no namespace default: create it with `kubectl "
    "create namespace default`, or choose another one with --namespace",
    (404, "", "404 page not found"): "does not know TrainingJobs: install the operator first",
    (422, "Invalid", "no"): "refuses the job: 422 Invalid",
    (403, "Forbidden", "denied by a policy"): "the API server refuses the job: 403 Forbidden",
    (403, "Forbidden", 'User "me" cannot create resource "trainingjobs"'): "you may not create TrainingJobs "
    "in namespace default: ask the cluster's administrator for the role edit there, or choose another "
    'namespace with --namespace. The API server says: User "me"',
    (401, "Unauthorized", "Unauthorized"): "does not know the user of the kubeconfig's context (401)",
}
"""By status, reason and message."""


@pytest.mark.usefixtures("given")
@pytest.mark.parametrize("refusal", REFUSED)
def test_what_the_cluster_refuses_is_told(
    server: ApiServer, capsys: pytest.CaptureFixture[str], refusal: tuple[int, str, str]
) -> None:
    def refuse(request: Request) -> None:
        raise Refusal(*refusal)

    server.refuse = refuse
    assert submit.main([]) == 2
    assert REFUSED[refusal] in capsys.readouterr().err


@pytest.mark.usefixtures("given")
@pytest.mark.parametrize("namespace", ["No/Such", "", "..", "a" * 64])
def test_what_no_namespace_can_be_called_is_told(
    server: ApiServer, capsys: pytest.CaptureFixture[str], namespace: str
) -> None:
    assert submit.main(["--namespace", namespace]) == 2
    assert f"the namespace is {namespace!r}; expected at most 63" in capsys.readouterr().err
    assert server.requests == []


NO_CLUSTER = {
    "nothing": None,
    "no YAML": "{",
    "a list": "[]",
    "empty": "",
    "no context": "{clusters: [], contexts: [], users: []}",
    "no authority": """
        current-context: here
        contexts: [{name: here, context: {cluster: here, user: me}}]
        clusters: [{name: here, cluster: {server: "https://localhost", certificate-authority: nothing}}]
        users: [{name: me, user: {}}]
        """,
}
"""What is in the kubeconfig; None: there is no such file."""


@pytest.mark.usefixtures("given")
@pytest.mark.parametrize("case", NO_CLUSTER)
def test_a_kubeconfig_that_says_no_cluster_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    path, text = tmp_path / "other", NO_CLUSTER[case]
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(path))
    assert submit.main([]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: no cluster is configured: ")
    assert f"The kubeconfig is {path}; set KUBECONFIG to another one" in told
    assert "--kubeconfig" not in told, "which this command does not have"


@pytest.mark.usefixtures("given")
@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "3",
        "{current-context: here, contexts: 3}",
        """
        current-context: here
        contexts: [{name: here, context: {cluster: here, user: me}}]
        clusters: [{name: here, cluster: {server: 3}}]
        users: [{name: me, user: {}}]
        """,
    ],
)
def test_a_file_that_is_laid_out_otherwise_is_told_what_a_kubeconfig_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "other"
    path.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(path))
    assert submit.main([]) == 2
    told = capsys.readouterr().err
    assert "the file is not laid out as a kubeconfig: expected a mapping with current-context, and" in told
    assert "object" not in told, "which is how Python tells it"
    assert "indices" not in told


def test_a_silent_cluster_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ApiServer()
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    machine.is_told(monkeypatch, JOB)
    server.close()
    assert submit.main([]) == 1
    assert "the API server does not answer" in capsys.readouterr().err
