"""A template over the default pod: lists by the keys that Kubernetes tells their items apart by."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_operator import builders
from elastic_operator.merging import merge
from elastic_ps.api.job import TrainingJobSpec
from tests.testing.simulation import job_document

STANDBY: dict[str, Any] = {"durability": "standby", "checkpoint": {"volumeClaim": {"storage": "1Gi"}}}


def server(template: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The pod's spec of a parameter server with this template."""
    job = job_document(parameterServer={**fields, "template": {"spec": template}})
    pod = builders.pod(job, TrainingJobSpec.model_validate(job["spec"]), "ps", 0)
    found: dict[str, Any] = pod["spec"]
    return found


def main(**container: Any) -> dict[str, Any]:
    return {"containers": [{"name": "parameter-server", **container}]}


def test_two_mounts_of_one_volume_both_stay() -> None:
    mounts = [
        {"name": "data", "mountPath": "/train", "subPath": "train"},
        {"name": "data", "mountPath": "/test", "subPath": "test"},
        {"name": "checkpoints", "mountPath": "/old", "subPath": "old"},
    ]
    made = server(main(volumeMounts=mounts))["containers"][0]["volumeMounts"]
    assert all(mount in made for mount in mounts)
    assert {"name": "checkpoints", "mountPath": "/var/lib/elastic-ps"} in made
    assert len(made) == len(mounts) + len(server({})["containers"][0]["volumeMounts"])


def test_a_mount_of_the_same_path_takes_the_other_s_place() -> None:
    made = server(main(volumeMounts=[{"name": "scratch", "mountPath": "/tmp"}]))
    mounts = made["containers"][0]["volumeMounts"]
    assert [mount["name"] for mount in mounts if mount["mountPath"] == "/tmp"] == ["scratch"]


@pytest.mark.parametrize("fields", [{}, {"checkpoint": {"volumeClaim": {}}}])
def test_a_volume_has_one_source(fields: dict[str, Any]) -> None:
    mine = {"name": "checkpoints", "nfs": {"server": "nas", "path": "/x"}}
    volumes = server({"volumes": [mine]}, **fields)["volumes"]
    assert [volume for volume in volumes if volume["name"] == "checkpoints"] == [mine]
    larger = {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}
    assert larger in server({"volumes": [larger]})["volumes"]


def test_ports_are_told_apart_by_number_and_protocol() -> None:
    more = [
        {"containerPort": 8080, "protocol": "UDP", "name": "gossip"},
        {"containerPort": 8080, "name": "web"},
        {"containerPort": 9090},
    ]
    ports = server(main(ports=more))["containers"][0]["ports"]
    assert len(ports) == 5
    assert {"containerPort": 8080, "name": "web"} in ports, "TCP is what is meant where nothing is said"


def test_an_affinity_of_one_s_own_is_not_joined_into_the_default() -> None:
    spread = {
        "podAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"labelSelector": {"matchLabels": {"app": "x"}}, "topologyKey": "kubernetes.io/hostname"}
            ]
        }
    }
    assert server({"affinity": spread}, **STANDBY)["affinity"] == spread
    nodes: dict[str, Any] = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}
    }
    assert server({"affinity": nodes}, **STANDBY)["affinity"].keys() == {"nodeAffinity", "podAffinity"}


def test_a_probe_has_one_handler() -> None:
    probe = server(main(livenessProbe={"exec": {"command": ["true"]}, "periodSeconds": 3}))["containers"][0][
        "livenessProbe"
    ]
    assert "httpGet" not in probe
    assert (probe["periodSeconds"], probe["timeoutSeconds"]) == (3, 5)


def test_a_variable_has_one_value() -> None:
    source = {"fieldRef": {"fieldPath": "metadata.name"}}
    env = server(main(env=[{"name": "HOME", "valueFrom": source}]))["containers"][0]["env"]
    assert [item for item in env if item["name"] == "HOME"] == [{"name": "HOME", "valueFrom": source}]


def test_other_lists_are_replaced_and_null_removes() -> None:
    base = {"args": ["a", "b"], "tolerations": [{"key": "x"}], "nodeSelector": {"a": "1", "b": "2"}}
    over = {"args": ["c"], "tolerations": [{"key": "y", "value": None}], "nodeSelector": {"a": None}}
    merged = merge(base, over)
    assert merged == {"args": ["c"], "tolerations": [{"key": "y"}], "nodeSelector": {"b": "2"}}
    assert base["args"] == ["a", "b"]


def test_items_without_their_key_replace_the_list() -> None:
    assert merge({"env": [{"name": "A"}]}, {"env": ["text"]}) == {"env": ["text"]}
