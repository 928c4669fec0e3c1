"""A job on a cluster is changed while it runs: shard 0's pod is told, and no pod is made again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elastic_operator import names
from elastic_operator.plan import Remember, TellPod
from elastic_ps.api.compression import Compression
from elastic_ps.api.job import parse_spec
from elastic_ps.api.mutable import MutableFields, read_mutable
from elastic_ps.api.status import Progress, ServerStatus, TuningStatus
from elastic_ps.contract.env import DURABLE, read
from tests.testing.simulation import Simulation, running

BOUNDED = {"mode": "bounded", "maxStaleness": 8}


def told(simulation: Simulation) -> MutableFields:
    annotations = simulation.pods["digits-ps-0"]["metadata"]["annotations"]
    return read_mutable(annotations[names.TUNING_ANNOTATION], source="annotation")


def answers(
    simulation: Simulation, generation: int, consistency: str, problem: str = "", codec: str = "none"
) -> None:
    tuning = TuningStatus(
        generation=generation,
        consistency=consistency,
        compression=f"codec: {codec}",
        asked=generation,
        problem=problem,
    )
    simulation.server = ServerStatus(job="digits", shard=0, shards=1, term=1, ready=True, tuning=tuning)


def uids(simulation: Simulation) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in simulation.pods.items()}


def test_a_change_is_written_to_the_pod_of_shard_0_alone() -> None:
    simulation = running(parameterServer={"replicas": 2, "checkpoint": {"volumeClaim": {}}})
    before = uids(simulation)
    assert (told(simulation).generation, told(simulation).consistency.mode) == (1, "sync")
    assert names.TUNING_ANNOTATION not in simulation.pods["digits-ps-1"]["metadata"]["annotations"]
    simulation.edit(consistency=BOUNDED)
    assert [type(action) for action in simulation.step().actions] == [Remember, TellPod]
    assert (told(simulation).generation, told(simulation).consistency.max_staleness) == (2, 8)
    simulation.settle()
    assert uids(simulation) == before
    assert simulation.condition("Degraded").get("status", "False") == "False"
    simulation.scale(2)
    simulation.settle()
    assert told(simulation).generation == 2, "it was told all that concerns it"


def test_what_reads_the_annotation_finds_it() -> None:
    pod = running().pods["digits-ps-0"]
    (container,) = pod["spec"]["containers"]
    variables = {item["name"]: item.get("value", "") for item in container["env"]}
    path = str(read(variables).tuning)
    mount = next(mount for mount in container["volumeMounts"] if path.startswith(mount["mountPath"] + "/"))
    volume = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == mount["name"])
    (item,) = volume["downwardAPI"]["items"]
    assert path == f"{mount['mountPath']}/{item['path']}"
    assert item["fieldRef"]["fieldPath"] == f"metadata.annotations['{names.TUNING_ANNOTATION}']"


def durable(simulation: Simulation, version: int) -> None:
    simulation.server = ServerStatus(
        job="digits", shard=0, shards=1, term=1, ready=True, progress=Progress(durable_version=version)
    )


def test_shard_0_is_told_once_that_a_version_was_on_disk() -> None:
    """Its container may be started again in its place, at a moment when the volume is away."""
    simulation = running(parameterServer={"replicas": 2, "checkpoint": {"volumeClaim": {}}})
    pod = simulation.pods["digits-ps-0"]
    assert names.DURABLE_ANNOTATION not in pod["metadata"]["annotations"]
    for version in (3, 9):
        durable(simulation, version)
        simulation.settle()
        assert pod["metadata"]["annotations"][names.DURABLE_ANNOTATION] == "3"
    assert names.DURABLE_ANNOTATION not in simulation.pods["digits-ps-1"]["metadata"]["annotations"]
    (variable,) = [item for item in pod["spec"]["containers"][0]["env"] if item["name"] == DURABLE]
    path = variable["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == f"metadata.annotations['{names.DURABLE_ANNOTATION}']"
    del simulation.pods["digits-ps-0"]
    simulation.settle()
    again = simulation.pods["digits-ps-0"]["metadata"]["annotations"]
    assert again[names.DURABLE_ANNOTATION] == "9"


def test_where_checkpoints_end_with_their_pod_none_is_required() -> None:
    simulation = running()
    durable(simulation, 3)
    simulation.settle()
    assert names.DURABLE_ANNOTATION not in simulation.pods["digits-ps-0"]["metadata"]["annotations"]


def test_a_server_that_comes_back_begins_with_the_newest_word() -> None:
    simulation = running()
    simulation.edit(consistency=BOUNDED)
    simulation.settle()
    del simulation.pods["digits-ps-0"]
    simulation.settle()
    assert (told(simulation).generation, told(simulation).consistency.max_staleness) == (2, 8)
    (container,) = simulation.pods["digits-ps-0"]["spec"]["containers"]
    spec = next(item["value"] for item in container["env"] if item["name"] == "ELASTIC_PS_SPEC")
    assert parse_spec(json.loads(spec), source="test").consistency.max_staleness == 8


WRONG: list[dict[str, Any]] = [
    {"consistency": {"mode": "bounded"}},
    {"consistency": {"mode": "nonsense"}},
    {"compression": {"codec": "int8", "maxError": 0.5}},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_spec_that_cannot_be_followed_takes_no_change_back(wrong: dict[str, Any]) -> None:
    simulation = running()
    simulation.edit(consistency=BOUNDED, compression={"codec": "int8"})
    simulation.settle()
    before = told(simulation)
    simulation.edit(**wrong)
    simulation.settle()
    assert told(simulation) == before
    assert simulation.condition("Degraded")["status"] == "True"
    del simulation.pods["digits-ps-0"]
    simulation.settle()
    assert told(simulation) == before.model_copy(update={"generation": 3})


def test_the_compression_changes_as_the_consistency_does() -> None:
    simulation = running()
    before = uids(simulation)
    simulation.edit(compression={"codec": "int8", "rules": [{"match": "*.bias", "codec": "none"}]})
    assert [type(action) for action in simulation.step().actions] == [Remember, TellPod]
    compression = told(simulation).compression
    assert (compression.codec, [rule.match for rule in compression.rules]) == ("int8", ["*.bias"])
    simulation.settle()
    assert uids(simulation) == before
    assert simulation.condition("Degraded").get("status", "False") == "False"
    del simulation.pods["digits-ps-0"]
    simulation.settle()
    assert told(simulation).compression == compression
    (container,) = simulation.pods["digits-ps-0"]["spec"]["containers"]
    spec = next(item["value"] for item in container["env"] if item["name"] == "ELASTIC_PS_SPEC")
    assert parse_spec(json.loads(spec), source="test").compression == compression


@pytest.mark.parametrize(
    ("spec", "wrong", "words"),
    [
        ({"consistency": {"deterministic": True}}, {"codec": "auto"}, "by measured times; name a codec"),
        ({"strategy": "all-reduce"}, {"codec": "int8"}, "does not work with strategy all-reduce"),
    ],
)
def test_a_compression_that_the_job_cannot_have_is_said_and_changes_nothing(
    spec: dict[str, Any], wrong: dict[str, Any], words: str
) -> None:
    simulation = running(**spec)
    simulation.edit(compression=wrong)
    simulation.settle()
    assert told(simulation).compression == Compression()
    degraded = simulation.condition("Degraded")
    assert degraded["status"] == "True"
    assert words in degraded["message"]


def test_times_of_checkpoints_are_told_too() -> None:
    simulation = running()
    checkpoint: dict[str, Any] = {"interval": "5m", "everyVersions": 100, "keep": 2}
    simulation.edit(parameterServer={"checkpoint": checkpoint})
    simulation.settle()
    assert told(simulation).checkpoint.every_versions == 100
    assert told(simulation).checkpoint.interval.total_seconds() == 300


def test_what_the_parameter_server_says_is_in_status_and_events() -> None:
    simulation = running()
    answers(simulation, 1, "mode: sync")
    simulation.step()
    assert simulation.status["parameterServer"]["consistency"] == "mode: sync"
    answers(simulation, 2, "mode: bounded, maxStaleness: 8")
    simulation.step()
    assert simulation.status["parameterServer"]["consistency"] == "mode: bounded, maxStaleness: 8"
    assert "ConsistencyChanged" in simulation.notes.values()
    answers(simulation, 2, "mode: bounded, maxStaleness: 8", codec="int8")
    simulation.step()
    assert simulation.status["parameterServer"]["compression"] == "codec: int8"
    assert "CompressionChanged" in simulation.notes.values()
    answers(simulation, 2, "mode: bounded, maxStaleness: 8", problem="the job has only 100 steps")
    simulation.step()
    degraded = simulation.condition("Degraded")
    assert (degraded["reason"], degraded["message"]) == ("ChangeRefused", "the job has only 100 steps")
