"""Every element of the model is in one bucket, and buckets are as the worker's flat memory relies on."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ps.core.partition import ITEM_SIZE, Layout, Rule, TensorSpec, cut_rows, difference, partition

MIB = 1024 * 1024


def spec(name: str, *shape: int, dtype: str = "float32", rule: Rule = Rule.GRADIENT) -> TensorSpec:
    """A tensor; trained ones are in group 0."""
    return TensorSpec(name, shape, dtype, rule, 0 if rule is Rule.GRADIENT else -1)


@st.composite
def models(draw: st.DrawFn) -> list[TensorSpec]:
    """Tensors of all sizes, dtypes and rules; those that no bucket has at the end."""
    shapes = st.sampled_from([(), (0, 3), (1,), (2, 3), (17,), (30, 10), (70, 80), (60_000,)])
    tensors = st.lists(
        st.tuples(shapes, st.sampled_from(sorted(ITEM_SIZE)), st.sampled_from(Rule)), min_size=1, max_size=12
    )
    return [
        spec(str(i), *shape, dtype=dtype, rule=rule)
        for i, (shape, dtype, rule) in enumerate(sorted(draw(tensors), key=lambda t: t[2] is Rule.EXTERNAL))
    ]


cuts = st.tuples(st.sampled_from([1000, 4096, 70_000, 4 * MIB, 64 * MIB]), st.integers(1, 5))


def ranges(layout: Layout) -> dict[int, list[tuple[int, int]]]:
    """For each tensor, its pieces as (start, stop) in the order of the buckets."""
    found: dict[int, list[tuple[int, int]]] = {}
    for bucket in layout.buckets:
        for piece in bucket.pieces:
            found.setdefault(piece.tensor, []).append((piece.start, piece.start + piece.length))
    return found


@given(models(), cuts)
def test_every_element_is_in_exactly_one_bucket_and_pieces_ascend(
    model: list[TensorSpec], cut: tuple[int, int]
) -> None:
    layout = partition(model, bucket_bytes=cut[0], shards=cut[1])
    found = ranges(layout)
    assert layout.base == tuple(tensor for tensor in model if tensor.rule is Rule.EXTERNAL)
    for index, tensor in enumerate(layout.tensors):
        pieces = found.pop(index, [])
        assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])][: len(pieces)]
        assert (pieces[-1][1] if pieces else 0) == tensor.elements
    assert not found


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 40)), min_size=1, max_size=4), cuts)
def test_a_table_is_cut_between_rows_into_few_buckets_of_its_own(
    shapes: list[tuple[int, int]], cut: tuple[int, int]
) -> None:
    tables = [replace(spec(f"table {i}", *shape), sparse=True) for i, shape in enumerate(shapes)]
    model = [spec("dense", 70, 80), *tables]
    layout = partition(model, bucket_bytes=cut[0], shards=cut[1])
    for index, pieces in ranges(layout).items():
        if model[index].sparse:
            assert all(start % model[index].row == 0 for start, _ in pieces)
            assert len(pieces) <= cut[1]
            assert pieces[-1][1] == model[index].elements
    for bucket in layout.buckets:
        owner = model[bucket.pieces[0].tensor]
        assert layout.width(bucket) == (owner.row if owner.sparse else 0)
        assert len(bucket.pieces) == 1 or not any(model[piece.tensor].sparse for piece in bucket.pieces)


@given(models(), cuts)
def test_a_bucket_is_of_one_dtype_and_rule_and_holds_something(
    model: list[TensorSpec], cut: tuple[int, int]
) -> None:
    layout = partition(model, bucket_bytes=cut[0], shards=cut[1])
    assert [bucket.index for bucket in layout.buckets] == list(range(len(layout.buckets)))
    for bucket in layout.buckets:
        for piece in bucket.pieces:
            assert piece.length > 0
            tensor = model[piece.tensor]
            assert (tensor.dtype, tensor.rule) == (bucket.dtype, bucket.rule)


@given(models(), cuts)
def test_pieces_of_a_tensor_are_adjacent_in_the_memory_of_its_dtype_and_rule(
    model: list[TensorSpec], cut: tuple[int, int]
) -> None:
    """The worker keeps one flat memory for each (dtype, rule), in which a tensor is one view."""
    layout = partition(model, bucket_bytes=cut[0], shards=cut[1])
    places: dict[tuple[str, Rule], int] = {}
    starts: dict[int, set[int]] = {}
    for bucket in layout.buckets:
        place = places.get((bucket.dtype, bucket.rule), 0)
        for piece in bucket.pieces:
            starts.setdefault(piece.tensor, set()).add(place - piece.start)
            place += piece.length
        places[bucket.dtype, bucket.rule] = place
    assert all(len(of_tensor) == 1 for of_tensor in starts.values())


@given(models(), cuts)
def test_tensors_go_in_reverse_order_of_registration(model: list[TensorSpec], cut: tuple[int, int]) -> None:
    layout = partition(model, bucket_bytes=cut[0], shards=cut[1])
    for rule in Rule:
        order = [piece.tensor for b in layout.buckets if b.rule is rule for piece in b.pieces]
        assert order == sorted(order, reverse=True)
    gradients = [b.index for b in layout.pull_order if b.rule is Rule.GRADIENT]
    assert gradients == sorted(gradients, reverse=True)
    assert sorted(b.index for b in layout.pull_order) == [b.index for b in layout.buckets]
    assert all(b.rule is not Rule.CONSTANT for b in layout.pushed)


@given(models(), cuts)
def test_shards_differ_by_at_most_a_bucket(model: list[TensorSpec], cut: tuple[int, int]) -> None:
    layout = partition(model, bucket_bytes=cut[0], shards=cut[1])
    loads = [sum(b.nbytes for b in layout.of_shard(shard)) for shard in range(layout.shards)]
    assert max(loads) - min(loads) <= max((b.nbytes for b in layout.buckets), default=0)
    assert sorted(b.index for s in range(cut[1]) for b in layout.of_shard(s)) == list(
        range(len(layout.buckets))
    )


@given(models(), cuts)
def test_the_same_model_is_always_cut_the_same_way(model: list[TensorSpec], cut: tuple[int, int]) -> None:
    first, second = (partition(list(model), bucket_bytes=cut[0], shards=cut[1]) for _ in range(2))
    assert first == second


def test_a_bucket_is_not_larger_than_asked_for_and_a_large_tensor_is_cut() -> None:
    layout = partition([spec("a", 10 * MIB), spec("b", 1000)], bucket_bytes=4 * MIB, shards=2)
    assert max(b.nbytes for b in layout.buckets) <= 4 * MIB
    assert len(layout.buckets) >= 10


@given(models(), cuts)
def test_rows_are_cut_only_if_one_is_larger_than_a_bucket(
    model: list[TensorSpec], cut: tuple[int, int]
) -> None:
    layout = partition(model, bucket_bytes=cut[0], shards=cut[1])
    cut_ones = cut_rows(layout, [0, -1])
    assert all(t.row * ITEM_SIZE[t.dtype] > cut[0] for t in cut_ones)
    assert max((b.nbytes for b in layout.buckets), default=0) <= cut[0]
    assert not cut_rows(layout, [1])


def test_a_row_that_is_larger_than_a_bucket_is_cut() -> None:
    layout = partition([spec("a", 3, 1000), spec("b", 3, 10)], bucket_bytes=2000, shards=2)
    assert [t.name for t in cut_rows(layout, [0])] == ["a"]


@given(models(), cuts)
def test_tensors_of_the_groups_that_stay_whole_are_in_one_piece(
    model: list[TensorSpec], cut: tuple[int, int]
) -> None:
    layout = partition(model, bucket_bytes=cut[0], shards=cut[1], whole=[0])
    for tensor, pieces in ranges(layout).items():
        assert model[tensor].rule is not Rule.GRADIENT or pieces == [(0, model[tensor].elements)]


def test_rows_that_are_larger_than_the_buckets_wanted_are_alone() -> None:
    layout = partition([spec("a", 4, 1000)], bucket_bytes=4 * 1024, shards=1, smallest=256)
    assert [bucket.elements for bucket in layout.buckets] == [1000] * 4
    assert cut_rows(layout, [0]) == []


def test_a_small_model_gives_each_shard_something() -> None:
    layout = partition([spec(str(i), 50) for i in range(9)], bucket_bytes=4 * MIB, shards=3)
    assert {b.shard for b in layout.buckets} == {0, 1, 2}


def test_more_shards_than_elements_make_no_empty_buckets() -> None:
    layout = partition([spec("weight", 1), spec("bias", 1)], bucket_bytes=4 * MIB, shards=5)
    assert [b.elements for b in layout.buckets] == [1, 1]


def test_whoever_wants_larger_buckets_than_usual_gets_few() -> None:
    model = [spec(str(i), MIB) for i in range(10)]
    assert {
        size: len(partition(model, bucket_bytes=size * MIB, shards=1).buckets) for size in (4, 16, 64)
    } == {
        4: 10,
        16: 3,
        64: 1,
    }


@pytest.mark.parametrize("rule", [Rule.CONSTANT, Rule.MEAN])
def test_a_small_head_does_not_cut_a_large_frozen_model_into_crumbs(rule: Rule) -> None:
    """Fine-tuning the last layer only: the bucket size must not follow from the few trained parameters."""
    layout = partition([spec("body", 20 * MIB, rule=rule), spec("head", 100)], bucket_bytes=4 * MIB, shards=1)
    assert len(layout.buckets) <= 21


def test_difference_names_what_differs() -> None:
    ours = [spec("a", 2), spec("b", 3)]
    assert difference(ours, list(ours)) == ""
    assert difference(ours, ours[:1]) == "b float32[3]: only in this worker's model"
    assert "b float32[3]: only in the model on the parameter server" in difference(ours[:1], ours)
    assert "this worker has a float32[2], the parameter server has a float16[2]" in difference(
        ours, [spec("a", 2, dtype="float16"), ours[1]]
    )
    assert "constant" in difference(ours, [spec("a", 2, rule=Rule.CONSTANT), ours[1]])
    assert difference(ours, ours[::-1]) == "the tensors are the same, but their order differs"
    many = difference([spec(str(i), 1) for i in range(12)], [])
    assert many.endswith("and 4 more")
    assert len(list(itertools.takewhile(str.strip, many.split(";")))) == 9
