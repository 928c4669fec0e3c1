"""The layers beside torch's own on the same rows, and ids that are none."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.swa_utils import AveragedModel

from elastic_ps.embedding import SGD, Adagrad, hashed, uniform
from elastic_ps.embedding.init import Ids
from elastic_ps.embedding.module import Embedding, EmbeddingBag, Gradient, LocalSource, Mode, Pending
from elastic_ps.embedding.stored import columns_to_part, spec_to_text
from elastic_ps.embedding.table import Table
from elastic_ps.embedding.tables import LocalTables, described_tables
from elastic_ps.errors import InvalidModel, ModelMismatch, UsageError

DIM = 3
EDGES = [-(2**63), -1, 0, 2**63 - 1]


def make(kind: type[Embedding] = Embedding, **options: Any) -> Any:
    """A layer whose gradients are kept for a step."""
    layer = kind("a", DIM, optimizer=SGD(lr=0.1), init=uniform(-1, 1), dtype=torch.float64, **options)
    layer.source.pending.counts = lambda: True
    return layer


class Elsewhere(NamedTuple):
    """Rows that are on parameter servers."""

    pending: Pending

    def lookup(self, ids: Ids) -> torch.Tensor:
        raise NotImplementedError


def dense(layer: Embedding, ids: torch.Tensor) -> torch.nn.Parameter:
    """The rows of ids 0 to 9, as the weight of torch's own layer."""
    return torch.nn.Parameter(layer.table.lookup(ids.numpy()))


def gradient(layer: Embedding) -> dict[int, list[float]]:
    assert isinstance(layer.source, LocalSource)
    ids, values, _ = layer.source.pending.take()
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


@given(st.lists(st.integers(0, 9), max_size=12), st.sampled_from([None, 0, 3]))
def test_an_embedding_is_that_of_torch_on_the_same_rows(ids: list[int], padding_idx: int | None) -> None:
    layer, given_ = make(padding_idx=padding_idx), torch.tensor(ids, dtype=torch.int64).reshape(-1, 1)
    weight = dense(layer, torch.arange(10))
    if padding_idx is not None:
        weight.data[padding_idx] = 0
    expected = torch.nn.functional.embedding(given_, weight, padding_idx=padding_idx)
    found = layer(given_)
    assert torch.equal(found, expected)
    if not ids:
        return
    (found**2).sum().backward()
    (expected**2).sum().backward()
    assert weight.grad is not None
    trained = sorted({*ids} - {padding_idx})
    ours = gradient(layer)
    assert sorted(ours) == trained
    torch.testing.assert_close(
        torch.tensor(list(ours.values()), dtype=torch.float64).reshape(-1, DIM), weight.grad[trained]
    )


@given(
    bags=st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=5),
    mode=st.sampled_from(["sum", "mean", "max"]),
    weighted=st.booleans(),
    padding_idx=st.sampled_from([None, 0, 3]),
    include_last_offset=st.booleans(),
)
def test_a_bag_is_that_of_torch_on_the_same_rows(
    bags: list[list[int]], mode: Mode, weighted: bool, padding_idx: int | None, include_last_offset: bool
) -> None:
    options: dict[str, Any] = {"mode": mode, "include_last_offset": include_last_offset}
    layer = make(EmbeddingBag, padding_idx=padding_idx, **options)
    ids = torch.tensor([each for bag in bags for each in bag], dtype=torch.int64)
    ends = np.cumsum([0, *map(len, bags)])
    offsets = torch.from_numpy(ends if include_last_offset else ends[:-1])
    weights = torch.linspace(-1, 1, len(ids), dtype=torch.float64) if weighted and mode == "sum" else None
    weight = dense(layer, torch.arange(10))
    options |= {"per_sample_weights": weights, "padding_idx": padding_idx}
    expected = torch.nn.functional.embedding_bag(ids, weight, offsets, **options)
    found = layer(ids, offsets, weights)
    torch.testing.assert_close(found, expected)
    if not len(ids):
        return
    (found**2).sum().backward()
    (expected**2).sum().backward()
    assert weight.grad is not None
    ours = gradient(layer)
    trained = sorted({*ids.tolist()} - {padding_idx})
    assert sorted(ours) == trained
    torch.testing.assert_close(
        torch.tensor(list(ours.values()), dtype=torch.float64).reshape(-1, DIM), weight.grad[trained]
    )


def test_the_compiler_leaves_rows_to_python() -> None:
    layer, ids = make(), torch.tensor([[3, 1], [3, 2**63 - 1]])
    compiled: Any = torch.compile(layer, backend="eager")
    found = compiled(ids)
    assert torch.equal(found, layer(ids))
    found.sum().backward()
    assert gradient(layer) == {1: [1.0] * DIM, 3: [2.0] * DIM, 2**63 - 1: [1.0] * DIM}


