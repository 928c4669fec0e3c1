"""Dividing a model into fragments, and whose turn it is."""

from __future__ import annotations

import math

import pytest

from elastic_ps.core.fragments import fragments, steps_before, turn
from elastic_ps.core.partition import Layout, Rule, TensorSpec, partition
from elastic_ps.errors import InvalidModel


def layout(*sizes: int, bucket_bytes: int = 1 << 20, parts: int = 1, frozen: int = 0) -> Layout:
    """Of tensors with these numbers of elements, of which the first `frozen` are frozen, and one buffer."""
    tensors = [
        TensorSpec(f"t{i}", (size,), "float32", Rule.GRADIENT, 0, frozen=i < frozen)
        for i, size in enumerate(sizes)
    ]
    tensors.append(TensorSpec("mean", (4,), "float32", Rule.MEAN))
    return partition(tensors, bucket_bytes=bucket_bytes, shards=2, parts=parts)


def tensors_of(whole: Layout, found: frozenset[int]) -> set[int]:
    return {piece.tensor for index in found for piece in whole.buckets[index].pieces}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_bucket_of_gradients_is_in_one_fragment_and_no_tensor_in_two(count: int) -> None:
    """The large tensor is cut into several buckets, which stay together."""
    whole = layout(1000, 1000, 5000, 1000, 900, bucket_bytes=4000, parts=count)
    found = fragments(whole, count)
    assert len(found) == count
    assert sorted(i for each in found for i in each) == [
        b.index for b in whole.buckets if b.rule is Rule.GRADIENT
    ]
    parts = [tensors_of(whole, each) for each in found]
    assert sum(map(len, parts)) == 5
    assert all(parts)


def test_fragments_have_about_the_same_size_and_layers_that_follow_each_other_are_apart() -> None:
    whole = layout(*[1000] * 8, bucket_bytes=4000)
    found = [tensors_of(whole, each) for each in fragments(whole, 2)]
    assert found == [{7, 5, 3, 1}, {6, 4, 2, 0}]


def test_a_small_model_is_cut_for_its_fragments() -> None:
    assert len(fragments(layout(100, 100, 100, 100, parts=4), 4)) == 4


def test_frozen_tensors_do_not_take_the_place_of_trained_ones() -> None:
    whole = layout(9000, 9000, 100, 100, bucket_bytes=400, parts=2, frozen=2)
    assert [len(tensors_of(whole, each) & {2, 3}) for each in fragments(whole, 2)] == [1, 1]


def test_more_fragments_than_tensors_are_refused_with_the_number_that_there_can_be() -> None:
    with pytest.raises(InvalidModel, match=r"fragments is 3, but .* into 2 at most.*Set fragments to 2 or l"):
        fragments(layout(1000, 1000, parts=3), 3)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_in_turn_each_fragment_comes_once(count: int, scattered: bool) -> None:
    for cycle in range(40):
        versions = range(cycle * count, (cycle + 1) * count)
        assert sorted(turn(v, count, scattered=scattered) for v in versions) == list(range(count))


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("every", range(1, 13))
def test_who_takes_part_now_and_then_comes_to_every_fragment(count: int, every: int) -> None:
    for first in range(every):
        seen = {turn(first + every * n, count, scattered=True) for n in range(8 * count**2)}
        assert len(seen) == count


@pytest.mark.parametrize(("steps", "count"), [(1, 1), (10, 1), (10, 3), (4, 4), (100, 7)])
def test_the_steps_before_exchanges_add_up(steps: int, count: int) -> None:
    found = [steps_before(n, steps, count) for n in range(5 * count)]
    assert all(sum(found[n : n + count]) == steps for n in range(4 * count))
    assert {math.floor(steps / count), math.ceil(steps / count)} >= set(found)
