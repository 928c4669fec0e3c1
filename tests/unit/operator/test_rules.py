"""The rules of the definition, and whether Python means the same by them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_operator.crd import crd
from elastic_operator.merging import merge
from elastic_ps.api.consistency import OUTER_RULES, Consistency
from elastic_ps.api.job import TrainingJobSpec, parse_spec
from elastic_ps.errors import InvalidJob
from tests.testing.refusals import FIXED, REFUSED

Rule = tuple[str, str, str]
"""The path of the part that it is about, its words in CEL, and its message."""


def rules_of(node: dict[str, Any], path: str = "") -> Iterator[Rule]:
    for rule in node.get("x-kubernetes-validations", []):
        yield path, rule["rule"], rule["message"]
    for name, inner in node.get("properties", {}).items():
        yield from rules_of(inner, f"{path}.{name}")


SCHEMA = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
RULES = [rule for rule in rules_of(SCHEMA["properties"]["spec"]) if "oldSelf" not in rule[1]]
ON_A_CLUSTER = "a job with several shards or with standbys needs"


def found(document: Any, path: str) -> Any:
    for name in filter(None, path.split(".")):
        document = document.get(name)
    return document


def holds(cel: str, part: dict[str, Any]) -> bool:
    """What an API server says of a rule, as far as our rules use the language."""
    python = re.sub(r"has\(self\.([\w.]+)\)", r"(found(part, '\1') is not None)", cel)
    python = re.sub(r"self\.([\w.]+)", r"found(part, '\1')", python)
    python = re.sub(r"\((\(.*?\)) \? (.*?) : (.*?)\)", r"(\2 if \1 else \3)", python)
    python = re.sub(r"!(?!=)", " not ", python.replace("&&", " and ").replace("||", " or ")).strip()
    return bool(eval(python, {"found": found, "part": part}))


def refused(spec: dict[str, Any]) -> list[str]:
    """The messages of the rules that a spec breaks."""
    plain = TrainingJobSpec(entrypoint="a:b").model_dump(mode="json", by_alias=True, exclude_none=True)
    document = merge(plain, spec)
    parts = [(found(document, path), cel, message) for path, cel, message in RULES]
    return [message for part, cel, message in parts if part is not None and not holds(cel, part)]


@pytest.mark.parametrize(("words", "spec"), REFUSED)
def test_the_models_refuse_what_the_definition_refuses(words: str, spec: dict[str, Any]) -> None:
    assert any(words in message for message in refused(spec))
    if words.startswith(ON_A_CLUSTER):
        return
    with pytest.raises(InvalidJob):
        parse_spec({"entrypoint": "a:b", **spec}, source="test")


def test_each_rule_of_the_definition_is_tried() -> None:
    tried = [words for words, _ in REFUSED] + [f"{field} cannot change" for field, _ in FIXED]
    tried += ["metadata.name must have", "worker.replicas cannot change"]
    tried += ["in mode local, only consistency.steps can change"]
    messages = [message for _, _, message in rules_of(SCHEMA)]
    assert [message for message in messages if not any(words in message for words in tried)] == []


def values(name: str) -> st.SearchStrategy[Any]:
    known: dict[str, list[Any]] = {
        "balance": ["even", "speed"],
        "reads": ["consistent", "inconsistent"],
        "staleness_scale": ["damped", "none"],
        "grace": ["1s", "auto"],
        "outer": list(OUTER_RULES),
        "outer_learning_rate": [0.5, 1.0, 1.5],
        "outer_momentum": [0.0, 0.5],
        "outer_nesterov": [True, False],
        "deterministic": [True, False],
    }
    return st.sampled_from(known.get(name, [1, 2, 3]))


NAMES = [name for name in Consistency.model_fields if name != "mode"]
NEEDED: dict[str, dict[str, Any]] = {
    "sync": {},
    "bounded": {"max_staleness": 2},
    "accumulate": {"gradients": 2},
    "async": {},
    "local": {"steps": 3},
}
FEW = st.lists(st.sampled_from(NAMES), max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: values(name) for name in names})
)


@given(st.sampled_from(list(NEEDED)), st.booleans(), FEW, st.integers(1, 4), st.integers(1, 4))
def test_python_means_the_same_as_the_definition(
    mode: str, complete: bool, options: dict[str, Any], replicas: int, least: int
) -> None:
    said = {"mode": mode} | (NEEDED[mode] if complete else {}) | options
    consistency = {str(Consistency.model_fields[name].alias): value for name, value in said.items()}
    spec = {"consistency": consistency, "worker": {"replicas": replicas, "minReplicas": least}}
    why = ""
    try:
        parse_spec({"entrypoint": "a:b", **spec}, source="test")
    except InvalidJob as error:
        why = str(error)
    assert bool(why) == bool(refused(spec)), (why, refused(spec))
