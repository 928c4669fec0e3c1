"""The choice whether gradients are sent while backward runs."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_ps.api.consistency import Consistency
from elastic_ps.core.overlap import Overlap, choose, smallest_bucket
from elastic_ps.core.partition import SMALLEST_BUCKET_BYTES, Rule, TensorSpec, partition

KIB = 1024


def choice(
    mode: str = "sync",
    *,
    setting: Any = "auto",
    rows: int = 1024,
    bucket_bytes: int = 4 * KIB * KIB,
    script: bool = True,
    named: bool = False,
    crowded: bool = False,
) -> Overlap:
    """For a model of so many KiB, with a buffer beside its parameters."""
    given = {"local": {"steps": 4}, "bounded": {"maxStaleness": 2}, "accumulate": {"gradients": 2}}.get(
        mode, {}
    )
    tensors = (
        TensorSpec("w", (rows, 256), "float32", Rule.GRADIENT, 0),
        TensorSpec("b", (4,), "float32", Rule.MEAN, -1),
    )
    smallest = smallest_bucket(setting)
    layout = partition(tensors, bucket_bytes=bucket_bytes, shards=1, smallest=smallest)
    consistency = Consistency.model_validate({"mode": mode, **given})
    return choose(setting, consistency, layout, script=script, named=named, crowded=crowded)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Overlap.USED),
        ({"mode": "accumulate"}, Overlap.USED),
        ({"setting": "always"}, Overlap.USED),
        ({"setting": "never"}, Overlap.NEVER),
        ({"script": False}, Overlap.SCRIPT),
        ({"script": False, "setting": "always"}, Overlap.SCRIPT),
        ({"named": True, "setting": "always"}, Overlap.OPTIMIZERS),
        ({"mode": "local", "script": False}, Overlap.LOCAL),
        ({"mode": "async"}, Overlap.STALE),
        ({"mode": "bounded", "setting": "always"}, Overlap.STALE),
        ({"mode": "async", "setting": "never"}, Overlap.NEVER),
        ({"rows": 200}, Overlap.ONE_BUCKET),
        ({"rows": 200, "setting": "always"}, Overlap.USED),
        ({"rows": 200, "crowded": True}, Overlap.ONE_BUCKET),
        ({"bucket_bytes": 64 * KIB * KIB, "crowded": True}, Overlap.CROWDED),
        ({"bucket_bytes": 512 * KIB, "crowded": True}, Overlap.USED),
        ({"bucket_bytes": 64 * KIB * KIB}, Overlap.ONE_BUCKET),
    ],
    ids=str,
)
def test_gradients_are_sent_while_backward_runs_where_it_pays(
    given: dict[str, Any], expected: Overlap
) -> None:
    assert choice(**given) is expected


def test_gradients_are_copied_during_backward_unless_something_forbids_it() -> None:
    """Also those of a single bucket: the copy costs the same then, and step() is shorter."""
    held = {Overlap.LOCAL, Overlap.SCRIPT, Overlap.OPTIMIZERS, Overlap.NEVER}
    assert {each for each in Overlap if not each.in_hooks} == held


def test_the_reason_is_a_part_of_the_sentence_if_they_are_not_sent() -> None:
    assert str(Overlap.USED) == "gradients are sent during backward"
    assert str(Overlap.NEVER) == "gradients are not sent during backward: parameterServer.overlap is never"
    assert all("; " not in str(each) for each in Overlap), "it separates those of several workers"


def test_the_smallest_bucket() -> None:
    assert [smallest_bucket(setting) for setting in ("auto", "never")] == [SMALLEST_BUCKET_BYTES] * 2
    assert smallest_bucket("auto", 64) == 64
    assert smallest_bucket("always", 64) == 1
