"""Where the slices of a tensor lie that a script keeps on the parameter servers."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from elastic_ps.core.partition import ITEM_SIZE
from elastic_ps.tensors.spread import Spec, spread

SHAPES = st.lists(st.integers(1, 40), max_size=4)


@given(SHAPES, st.sampled_from(sorted(ITEM_SIZE)), st.integers(1, 5), st.sampled_from([1024, 1 << 20]))
def test_every_element_lies_in_one_slice(
    shape: list[int], dtype: str, shards: int, bucket_bytes: int
) -> None:
    slices = spread("x", shape, dtype, bucket_bytes=bucket_bytes, shards=shards)
    covered = [n for each in slices for n in range(each.start, each.start + each.length)]
    assert covered == list(range(math.prod(shape)))
    assert {each.shard for each in slices} <= set(range(shards))
    assert all(each.length * ITEM_SIZE[dtype] <= bucket_bytes for each in slices)


def test_a_large_tensor_is_shared_out_and_a_small_one_is_whole() -> None:
    large = spread("x", (4, 1 << 20), "float32", bucket_bytes=4 << 20, shards=3)
    taken = [sum(each.length for each in large if each.shard == shard) for shard in range(3)]
    assert max(taken) - min(taken) <= max(each.length for each in large)
    assert len(spread("x", (64, 1024), "float32", bucket_bytes=4 << 20, shards=3)) == 1


def test_small_tensors_do_not_all_lie_on_one_shard() -> None:
    homes = [spread(f"layer.{n}.bias", (10,), "float32", bucket_bytes=1024, shards=4)[0] for n in range(100)]
    assert min([each.shard for each in homes].count(shard) for shard in range(4)) > 10


def test_the_home_depends_on_the_name_alone() -> None:
    homes = {
        spread("x", shape, "float32", bucket_bytes=1024, shards=4)[0].shard
        for shape in [(), (3,), (1 << 16,), (7, 1000)]
    }
    assert len(homes) == 1


def test_the_size_is_in_bytes() -> None:
    kinds = [Spec("x", (), "float32"), Spec("x", (3, 5), "float64"), Spec("x", (0, 5), "int8")]
    assert [kind.nbytes for kind in kinds] == [4, 120, 0]
