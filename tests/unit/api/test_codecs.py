from __future__ import annotations

import inspect
from typing import Any

import pytest

from elastic_ps.api.codecs import CHECKS
from elastic_ps.api.compression import CODECS
from elastic_ps.api.job import parse_spec
from elastic_ps.codec.plan import BUILT_IN, DELTAS
from elastic_ps.errors import InvalidJob


@pytest.mark.parametrize(
    ("compression", "words"),
    [
        ({"codec": "int8", "options": {"block": 3}}, "compression: the codec int8 .* block is 3; expected"),
        ({"codec": "int4", "options": {"block": 256.5}}, r"block is 256\.5"),
        ({"codec": "signsgd", "options": {"block": "64"}}, "block is '64'; expected a multiple of 8"),
        ({"codec": "signsgd", "options": {"ratio": 0.1}}, "It takes: block$"),
        ({"codec": "topk", "options": {"ratio": True}}, "ratio is True"),
        ({"codec": "powersgd", "options": {"rank": 0}}, "rank is 0"),
        ({"options": {"block": 8}}, "the codec none does not take .* It takes: none"),
        ({"rules": [{"match": "*", "codec": "topk", "options": {"ratio": 2}}]}, r"rules\.0: .* ratio is 2"),
        ({"values": "bf16", "valuesOptions": {"block": 2}}, "valuesOptions .* no meaning with values bf16"),
        ({"valuesOptions": {"block": 2}}, "valuesOptions .* no meaning with values none"),
        ({"values": "int8", "valuesOptions": {"block": 3}}, "block is 3"),
        (
            {"values": "topk", "valuesOptions": {"momentum": 0.9}},
            "momentum 0.9, but only gradients have momentum",
        ),
        ({"values": "changed", "valuesOptions": {"ratio": 0.1}}, "changed does not take .*: none"),
        ({"values": "topk", "valuesOptions": {"block": 8}}, "It takes: ratio"),
    ],
)
def test_a_wrong_option_of_a_codec_is_refused_with_the_job(compression: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidJob, match=words):
        parse_spec({"entrypoint": "train:main", "compression": compression}, source="job.yaml")


def test_options_of_a_codec_of_the_users_own_are_left_to_it() -> None:
    compression = {"codec": "mine:Codec", "options": {"block": 3}}
    spec = parse_spec({"entrypoint": "train:main", "compression": compression}, source="job.yaml")
    assert spec.compression.options == {"block": 3}


def test_the_checks_take_what_the_codecs_take() -> None:
    kinds = {**BUILT_IN, **DELTAS}
    assert set(CHECKS) == {*CODECS, *kinds}
    for name, kind in kinds.items():
        assert inspect.signature(CHECKS[name]).parameters == inspect.signature(kind).parameters, name
