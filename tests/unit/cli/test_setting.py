"""Fields of a job that are given on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_ps.api.job import TrainingJob, parse_job
from elastic_ps.cli.setting import with_fields
from elastic_ps.errors import InvalidJob, UserError
from elastic_ps.local import script


def job() -> TrainingJob:
    document = {
        "apiVersion": "elastic-ps.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "j"},
        "spec": {
            "entrypoint": "a:b",
            "arguments": {"lr": 0.1},
            "worker": {"replicas": 2, "maxReplicas": 4},
            "consistency": {"mode": "bounded", "maxStaleness": 4},
        },
    }
    return parse_job(document, source="test")


def test_any_field_can_be_given_beside_those_of_the_file() -> None:
    given = [
        "consistency.maxStaleness=8",
        "spec.parameterServer.checkpoint.interval=5m",
        "parameterServer.checkpoint.path=~/kept",
        "arguments.lr=1e-3",
        "arguments.sizes=[8, 16]",
        "worker.maxReplicas=",
        "metadata.name=other",
    ]
    changed = with_fields(job(), given)
    assert changed.name == "other"
    assert changed.spec.arguments == {"lr": 0.001, "sizes": [8, 16]}
    assert changed.spec.consistency.max_staleness == 8
    assert changed.spec.parameter_server.checkpoint.interval.total_seconds() == 300
    assert changed.spec.parameter_server.checkpoint.path == str(Path.home() / "kept")
    assert (changed.spec.worker.replicas, changed.spec.worker.max_replicas) == (2, None)
    assert changed.spec.entrypoint == "a:b"


def test_a_script_needs_no_file_for_its_fields(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("pass\n")
    changed = with_fields(script.job_of(path, ["--lr", "1"]), ["consistency.globalBatchSize=512"])
    assert changed.spec.consistency.global_batch_size == 512
    assert changed.spec.arguments["argv"] == ["--lr", "1"]


def test_a_directory_that_was_removed_has_no_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    with pytest.raises(UserError, match=r"cannot read the script train\.py: No such file"):
        script.job_of(Path("train.py"), [])


@pytest.mark.parametrize(
    ("assignment", "error", "message"),
    [
        ("consistency.globalBatchsize=512", InvalidJob, "did you mean 'globalBatchSize'?"),
        ("wroker.replicas=2", InvalidJob, "did you mean 'worker'?"),
        ("replicas=2", InvalidJob, "did you mean 'spec.parameterServer.replicas' or 'spec.worker.replicas'?"),
        ("worker.replicas=many", InvalidJob, "should be a valid integer, got 'many'"),
        ("worker.replicas=9", InvalidJob, "maxReplicas 4"),
        ("worker.replicas=two", InvalidJob, "--set worker.replicas=two: spec.worker.replicas"),
        ("worker.replicas", UserError, "not of the form FIELD=VALUE"),
        ("entrypoint.name=x", UserError, "entrypoint is 'a:b', which has no fields"),
        ("arguments.lr={", UserError, "'{' is not valid YAML"),
    ],
)
def test_what_may_not_be_is_refused_as_in_a_file(
    assignment: str, error: type[UserError], message: str
) -> None:
    with pytest.raises(error) as refused:
        with_fields(job(), [assignment])
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("given", "starts"),
    [
        (
            ("image=5", "spec.worker.replicas=two", "consistency.maxStaleness=8"),
            ("--set image=5: spec.image: ", "--set spec.worker.replicas=two: spec.worker.replicas: "),
        ),
        (("image=a", "worker.replica=2"), ("--set worker.replica=2: unknown field 'spec.worker.replica'",)),
        (("metadata.name=A_B", "image=a"), ("--set metadata.name=A_B: metadata.name: ",)),
        (
            ("image=a", "worker.replicas=9", "worker.maxReplicas=3"),
            ("--set worker.replicas=9 --set worker.maxReplicas=3: spec.worker: replicas 9 is above",),
        ),
    ],
)
def test_of_several_fields_the_wrong_one_is_named(given: tuple[str, ...], starts: tuple[str, ...]) -> None:
    with pytest.raises(InvalidJob) as refused:
        with_fields(job(), given)
    lines = str(refused.value).splitlines()
    assert len(lines) == len(starts)
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True)), lines
