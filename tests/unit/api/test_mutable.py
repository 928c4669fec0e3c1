"""What of a running job may change: which of two wishes is newer, and what is refused."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from elastic_ps.api.checkpoints import Times
from elastic_ps.api.compression import Compression
from elastic_ps.api.consistency import Consistency
from elastic_ps.api.job import parse_job, parse_spec
from elastic_ps.api.mutable import MutableFields, describe, read_mutable
from elastic_ps.api.status import TuningStatus
from elastic_ps.checkpoint.manifest import Manifest
from elastic_ps.cli.setting import assignment, changed, in_force
from elastic_ps.errors import InvalidJob, UserError
from elastic_ps.server.job.reconfiguration import DesiredConfiguration
from elastic_ps.server.job.record import mutable_of

ALIKE: list[dict[str, Any]] = [
    {},
    {"backupWorkers": 1},
    {"mode": "bounded", "maxStaleness": 2},
    {"mode": "bounded", "maxStaleness": 9},
    {"mode": "async", "reads": "inconsistent"},
    {"mode": "accumulate", "gradients": 4},
]
"""Each may become each other one."""


def tuning(generation: int = 0, run: str = "", **consistency: Any) -> MutableFields:
    return MutableFields(generation=generation, run=run, consistency=Consistency.model_validate(consistency))


@pytest.mark.parametrize("before", ALIKE)
@pytest.mark.parametrize("after", ALIKE)
def test_what_a_running_job_may_become(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert tuning(**before).refusal(tuning(**after)) == ""
    assert tuning(**after).needs_term(tuning(**before)) == (before != after)


LOCAL = {"mode": "local", "steps": 4}


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ({}, {"deterministic": True}, "deterministic stays"),
        ({"deterministic": True}, {"mode": "async"}, "deterministic stays"),
        ({}, {"globalBatchSize": 8}, "globalBatchSize stays"),
        ({}, LOCAL, "the place of the optimizer stays"),
        (LOCAL, {"mode": "async"}, "the place of the optimizer stays"),
        (LOCAL, {**LOCAL, "outer": "average"}, "everything but steps stays"),
        (LOCAL, {**LOCAL, "outerLearningRate": 0.5}, "everything but steps stays"),
        (LOCAL, {"mode": "local", "steps": 9}, ""),
    ],
)
def test_what_it_may_not_become(before: dict[str, Any], after: dict[str, Any], why: str) -> None:
    found = tuning(**before).refusal(tuning(**after))
    assert why in found
    assert bool(found) == bool(why)


def test_a_tuning_says_what_a_spec_says() -> None:
    document = {
        "entrypoint": "train:main",
        "consistency": {"mode": "bounded", "maxStaleness": 8},
        "parameterServer": {"replicas": 2, "checkpoint": {"interval": "5m", "everyVersions": 7, "path": "x"}},
    }
    spec = parse_spec(document, source="test")
    again = read_mutable(MutableFields.of(spec, generation=3, run="r").to_json(), source="test")
    other = parse_spec({"entrypoint": "train:main", "parameterServer": {"replicas": 2}}, source="test")
    applied = again.applied_to(other)
    assert (again.generation, again.run) == (3, "r")
    assert applied.consistency == spec.consistency
    assert applied.parameter_server.checkpoint.interval == timedelta(minutes=5)
    assert applied.parameter_server.checkpoint.every_versions == 7
    assert applied.parameter_server.checkpoint.path is None
    assert describe(spec.consistency) == "mode: bounded, maxStaleness: 8"


def found(said: MutableFields, version: int = 40) -> Manifest:
    state = {"tuning": said.to_json()}
    return Manifest(job="j", version=version, term=1, tensors=[], optimizer="SGD", state=state)


def test_the_newer_word_counts_of_checkpoint_and_process() -> None:
    recorded = tuning(5, "a", mode="async").model_copy(update={"since": 9})
    assert mutable_of(found(recorded), tuning(0, "a")) == recorded, "the process was started with an old word"
    newer = tuning(6, "a")
    assert mutable_of(found(recorded), newer) == newer.model_copy(update={"since": 40})
    another = tuning(0, "b")
    assert mutable_of(found(recorded), another).consistency == another.consistency, "another run's is its own"


def test_a_desired_configuration_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    desired = DesiredConfiguration(path, "r")
    assert desired.newest() is None
    path.write_text(tuning(2, mode="async").to_json())
    assert desired.newest() == tuning(2, "r", mode="async")
    assert desired.newest() is None
    path.write_text('{"consistency": {"mode": "quick"}}')
    with pytest.raises(InvalidJob, match=r"tuning.json: consistency.mode"):
        desired.newest()
    assert desired.newest() is None


JOB = {"apiVersion": "elastic-ps.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "digits"}}


def set_(before: dict[str, Any], *texts: str) -> dict[str, Any]:
    job = parse_job({**JOB, "spec": {"entrypoint": "train:main", "consistency": before}}, source="test")
    after = changed(job, dict(assignment(text) for text in texts))
    return after.spec.consistency.model_dump(by_alias=True, exclude_defaults=True)


def test_a_change_of_mode_drops_what_belonged_to_the_mode_before() -> None:
    bounded = {"mode": "bounded", "maxStaleness": 8}
    assert set_({}, "consistency.mode=bounded", "spec.consistency.maxStaleness=8") == bounded
    assert set_(bounded, "consistency.maxStaleness=2") == {**bounded, "maxStaleness": 2}
    assert set_(bounded, "consistency.mode=sync") == {}
    assert set_({"backupWorkers": 1}, "consistency.mode=async") == {"mode": "async"}
    assert set_({"mode": "async", "reads": "inconsistent"}, "consistency.reads=") == {"mode": "async"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("consistency.mode", "not of the form FIELD=VALUE"),
        ("=3", "not of the form FIELD=VALUE"),
        ("data.seed=3", "data.seed cannot change while a job runs"),
        ("parameterServer.checkpoint.path=x", "cannot change while a job runs"),
        ("worker.replicas=3", "elastic-ps scale"),
        ("consistency.mode=quick", "consistency.mode"),
        ("consistency.mode=bounded", "maxStaleness"),
        ("consistency.gradients=3", "has no meaning with mode sync"),
        ("consistency.maxStalenes=3", "did you mean 'maxStaleness'?"),
        ("consistency.mode=[", "is not valid YAML"),
        ("parameterServer.checkpoint.interval=soon", "is not a duration"),
        ("consistency.deterministic=true", "deterministic stays as it is"),
    ],
)
def test_what_cannot_be_set_is_said_before_anything_happens(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says.replace("?", r"\?")):
        set_({}, text)


def encoded(before: dict[str, Any], *texts: str, **spec: Any) -> dict[str, Any]:
    fields = {"entrypoint": "train:main", "compression": before, **spec}
    after = changed(
        parse_job({**JOB, "spec": fields}, source="test"), dict(assignment(text) for text in texts)
    )
    return after.spec.compression.model_dump(by_alias=True, exclude_defaults=True)


def test_the_options_of_a_codec_go_with_it() -> None:
    blocks = {"codec": "int8", "options": {"block": 128}}
    assert encoded({}, "compression.codec=int8", "spec.compression.options={block: 128}") == blocks
    assert encoded(blocks, "compression.options={block: 64}") == {"codec": "int8", "options": {"block": 64}}
    assert encoded(blocks, "compression.codec=topk") == {"codec": "topk"}
    assert encoded(blocks, "compression.values=bf16") == {**blocks, "values": "bf16"}
    assert encoded(blocks, "compression.codec=") == {}
    auto = {"codec": "auto", "maxError": 0.5, "values": "topk", "valuesOptions": {"ratio": 0.5}}
    assert encoded(auto, "compression.codec=int8", "compression.values=int8") == {
        "codec": "int8",
        "values": "int8",
    }
    rules = [{"match": "*.bias", "codec": "none"}]
    assert encoded({}, 'compression.rules=[{match: "*.bias", codec: none}]')["rules"] == [
        {**rules[0]},
    ]
    assert encoded({"lossless": "zstd"}, "compression.lossless=none") == {}


@pytest.mark.parametrize(
    ("text", "spec", "says"),
    [
        ("compression.codec=int9", {}, "there is no codec 'int9'; expected one of none, bf16"),
        ("compression.maxError=0.1", {}, "maxError 0.1 has no meaning with codec none"),
        ("compression.values=fp16", {}, "compression.values"),
        ("compression.lossless=gzip", {}, "compression.lossless"),
        ("compression.kodek=int8", {}, "did you mean 'codec'?"),
        ("compression=int8", {}, "compression.codec=int8 or compression.options"),
        ("compression.options.block=8", {}, "compression.options.block cannot change"),
        ("compression.codec=auto", {"consistency": {"deterministic": True}}, "name a codec"),
        ("compression.codec=int8", {"strategy": "all-reduce"}, "does not work with strategy all-reduce"),
    ],
)
def test_a_compression_that_cannot_be_set_is_said_before_anything_happens(
    text: str, spec: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError) as refused:
        encoded({}, text, **spec)
    assert says in str(refused.value)
    assert str(refused.value).count("int9") <= 1, "the given value is said once"


def compressed(generation: int = 0, **compression: Any) -> MutableFields:
    return MutableFields(generation=generation, compression=Compression.model_validate(compression))


def test_another_compression_needs_a_term_and_says_so() -> None:
    before, after = compressed(), compressed(1, codec="topk", options={"ratio": 0.5}, values="bf16")
    assert after.needs_term(before)
    assert after.differs(before)
    assert after.news(before) == {
        "compression": ('codec: topk, options: {"ratio": 0.5}, values: bf16', "codec: none")
    }
    assert before.refusal(after) == ""
    again = read_mutable(after.to_json(), source="test")
    assert again == after
    spec = parse_spec({"entrypoint": "train:main"}, source="test")
    assert again.applied_to(spec).compression == after.compression
    assert "by measured times" in tuning(deterministic=True).refusal(
        tuning(deterministic=True).model_copy(update={"compression": Compression(codec="auto")})
    )


def test_what_the_server_has_moved_is_newer_and_stays_with_a_wish_that_does_not_mean_it() -> None:
    desired = tuning(1, "run", mode="async", maxStalenessP99=4)
    bounded = Consistency(mode="bounded", max_staleness=4, max_staleness_p99=4)
    moved = desired.moved_to(bounded)
    back = moved.moved_to(desired.consistency)
    assert moved.replaces(desired)
    assert back.replaces(moved)
    assert not moved.replaces(back)
    assert (moved.desired, back.desired) == (desired.consistency, desired.consistency)
    assert read_mutable(back.to_json(), source="a checkpoint") == back

    times = desired.model_copy(update={"generation": 2})
    times.checkpoint.keep = 7
    kept = times.after(moved)
    assert kept.replaces(moved)
    assert (kept.consistency, kept.checkpoint.keep) == (bounded, 7)
    assert kept.moved_to(desired.consistency).replaces(kept)
    other = tuning(2, "run", mode="sync")
    assert other.after(moved) == other
    assert other.replaces(moved)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"checkpoint": Times(keep=5)}, "checkpoints are (interval: 30s, keep: 5)"),
        ({"compression": Compression(codec="int8")}, "since version 7, compression is (codec: int8)"),
        (
            {"consistency": Consistency(mode="async"), "checkpoint": Times(interval=timedelta(seconds=2))},
            "since version 7, consistency is (mode: async); checkpoints are (interval: 2s, keep: 3)",
        ),
    ],
)
def test_a_change_is_told_in_words_and_nothing_else_is(fields: dict[str, Any], said: str) -> None:
    before = MutableFields(compression=Compression())
    now = before.model_copy(update=fields)
    compression = describe(now.compression)
    status = TuningStatus(since=7, consistency=describe(now.consistency), compression=compression)
    assert in_force(status, now, before) == said