@given(
    ids=st.lists(st.one_of(st.sampled_from(EDGES), st.integers(-(2**63), 2**63 - 1)), max_size=8),
    repeated=st.integers(1, 3),
    offsets=st.one_of(
        st.lists(st.integers(-2, 20), max_size=6),
        st.lists(st.integers(0, 24), max_size=6).map(lambda given: sorted([0, *given])),
    ),
    mode=st.sampled_from(["sum", "mean", "max"]),
)
def test_any_ids_and_offsets_give_the_right_bags_or_a_sentence(
    ids: list[int], repeated: int, offsets: list[int], mode: Mode
) -> None:
    layer, given_ = make(EmbeddingBag, mode=mode), torch.tensor(ids * repeated, dtype=torch.int64)
    starts = torch.tensor(offsets, dtype=torch.int64)
    begin = offsets[:1] == [0] or (not offsets and not ids)
    if not (begin and offsets == sorted(offsets) and max(offsets, default=0) <= len(given_)):
        with pytest.raises(UsageError, match="offsets must begin with 0 and ascend"):
            layer(given_, starts)
        return
    found, rows = layer(given_, starts), layer.table.lookup(given_.numpy())
    assert found.shape == (len(offsets), DIM)
    for bag, start, end in zip(found.detach(), offsets, [*offsets, len(given_)][1:], strict=True):
        own = rows[start:end]
        expected = torch.zeros(DIM) if start == end else own.amax(0) if mode == "max" else own.sum(0)
        if mode == "mean":
            expected = expected / max(1, end - start)
        torch.testing.assert_close(bag, expected.double())
    if ids:
        found.sum().backward()
        ours = gradient(layer)
        assert sorted(ours) == sorted({*ids})
        if mode == "sum":
            assert [ours[each][0] for each in ids] == [repeated * ids.count(each) for each in ids]


def test_bags_of_one_length_need_no_offsets() -> None:
    layer = make(EmbeddingBag, mode="sum")
    ids = torch.tensor([[1, 2], [3, 3]])
    rows = layer.table.lookup(ids.reshape(-1).numpy()).view(2, 2, DIM)
    torch.testing.assert_close(layer(ids).detach(), rows.sum(1))
    weights = torch.tensor([[1.0, 2.0], [0.0, -1.0]], dtype=torch.float64)
    found = layer(ids, None, weights).detach()
    torch.testing.assert_close(found, (rows * weights[..., None]).sum(1))
    for shape in ((2, 0), (0, 3)):
        assert layer(torch.empty(shape, dtype=torch.int64)).tolist() == [[0.0] * DIM] * shape[0]


def test_all_ids_of_int64_have_rows_of_their_own() -> None:
    layer = make()
    found = layer(torch.tensor(EDGES))
    assert len({tuple(row) for row in found.tolist()}) == len(EDGES)
    found.sum().backward()
    assert sorted(gradient(layer)) == sorted(EDGES)


@pytest.mark.parametrize(
    ("given_", "ids"),
    [
        (["b", "a"], hashed(["b", "a"]).tolist()),
        (np.array([["b"], ["a"]]), hashed(["b", "a"]).tolist()),
        (np.array(["b", "a"], dtype=object), hashed(["b", "a"]).tolist()),
        ((3, -1), [3, -1]),
        (np.array([3, 4], dtype=np.uint32), [3, 4]),
        (torch.tensor([3, 4], dtype=torch.int32), [3, 4]),
    ],
)
def test_ids_are_whole_numbers_or_strings(given_: Any, ids: list[int]) -> None:
    layer = make()
    expected = layer.table.lookup(np.array(ids, dtype=np.int64))
    found = layer(given_)
    assert found.shape[:-1] == np.asarray(given_).shape
    assert torch.equal(found.detach().reshape(-1, DIM), expected)


@pytest.mark.parametrize(
    "given_",
    [
        torch.tensor([1.0]),
        torch.tensor([True]),
        [1.5],
        [[1], [1, 2]],
        [None],
        np.array([2**63], dtype=np.uint64),
        ["a", 3.5, None],
        [1, "a"],
        [b"a"],
    ],
)
def test_what_are_no_ids_is_refused(given_: Any) -> None:
    with pytest.raises(
        UsageError, match=r"(?s)the ids of the table 'a' are .*Expected whole numbers from -2\*\*63"
    ):
        make()(given_)


