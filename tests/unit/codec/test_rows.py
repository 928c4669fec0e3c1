"""Rows of tables: what is sent of a gradient, their mean, and which rows of which versions have changed."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from elastic_ps.api.compression import Compression
from elastic_ps.codec.base import Payload
from elastic_ps.codec.encoder import Encoder
from elastic_ps.codec.plan import Plan
from elastic_ps.codec.rows import MOST_VERSIONS, ROWS, RowChanges, Rows, RowSum, put
from elastic_ps.codec.stepper import Stepper
from elastic_ps.core.partition import Bucket, Layout, Piece, Rule, TensorSpec
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.worker.wire.measuring import Traffic
from tests.testing.shard import Rig, body_of

WIDTH = 3
pushes = st.lists(
    st.tuples(st.lists(st.integers(0, 19), max_size=30), st.integers(1, 9)), min_size=1, max_size=6
)


def sparse(numbers: list[int], *, rows: int = 20, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A gradient as backward makes it: a row may be there several times."""
    random = torch.Generator().manual_seed(len(numbers))
    values = torch.randn(len(numbers), WIDTH, generator=random, dtype=dtype)
    places = torch.tensor([numbers], dtype=torch.int64)
    return torch.sparse_coo_tensor(places, values, (rows, WIDTH), check_invariants=True)


@settings(max_examples=50, deadline=None)
@given(pushes)
def test_the_mean_is_that_of_dense_gradients(given: list[tuple[list[int], int]]) -> None:
    total, weight = torch.zeros(20, WIDTH, dtype=torch.float64), sum(weight for _, weight in given)
    made = RowSum(WIDTH, torch.float64)
    for numbers, own in given:
        gradient = sparse(numbers)
        made.add(Rows.of(gradient), own)
        total += gradient.to_dense() * own / weight
    torch.testing.assert_close(made.dense(20), total, rtol=1e-13, atol=1e-13)
    assert made.mean().numbers.tolist() == sorted({n for numbers, _ in given for n in numbers})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_are_replaced(dtype: torch.dtype) -> None:
    matrix, values = torch.zeros(5, WIDTH, dtype=dtype), torch.ones(2, 1, dtype=dtype).expand(2, WIDTH)
    put(matrix, torch.tensor([1, 4]), values)
    assert matrix.sum(1).tolist() == [0, WIDTH, 0, 0, WIDTH]


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.SGD, torch.optim.SparseAdam])
def test_a_step_of_rows_is_that_of_the_sparse_gradient(kind: Any) -> None:
    """With the state that a checkpoint has, too."""
    options = {"lr": 0.1, **({"lr_decay": 0.5, "eps": 1e-3} if kind is torch.optim.Adagrad else {})}
    matrix = torch.nn.Parameter(torch.randn(20, WIDTH, dtype=torch.float64))
    plain = torch.nn.Parameter(matrix.detach().clone())
    stepper, alone = Stepper([kind], [options], [matrix], [0]), kind([plain], **options)
    for numbers in ([2, 7, 7], [7, 11], [], [0, 2, 19]):
        plain.grad = sparse(numbers)
        with torch.sparse.check_sparse_tensor_invariants(False):
            alone.step()
        stepper.prepare([options])
        stepper.step_rows(Rows.of(sparse(numbers)))
        again = {key: torch.as_tensor(each) for key, each in stepper.state_of(0).items()}
        if again:
            stepper = Stepper([kind], [options], [matrix], [0])
            stepper.take(0, again)
    torch.testing.assert_close(matrix, plain, rtol=1e-13, atol=1e-13)
    for key, value in alone.state[plain].items():
        torch.testing.assert_close(again[key], torch.as_tensor(value))


def test_workers_without_a_gradient_count_for_the_mean() -> None:
    made = RowSum(WIDTH, torch.float64)
    made.add(None, 3)
    assert not made.mean().numbers.numel()
    made.add(Rows.of(sparse([4])), 1)
    torch.testing.assert_close(made.dense(20), sparse([4]).to_dense() / 4)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 19), max_size=30), st.sampled_from([torch.float32, torch.float64]))
