"""How the API server is reached, and what its refusals are taken for."""

from __future__ import annotations

import asyncio
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kopf
import pytest

from elastic_operator.api import Api, read_error
from elastic_operator.listings import Listings
from elastic_operator.metrics import Metrics
from elastic_operator.session import connection, session
from elastic_operator.settings import Settings
from elastic_operator.store import Store
from elastic_ps.errors import UsageError
from tests.testing.api_server import ApiServer

TERMINATING = {
    "kind": "Status",
    "apiVersion": "v1",
    "metadata": {},
    "status": "Failure",
    "message": 'pods "digits-worker-0" is forbidden: unable to create new content in namespace test '
    "because it is being terminated",
    "reason": "Forbidden",
    "details": {
        "name": "digits-worker-0",
        "kind": "pods",
        "causes": [{"reason": "NamespaceTerminating", "message": "namespace test is being terminated"}],
    },
    "code": 403,
}


def test_a_namespace_on_its_way_out_is_no_missing_permission() -> None:
    error = read_error(403, json.dumps(TERMINATING))
    assert (error.status, error.reason) == (403, "NamespaceTerminating")
    plain = {**TERMINATING, "details": {"name": "digits-worker-0", "kind": "pods"}}
    assert read_error(403, json.dumps(plain)).reason == "Forbidden"


FOREIGN = [
    f'{{"details": {details}}}' for details in ('"text"', "[1]", '{"causes": "text"}', '{"causes": [1]}')
]


@pytest.mark.parametrize("body", [None, "", b"<html>Bad gateway</html>", "[1]", '"text"', "null", *FOREIGN])
def test_what_is_no_status_still_becomes_an_error(body: bytes | str | None) -> None:
    """As a proxy in between may answer."""
    error = read_error(502, body)
    assert (error.status, error.reason) == (502, "")
    assert str(error).startswith("502 ")


def test_outside_of_a_cluster_it_has_to_be_told_how_to_reach_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UsageError, match=r"no cluster is configured: .*; set --kubeconfig"):
        Api(Settings(), Metrics())


def config_of(server: str, user: dict[str, Any], **cluster: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "it",
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "me"}}],
        "clusters": [{"name": "it", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "me", "user": user}],
    }


@pytest.mark.parametrize("insecure", [True, False])
@pytest.mark.parametrize("token", ["secret", None])
def test_kopf_reaches_the_api_server_as_our_own_client_does(
    tmp_path: Path, insecure: bool, token: str | None
) -> None:
    user = {"token": token} if token else {}
    config = config_of("https://here:6443", user, **{"insecure-skip-tls-verify": insecure})
    (tmp_path / "config").write_text(json.dumps(config))
    api = Api(Settings(kubeconfig=tmp_path / "config"), Metrics())
    assert api.authorization() == (f"Bearer {token}" if token else None)
    assert connection(api) == kopf.ConnectionInfo(server="https://here:6443", insecure=insecure)


@pytest.mark.parametrize(
    ("named", "variables", "since"),
    [
        (True, {}, 37),
        (False, {"HTTP_PROXY": ""}, 34),
        (False, {"HTTP_PROXY": "", "NO_PROXY": "elsewhere.invalid"}, None),
        (False, {}, None),
    ],
)
def test_kopf_uses_the_proxy_that_our_own_client_uses(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    named: bool,
    variables: dict[str, str],
    since: int | None,
) -> None:
    """`since`: the first version of our client that finds the proxy there."""
    through = since is not None and int(version("kubernetes").partition(".")[0]) >= since
    proxy = ApiServer()
    try:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value or proxy.url)
        cluster = {"proxy-url": proxy.url} if named else {}
        config = config_of("http://elsewhere.invalid:6443", {}, **cluster)
        (tmp_path / "config").write_text(json.dumps(config))
        settings = Settings(kubeconfig=tmp_path / "config")
        api = Api(settings, Metrics())
        assert api.proxy == (proxy.url if through else None)

        async def ask() -> int:
            kopfs = session(api, Listings(api, Store(), settings)).aiohttp_session
            async with kopfs, kopfs.get("http://elsewhere.invalid:6443/api/v1/pods") as answer:
                return answer.status

        if through:
            assert asyncio.run(ask()) == 200
            assert api.request("list", "pods", "/api/v1/pods")["items"] == []
        assert [request.path for request in proxy.requests] == ["/api/v1/pods"] * 2 * through
    finally:
        proxy.close()
