"""What a drill puts on a cluster and brings back from it; the rest runs on a real one (tests/e2e)."""

from __future__ import annotations

import base64
import io
import json
import os
import tarfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from elastic_operator import builders, names
from elastic_ps.api.job import parse_job
from elastic_ps.drill.cluster import ClusterTarget, Kubectl, unpack, with_histories
from elastic_ps.errors import UserError

DOCUMENT: dict[str, Any] = {
    "apiVersion": "elastic-ps.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "digits", "namespace": "default", "uid": "1"},
    "spec": {
        "entrypoint": "train:main",
        "image": "image",
        "worker": {
            "template": {"spec": {"containers": [{"name": "worker", "env": [{"name": "A", "value": "1"}]}]}}
        },
    },
}


def test_every_pod_of_the_job_writes_its_history() -> None:
    changed = with_histories(DOCUMENT, claim="histories", run="digits-1")
    job = parse_job(changed, source="test")
    for role in ("ps", "worker"):
        pod = builders.pod(DOCUMENT, job.spec, role, 0)
        container = next(c for c in pod["spec"]["containers"] if c["name"] == names.CONTAINER[role])
        variables = {item["name"]: item.get("value") for item in container["env"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        claims = {v["name"]: v.get("persistentVolumeClaim") for v in pod["spec"]["volumes"]}
        assert variables["ELASTIC_PS_HISTORY"] == f"{mounts['histories']}/digits-1"
        assert claims["histories"] == {"claimName": "histories"}
        assert variables.get("A") == ("1" if role == "worker" else None)
    assert "histories" not in str(DOCUMENT), "the document that was given is as it was"


def test_histories_come_back_as_they_were(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        member = tarfile.TarInfo("./ps-0-1.jsonl")
        member.size = 3
        archive.addfile(member, io.BytesIO(b"{}\n"))
    unpack(base64.encodebytes(packed.getvalue()).decode(), tmp_path)
    assert (tmp_path / "ps-0-1.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize("text", ["tar: not found", "", "AAAA"])
def test_what_is_no_archive_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="could not be unpacked"):
        unpack(text, tmp_path)


def test_an_answer_that_fails_once_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"metadata": {"namespace": "default"}, "status": {"phase": "Succeeded"}}
    (tmp_path / "kubectl").write_text(f"""#!/bin/sh
mkdir {tmp_path}/failed 2> /dev/null && echo 'the server is not available' >&2 && exit 1
echo '{json.dumps(job)}'
""")
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    target = ClusterTarget(Kubectl(None), "digits", limit=timedelta(seconds=9))
    (tmp_path / "failed").rmdir()
    assert target.over()


def test_without_kubectl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="needs kubectl, which is not on the PATH"):
        Kubectl(None)
