"""What a refusal of the API server is taken for."""

from __future__ import annotations

import json

import pytest

from elastic_operator.api import read_error

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