@pytest.mark.parametrize(
    ("options", "arguments", "said"),
    [
        ({}, (torch.tensor([1, 2]),), r"shape \(2,\), without offsets"),
        ({}, (torch.tensor([[1]]), torch.tensor([0])), r"shape \(1, 1\), with offsets"),
        ({}, (torch.tensor([1, 2]), torch.tensor([1, 2])), r"begin with 0 .* \[1, 2\]"),
        ({}, (torch.tensor([1, 2]), torch.tensor([0, 2, 1])), r"ascend, none above 2"),
        ({}, (torch.tensor([1, 2]), torch.tensor([0, 3])), r"none above 2"),
        ({}, (torch.tensor([1, 2]), torch.tensor([0.5])), "offsets must be a tensor of whole numbers"),
        ({}, (torch.tensor([1, 2]), torch.empty(0, dtype=torch.int64)), "begin with 0"),
        ({"include_last_offset": True}, (torch.tensor([1, 2]), torch.tensor([0, 1])), "end with 2"),
        ({}, (torch.tensor([1]), torch.tensor([0]), torch.tensor([1.0])), "needs mode='sum'"),
        (
            {"mode": "sum"},
            (torch.tensor([1]), torch.tensor([0]), torch.tensor([1.0, 1.0])),
            r"the shape of the ids, \(1,\)",
        ),
        ({"mode": "sum"}, (torch.tensor([1]), torch.tensor([0]), [1.0]), "given: mode='sum', list"),
        ({"include_last_offset": True}, (torch.tensor([]).long(), torch.tensor([]).long()), "end with 0"),
        ({}, (torch.tensor([[1]]).to_sparse(),), r"torch\.sparse_coo\. Expected whole numbers"),
        ({}, ([["\ud800"]],), "UTF-8 cannot encode it"),
    ],
)
def test_bags_that_cannot_be_are_refused(
    options: dict[str, Any], arguments: tuple[Any, ...], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        make(EmbeddingBag, **options)(*arguments)


def test_a_string_is_padding_and_what_is_no_id_is_not() -> None:
    layer = make(padding_idx="<pad>")
    layer(["a", "<pad>"]).sum().backward()
    assert not layer(["<pad>"]).any()
    assert layer.source.pending.take().ids.tolist() == hashed(["a"]).tolist()
    with pytest.raises(UsageError, match="expected one id"):
        make(padding_idx=(1, 2))
    for padding in (1.5, 2**63):
        with pytest.raises(
            UsageError, match=r"(?s)the ids of the table 'a' are .*Expected whole numbers from -2\*\*63"
        ):
            make(padding_idx=padding)


def test_a_copy_made_while_the_model_is_trained_looks_up_its_rows(caplog: pytest.LogCaptureFixture) -> None:
    """As a copy in a job does. One that is made before has rows of its own."""
    layer = make()
    layer.source.pending.counts = None
    before = copy.deepcopy(layer)
    tables = LocalTables(layer)
    tables.begin([{"lr": 0.1}], lambda: True)
    assert not caplog.messages
    average = AveragedModel(layer)
    assert "looks up the rows of the table 'a' that are trained" in caplog.text
    layer([1]).sum().backward()
    tables.prepare([{"lr": 0.1}])
    tables.ended(True, 1)
    assert torch.equal(average.module([1]), layer([1]))
    assert not torch.equal(before([1]), layer([1]))
    average.module([1]).sum().backward()
    assert not layer.source.pending.take().ids.size


@pytest.mark.parametrize("column", ["ids", "values", "weight"])
def test_a_table_with_the_name_of_a_layer_is_refused(column: str) -> None:
    model = torch.nn.ModuleDict({"rows": make(), "a": torch.nn.Module()})
    model["a"].register_parameter(column, torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(InvalidModel, match=rf"the table 'a' and a layer .* two tensors a\.{column}\. "):
        described_tables(model)


def test_another_mode_or_dim_is_refused() -> None:
    with pytest.raises(UsageError, match="mode='median'; expected one of sum, mean, max"):
        make(EmbeddingBag, mode="median")
    for dim in (0, "16"):
        with pytest.raises(UsageError, match=r"dim=.*; expected a whole number above 0"):
            Embedding("user", cast("Any", dim), optimizer=SGD(lr=0.1))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_leaves_no_gradient(context: Callable[[], Any]) -> None:
    layer = make()
    with context():
        assert not layer(torch.tensor([1])).requires_grad


def test_gradients_of_several_backwards_add_up() -> None:
    layer = make()
    for ids in ([1, 2, 2], [2, 5]):
        layer(torch.tensor(ids)).sum().backward()
    taken = layer.source.pending.take()
    assert taken.ids.tolist() == [1, 2, 5]
    assert taken.values[:, 0].tolist() == [1.0, 3.0, 1.0]
    assert taken.counts.tolist() == [1, 3, 1]
    assert not len(layer.source.pending.take().ids)


def test_ids_count_once_for_several_backwards_of_a_forward() -> None:
    layer = make()
    total = layer(torch.tensor([1, 2, 2])).sum()
    total.backward(retain_graph=True)
    total.backward()
    taken = layer.source.pending.take()
    assert taken.values[:, 0].tolist() == [2.0, 4.0]
    assert taken.counts.tolist() == [1, 2]


def test_gradients_that_no_step_trains_are_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    layer = make()
    copied = copy.deepcopy(layer)
    caplog.clear()
    for each in (copied, layer, copied):
        each(torch.tensor([1, 2])).sum().backward()
    assert not len(copied.source.pending.take().ids)
    assert layer.source.pending.take().ids.tolist() == [1, 2]
    (warning,) = caplog.messages
    assert "no step trains them" in warning


def test_many_gradients_of_a_step_take_the_memory_of_a_few() -> None:
    layer, weight = make(), torch.zeros(5, DIM, dtype=torch.float64)
    for number in range(100):
        ids = torch.tensor([number % 5, 0])
        (layer(ids) * number).sum().backward()
        weight.index_add_(0, ids, torch.full((2, DIM), float(number), dtype=torch.float64))
    assert sum(type(each) is Gradient for each in gc.get_objects()) <= 16
    ids, values, counts = layer.source.pending.take()
    assert torch.equal(values, weight)
    assert (ids.tolist(), counts.tolist()) == ([0, 1, 2, 3, 4], [120, 20, 20, 20, 20])


def test_a_layer_that_requires_no_gradient_is_not_trained() -> None:
    layer = make().requires_grad_(False)
    assert not layer(torch.tensor([1])).requires_grad
    assert layer.requires_grad_()(torch.tensor([1])).requires_grad


def test_a_state_dict_of_a_job_has_no_rows_to_load() -> None:
    layer = make()
    state = {**layer.state_dict(), "_extra_state": {}}
    with pytest.raises(ModelMismatch, match="saved in a job, so it has no rows of the table 'a'"):
        layer.load_state_dict(state)


def test_a_state_dict_without_rows_that_is_loaded_in_a_job_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As by a script that goes back to the best weights it has seen."""
    layer = make()
    state = {**layer.state_dict(), "_extra_state": {}}
    layer.source = Elsewhere(Pending(layer.spec))
    for _ in range(2):
        layer.load_state_dict(state)
    (said,) = caplog.messages
    assert "no rows of the table 'a', which stay as they are" in said


def test_a_frozen_layer_whose_rows_expire_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    make().requires_grad_(False)
    assert not caplog.messages
    make(expire_after="7d").requires_grad_(False)
    assert "its rows expire 7d after they were last trained" in caplog.text


def trained() -> Table:
    """A table with two rows."""
    table = Table(make().spec)
    table.update(np.array([1, 2]), torch.ones(2, DIM, dtype=torch.float64), np.array([1, 1]), 1)
    return table


def test_a_checkpoint_of_other_tables_changes_none() -> None:
    rows = trained()
    parts = [columns_to_part(rows.spec, rows.state())]
    same, other = spec_to_text(rows.spec), spec_to_text(dataclasses.replace(rows.spec, name="b"))
    wider = dataclasses.replace(rows.spec, name="b", dim=DIM + 1)
    for layers, described, message in (
        ([make(), Embedding("b", DIM, optimizer=SGD(lr=0.1))], [same], "has no table 'b'; it has 'a'"),
        ([make(), make()], [same, other], "table 'b' of the checkpoint is not in the model"),
        ([make(), Embedding("b", DIM, optimizer=SGD(lr=0.1))], [same, spec_to_text(wider)], "dim="),
    ):
        with pytest.raises(ModelMismatch, match=message):
            Embedding.load_rows(layers, parts, described)
        assert not any(len(layer.table) for layer in layers)


def test_layers_of_one_table_load_it_together() -> None:
    rows = trained()
    layers = [make(), make()]
    Embedding.load_rows(layers, [columns_to_part(rows.spec, rows.state())], [spec_to_text(rows.spec)])
    assert layers[0].table is layers[1].table
    assert torch.equal(layers[1](torch.arange(4)), rows.lookup(np.arange(4)))
    LocalTables(torch.nn.ModuleList(layers))  # and they may be trained


def test_rows_are_in_the_state_dict_of_the_model() -> None:
    layer = Embedding("a", DIM, optimizer=Adagrad(lr=0.1))
    model = torch.nn.ModuleDict({"a": layer})
    ids = np.array([3, -4], dtype=np.int64)
    layer.table.update(ids, torch.ones(2, DIM), np.array([1, 1]), 1)
    written = io.BytesIO()
    torch.save(model.state_dict(), written)
    written.seek(0)
    other = Embedding("a", DIM, optimizer=Adagrad(lr=0.1))
    torch.nn.ModuleDict({"a": other}).load_state_dict(torch.load(written, weights_only=True))
    assert torch.equal(other(ids), layer(ids))
    assert other.table.state()["ids"].tolist() == [-4, 3]
