"""Steps without a gradient for a bucket: they cost no bytes, and the sums are those of zeros."""

from __future__ import annotations

import itertools

import pytest
import torch

from elastic_ps.core.partition import Rule, TensorSpec, partition
from elastic_ps.core.settings import CLAMP, Settings
from elastic_ps.errors import Refused
from elastic_ps.server.shards.pulls import Pull, Pulled
from tests.testing.shard import LR, TERM, Body, Rig, one_bucket, ones, tensor

NOTHING = Body(torch.empty(0))
ABSENT = (False, False)


def two() -> Rig:
    rig = Rig(one_bucket(tensor("a", 2), tensor("b", 2)))
    rig.fill(0, ones(4, 10.0))
    return rig


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_who_has_no_gradient_counts_as_zeros_in_any_order(order: tuple[int, ...]) -> None:
    rig = two()
    for _ in range(2):  # the second round must not begin with the first one's sum
        for worker in order:
            if worker == 0:
                assert rig.push(0, ones(4, 6.0), samples=1, present=(True, False))
            else:
                assert rig.push(worker, Body(torch.empty(0)), samples=1, present=ABSENT)
        rig.commit(0, 1, 2, samples=3)
    assert rig.values().tolist() == [6.0, 6.0, 10.0, 10.0]


def test_a_round_without_any_gradient_leaves_the_bucket_as_it_is() -> None:
    rig = two()
    rig.push(0, ones(4, 3.0))
    rig.commit(0, samples=1)
    for worker in (0, 1):
        assert rig.push(worker, Body(torch.empty(0)), present=ABSENT)
        assert not rig.push(worker, Body(torch.empty(0)), present=ABSENT), "it is added once"
    rig.commit(0, 1, samples=2)
    assert torch.equal(rig.values(), ones(4, 7.0))


def test_a_standby_is_sent_zeros_for_what_nobody_has_a_gradient_for() -> None:
    rig = two()
    rig.push(0, ones(4, 3.0))
    rig.commit(0, samples=1)
    rig.push(0, Body(torch.empty(0)), present=ABSENT)
    (part,) = rig.shard.sums()
    assert (part.present, part.sum.tolist()) == ([False, False], [0.0] * 4)


def test_limits_hold_without_a_gradient_too() -> None:
    rig = two()
    rig.push(0, Body(torch.empty(0)), present=ABSENT)
    rig.settings = Settings(groups=({**LR.groups[0], CLAMP: [0.0, 1.0]},))
    rig.commit(0, samples=1)
    assert torch.equal(rig.values(), ones(4, 1.0))
    assert [p.unchanged for p in pulled(rig, held=0)] == [False]


@pytest.mark.parametrize("present", [(), (True, False)])
def test_an_empty_body_with_a_gradient_is_malformed(present: tuple[bool, ...]) -> None:
    rig = two()
    with pytest.raises(Refused, match="push of 0 bytes"):
        rig.push(0, Body(torch.empty(0)), present=present)


def pulled(rig: Rig, *, held: int | None) -> list[Pulled]:
    answers = list(rig.shard.pull(Pull(buckets=[0], version=rig.version, term=TERM, held=held)))
    assert all(isinstance(answer, Pulled) for answer in answers)
    return answers  # type: ignore[return-value]


def test_a_bucket_that_has_not_changed_is_not_sent_again() -> None:
    rig = two()
    assert [(p.unchanged, len(p.data)) for p in pulled(rig, held=None)] == [(False, 16)]
    assert [(p.unchanged, len(p.data)) for p in pulled(rig, held=0)] == [(True, 0)]
    rig.push(0, ones(4, 3.0))
    rig.commit(0, samples=1)
    rig.push(0, Body(torch.empty(0)), present=ABSENT)
    rig.commit(0, samples=1)
    assert [(p.unchanged, p.version, len(p.data)) for p in pulled(rig, held=1)] == [(True, 2, 0)]
    assert [(p.unchanged, p.version, len(p.data)) for p in pulled(rig, held=0)] == [(False, 2, 16)]


def test_frozen_tensors_have_buckets_of_their_own() -> None:
    specs = [
        TensorSpec(name, (100,), "float32", Rule.GRADIENT, 0, frozen=name.startswith("base"))
        for name in ("base.0", "lora.0", "base.1", "lora.1")
    ]
    layout = partition(specs, bucket_bytes=1 << 20, shards=1)
    inside = [{specs[piece.tensor].name[:4] for piece in bucket.pieces} for bucket in layout.buckets]
    assert inside == [{"lora"}, {"base"}]
    assert specs[0] == TensorSpec("base.0", (100,), "float32", Rule.GRADIENT, 0), "unfrozen, it is the same"
