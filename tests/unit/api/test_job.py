"""A job's YAML file as a person writes it."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import yaml

from elastic_ps.api import manifest
from elastic_ps.api.job import load_job
from elastic_ps.errors import InvalidJob

JOB = """\
apiVersion: elastic-ps.dev/v1alpha1
kind: TrainingJob
metadata: {name: mine}
spec:
  entrypoint: mine:main
"""


def load(tmp_path: Path, text: str) -> object:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return load_job(path)


@pytest.mark.parametrize(
    ("more", "key", "lines"),
    [
        ("  worker: {replicas: 2}\n  worker: {maxReplicas: 4}\n", "worker", (6, 7)),
        ("  worker:\n    replicas: 2\n    maxReplicas: 4\n    replicas: 3\n", "replicas", (7, 9)),
        ("  data: {seed: 1, seed: 2}\n", "seed", (6, 6)),
        ("  'data': {seed: 1}\n  data: {seed: 1}\n", "data", (6, 7)),
        ("  arguments: {layers: [{width: 3,\n    width: 4}]}\n", "width", (6, 7)),
    ],
)
def test_a_key_that_is_given_twice_is_refused(
    tmp_path: Path, more: str, key: str, lines: tuple[int, int]
) -> None:
    with pytest.raises(InvalidJob) as refused:
        load(tmp_path, JOB + more)
    assert f"'{key}' is given twice" in str(refused.value)
    first = f"on line {lines[0]} and " if lines[0] != lines[1] else ""
    assert f"given twice, {first}on line {lines[1]}; keep one" in str(refused.value)
    assert str(tmp_path / "job.yaml") in str(refused.value)


def test_a_seed_has_at_most_63_bits(tmp_path: Path) -> None:
    """No number of a checkpoint has more."""
    assert load(tmp_path, JOB + f"  data: {{seed: {(1 << 63) - 1}}}\n")
    with pytest.raises(InvalidJob, match=r"data\.seed.* less than 9223372036854775808"):
        load(tmp_path, JOB + f"  data: {{seed: {1 << 63}}}\n")


def test_a_merged_key_may_be_given_again(tmp_path: Path) -> None:
    text = JOB + "  arguments:\n    a: &common {lr: 0.1, width: 3}\n    b: {<<: *common, lr: 0.2}\n"
    text += "    c: {<<: *common, width: 4}\n"
    arguments = load(tmp_path, text).spec.arguments  # type: ignore[attr-defined]
    assert arguments["b"] == {"lr": 0.2, "width": 3}
    assert arguments["c"] == {"lr": 0.1, "width": 4}


def test_a_key_may_stand_in_two_mappings(tmp_path: Path) -> None:
    arguments = load(tmp_path, JOB + "  arguments: {a: {x: 1}, b: {x: 1}}\n").spec.arguments  # type: ignore[attr-defined]
    assert arguments == {"a": {"x": 1}, "b": {"x": 1}}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            "  consistency: {mode: local, steps: 9, overlap: 9}\n",
            "Set overlap to 8 or less, or increase steps",
        ),
        ("  consistency: {mode: local, steps: 9, quorum: 3}\n", "to 3 or more, or a smaller quorum"),
    ],
)
def test_a_rule_about_several_fields_does_not_repeat_all_that_was_given(
    tmp_path: Path, more: str, said: str
) -> None:
    with pytest.raises(InvalidJob) as refused:
        load(tmp_path, JOB + more)
    assert str(refused.value).endswith(said)


def test_a_field_s_error_says_what_was_given(tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match=r"spec\.consistency\.steps: .* got 0$"):
        load(tmp_path, JOB + "  consistency: {mode: local, steps: 0}\n")


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("spec.entrypoint", "train.py", "expected module:name, such as train:main, got 'train.py'"),
        ("metadata.name", "My_Job", "expected at most 52 characters of a-z, 0-9 and '-', .*, got 'My_Job'"),
        ("spec.parameterServer.checkpoint.existingClaim", "A", "expected at most 253 characters .*, got 'A'"),
        ("spec.parameterServer.checkpoint.volumeClaim.storage", "1GB", "such as 500Mi or 10Gi, got '1GB'"),
    ],
)
def test_a_text_of_another_form_is_refused_without_a_regular_expression(
    tmp_path: Path, path: str, value: str, said: str
) -> None:
    document = yaml.safe_load(JOB)
    *parents, name = path.split(".")
    functools.reduce(lambda part, each: part.setdefault(each, {}), parents, document)[name] = value
    with pytest.raises(InvalidJob, match=rf": {re.escape(path)}: [^^]*{said}$"):
        load(tmp_path, yaml.safe_dump(document))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 100_000),
        ("-2e+3", -2000),
        ("1.5e3", 1500),
        ("1.", 1),
        ("10.0", 10),
        ("08", 8),
        ("+1", 1),
        ("-0b1", -1),
        ("0X1F", 31),
        ("1e400", "1e400"),
        ("1e30", 1e30),
        ("0o_", "0o_"),
        ("0x_", "0x_"),
        (".5", 0.5),
        ("7", 7),
        ("1_000", 1000),
        ("0o17", 15),
        ("017", 15),
        ("0x1f", 31),
        ("'1e-3'", "1e-3"),
        ("2026-01-31", "2026-01-31"),
        ("2026-01-31T10:00:00Z", "2026-01-31T10:00:00Z"),
        ("12:30:45", "12:30:45"),
        ("1e", "1e"),
        ("v1.5", "v1.5"),
        ("on", True),
        ("null", None),
    ],
)
def test_a_value_is_what_it_is_for_kubectl(tmp_path: Path, text: str, value: object) -> None:
    arguments = load(tmp_path, JOB + f"  arguments: {{given: {text}}}\n").spec.arguments  # type: ignore[attr-defined]
    assert arguments["given"] == value
    assert type(arguments["given"]) is type(value)


def test_a_document_that_is_written_is_read_as_it_was() -> None:
    texts = ["1e3", "1e-3", "08", "0o17", "10.0", "2026-01-31", "12:30:45", "on", "null", ".5", "x", "0x_"]
    document = {"texts": texts, "numbers": [1, 0.001, 1e30], "b": True, "a": None}
    assert manifest.read(manifest.write(document)) == document
    assert list(manifest.read(manifest.write(document))) == list(document)


@pytest.mark.parametrize(
    "text",
    [
        "worker:",
        "worker: {replicas: null, template: null}",
        "parameterServer: {checkpoint: {volumeClaim: null, interval: ~}}",
        "compression: {codec: null, options: null, rules: null}",
        "arguments:",
        "runPolicy: {podFailurePolicy: null, backoffLimit: null}",
        "evaluator: null",
        "unencryptedAllReduce: null",
    ],
)
def test_a_null_means_what_leaving_the_field_out_means(tmp_path: Path, text: str) -> None:
    """As the API server reads it."""
    assert load(tmp_path, f"{JOB}  {text}\n") == load(tmp_path, JOB)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("parameterServer: {checkpoint: {resumeFrom: {claim: null}}}", "needs either job or claim"),
        ("wroker: null", "unknown field 'spec.wroker'; did you mean 'worker'"),
        ("evaluator: {entrypoint: null}", "evaluator.entrypoint is missing"),
        ("compression: {rules: [null]}", "compression.rules.0"),
    ],
)
def test_a_null_is_refused_where_leaving_the_field_out_is(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InvalidJob, match=words):
        load(tmp_path, f"{JOB}  {text}\n")