def test_what_arrives_is_what_was_sent(numbers: list[int], dtype: torch.dtype) -> None:
    rows = Rows.of(sparse(numbers, dtype=dtype))
    (body,) = rows.packed(20).body
    found = Rows.unpacked(body, rows=20, width=WIDTH, dtype=dtype)
    assert torch.equal(found.numbers, rows.numbers)
    assert torch.equal(found.values, rows.values)
    torch.testing.assert_close(found.gradient(20).to_dense(), sparse(numbers, dtype=dtype).to_dense())


def test_a_part_of_a_table_has_numbers_of_its_own() -> None:
    rows = Rows.of(sparse([2, 7, 7, 11])).between(7, 11)
    assert rows.numbers.tolist() == [0]
    assert torch.equal(rows.values[0], sparse([2, 7, 7, 11]).to_dense()[7])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sets(st.integers(0, 19), max_size=4), max_size=12), st.integers(0, 12))
def test_the_rows_since_a_version_are_those_that_have_changed(changed: list[set[int]], since: int) -> None:
    history = RowChanges(20)
    history.begin(0)
    for version, rows in enumerate(changed, 1):
        history.note(version, torch.tensor(sorted(rows), dtype=torch.int64))
    found = history.since(since)
    if found is None:  # ten rows are kept at most
        assert sum(map(len, changed[since:])) > 10 or sum(map(len, changed)) > 10
    else:
        assert found.tolist() == sorted(set().union(*changed[since:]))


def test_a_worker_that_is_too_far_behind_needs_the_table() -> None:
    history = RowChanges(1000)
    history.begin(5)
    for version in range(6, 6 + MOST_VERSIONS):
        history.note(version, torch.tensor([1]))
    assert history.since(4) is None
    assert history.since(5) is not None
    history.note(6 + MOST_VERSIONS, torch.tensor([1]))
    assert history.since(5) is None


class Table:
    """A shard with a bucket of a table, and an encoder for it."""

    def __init__(self, *, sparse: bool = True, dtype: str = "float64", **options: Any) -> None:
        spec = TensorSpec("table", (20, WIDTH), dtype, Rule.GRADIENT, 0, sparse=sparse)
        self.bucket = Bucket(0, 0, dtype, Rule.GRADIENT, (Piece(0, 0, 20 * WIDTH),))
        layout = Layout((spec,), (self.bucket,), 1)
        self.rig = Rig(layout, workers=range(2), **options)
        self.encoder = Encoder(layout, Plan(Compression()), worker=0, seed=0, traffic=Traffic())

    def push(self, worker: int, payload: Payload) -> bool:
        key = self.rig.key(worker)
        return self.rig.shard.push(key, 1, payload, body_of(payload))

    def encoded(self, numbers: list[int]) -> Payload:
        return self.encoder.encode(self.bucket, Rows.of(sparse(numbers)), (), step=0, version=0)


@pytest.mark.parametrize(
    "body",
    [
        b"123",
        bytes(8 * WIDTH) * 2 + b"\5\0\0\0\5\0\0\0",  # a row twice
        bytes(8 * WIDTH) + b"\x14\0\0\0",  # the rows end with number 19
        bytes(8 * WIDTH) + b"\xff\xff\xff\xff",
        bytes((8 * WIDTH + 4) * 21),
    ],
)
def test_rows_that_the_table_has_not_are_refused(body: bytes) -> None:
    table = Table()
    with pytest.raises(Refused) as refusal:
        table.push(0, Payload(memoryview(body), ROWS))
    assert refusal.value.code is RefusalCode.MALFORMED
    assert table.push(0, table.encoded([3]))


def test_rows_of_a_dense_parameter_are_refused() -> None:
    sent = Table().encoded([3])
    with pytest.raises(Refused, match="in rows of no elements"):
        Table(sparse=False).push(0, sent)


def test_rows_that_are_not_finite_are_refused() -> None:
    table = Table()
    rows = Rows(torch.tensor([3]), torch.full((1, WIDTH), torch.nan, dtype=torch.float64))
    with pytest.raises(Refused) as refusal:
        table.push(0, table.encoder.encode(table.bucket, rows, (), step=0, version=0))
    assert refusal.value.code is RefusalCode.NOT_FINITE
