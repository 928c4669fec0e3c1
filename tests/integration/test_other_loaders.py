"""Data sets of Hugging Face's `datasets`, and torchdata's DataLoader."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from elastic_ps.api.job import Data
from elastic_ps.core.fingerprint import differing
from elastic_ps.data.fingerprint import fingerprint
from elastic_ps.data.source import read_source
from elastic_ps.data.stream import IndexedStream, ItemIndex
from elastic_ps.errors import InvalidModel, UsageError
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.oracle import assert_each_record_once

# The lowest versions leave them out: datasets needs a newer pyarrow than the extra `data`.
datasets = pytest.importorskip("datasets")
StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

RECORDS = 40

# torchdata calls what torch is going to remove.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def rows() -> Any:
    return datasets.Dataset.from_dict({"x": [float(i) for i in range(RECORDS)]}).with_format("torch")


def streamed() -> Any:
    return rows().to_iterable_dataset(num_shards=4)


class Within(IterableDataset[Any]):
    """A stream of the script's over another one."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stream)


def train(tmp_path: Path, given: Any, **arguments: Any) -> list[list[float]]:
    """The numbers that two workers have trained in two epochs."""
    seen: list[list[float]] = [[], []]

    def script(session: Session) -> None:
        model = make_mlp((1, 4, 1))
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.0001), model)
        for batch in session.loader(given(), epochs=2, **arguments):
            x = batch["x"] if isinstance(batch, dict) else batch[0][:, 0]
            seen[session.worker] += x.tolist()
            optimizer.zero_grad()
            model(x[:, None]).square().mean().backward()
            optimizer.step()

    with running_job(tmp_path, data={"shardRecords": 8}) as job:
        job.run(script, workers=2)
        assert_each_record_once(job.commits(), records=RECORDS, epochs=2)
    return seen


@pytest.mark.parametrize("kind", ["map", "stream", "shuffled stream"])
def test_a_data_set_of_hugging_face(tmp_path: Path, kind: str) -> None:
    def given() -> Any:
        if kind == "map":
            return rows()
        stream = streamed()
        return stream.shuffle(seed=3, buffer_size=10) if kind == "shuffled stream" else stream

    records = {} if kind == "map" else {"records": RECORDS}
    first, second = train(tmp_path, given, batch_size=4, **records)
    assert sorted(first + second) == sorted([float(i) for i in range(RECORDS)] * 2)


def interleaved(first: Any, seed: int | None) -> Any:
    """As `probabilities` make it, then through other steps."""
    chosen = datasets.interleave_datasets([first, first], probabilities=[0.5, 0.5], seed=seed)
    for _ in range(9):
        chosen = chosen.map(lambda row: row)
    return chosen.batch(2).take(5)


def of_files(seed: int | None) -> Any:
    names = [f"hf://datasets/some@{random.getrandbits(64):x}/{number}.csv" for number in range(20)]
    random.Random(seed).shuffle(names)
    return datasets.IterableDataset.from_generator(
        lambda names: ({"x": name} for name in names), gen_kwargs={"names": names}
    )


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (lambda seed: streamed().shuffle(seed=seed, buffer_size=10), "IterableDataset.generator"),
        (lambda seed: interleaved(streamed(), seed), "IterableDataset.generator"),
        (lambda seed: Within(streamed().shuffle(seed=seed)), "Within.stream.generator"),
        (lambda seed: rows().shuffle(seed=seed).to_iterable_dataset(4), "IterableDataset.shards.shards"),
        (of_files, "IterableDataset.shards.names"),
    ],
    ids=["shuffle", "interleave", "within another", "before it was a stream", "names of shards"],
)
def test_a_stream_of_hugging_face_that_shuffles_without_a_seed_differs(given: Any, name: str) -> None:
    """Else each worker would have an order of its own, and train some records twice, and others never."""

    def differ(seed: int | None) -> list[str]:
        streams = [given(seed) for _ in range(2)]
        one, other = (fingerprint(stream, RECORDS) for stream in streams)
        assert len(list(itertools.islice(streams[0], 5))) == 5
        assert fingerprint(streams[0], RECORDS) == one, "reading it makes no difference"
        assert name in one
        return differing(one, other)

    assert differ(3) == []
    assert differ(None) == [name]


def test_a_worker_with_another_order_of_a_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"IterableDataset\.generator differ.*shuffle\(seed=0\)"):
        train(tmp_path, lambda: streamed().shuffle(buffer_size=10), batch_size=4, records=RECORDS)


@pytest.mark.parametrize("shuffled", [True, False])
def test_a_stream_of_hugging_face_begins_anywhere_in_each_epochs_order(shuffled: bool) -> None:
    """`datasets` shuffles the shards in each epoch but the first. With 4, the order of epoch 2 differs."""
    stream = streamed()
    stream = stream.shuffle(seed=3, buffer_size=10) if shuffled else stream
    source = read_source(stream, batch_size=2, records=RECORDS, data=Data(), late=False, options={}).readable
    assert isinstance(source, IndexedStream)
    orders = []
    for epoch in range(3):
        stream.set_epoch(epoch)
        orders.append([float(item["x"]) for item in stream])
        for number in (30, 5, 31, 6, 39):
            assert float(source[ItemIndex(epoch, number)]["x"]) == orders[epoch][number]
    assert orders[0] != orders[2]
    assert not shuffled or orders[0] != orders[1]


def test_a_stream_of_hugging_face_is_read_once_in_an_epoch() -> None:
    """`skip` reads and maps all that it leaves out."""
    read = list[int]()

    def noted(row: Any, index: int) -> Any:
        read.append(index)
        return row

    stream = rows().with_format(None).to_iterable_dataset(num_shards=4).map(noted, with_indices=True)
    source = read_source(stream, batch_size=2, records=RECORDS, data=Data(), late=False, options={}).readable
    for number in (3, 20, 39):
        assert float(source[ItemIndex(0, number)]["x"]) == number
    assert read == [*range(RECORDS)]


def test_the_epoch_of_a_stream_of_hugging_face_is_not_that_of_other_processes() -> None:
    """`set_epoch` adds the difference in memory that the processes of a DataLoader share."""
    stream = streamed()
    shared = stream._epoch  # noqa: SLF001
    source = read_source(stream, batch_size=2, records=RECORDS, data=Data(), late=False, options={}).readable
    assert source[ItemIndex(1, 0)]
    assert (int(shared), stream.epoch) == (0, 1)


def test_a_part_of_a_stream_of_hugging_face_is_refused() -> None:
    from datasets.distributed import split_dataset_by_node

    stream, begun = streamed(), streamed()
    begun.load_state_dict(begun.state_dict())
    for part in (split_dataset_by_node(stream, 0, 2), begun):
        with pytest.raises(UsageError, match=r"Pass session\.loader the whole stream"):
            read_source(part, batch_size=2, records=RECORDS, data=Data(), late=False, options={})


def test_a_stream_of_hugging_face_has_the_same_order_in_a_process_of_a_dataloader() -> None:
    def order(processes: int) -> list[float]:
        stream = streamed().shuffle(seed=3, buffer_size=10)
        given = read_source(stream, batch_size=4, records=RECORDS, data=Data(), late=False, options={})
        batches = [[ItemIndex(0, n) for n in range(start, start + 4)] for start in range(0, RECORDS, 4)]
        loader = DataLoader[Any](given.readable, batch_sampler=batches, num_workers=processes)
        return [float(x) for batch in loader for x in batch["x"]]

    assert order(1) == order(0)


def test_data_sets_of_hugging_face_with_other_rows_differ() -> None:
    """`shard` and `from_list` leave no indices, only a table with other rows."""
    one, same, other = (fingerprint(rows().shard(2, index), RECORDS // 2) for index in (0, 0, 1))
    assert differing(one, same) == []
    assert differing(one, other) == ["Dataset._data.table"]


def test_data_sets_of_hugging_face_may_be_cut_into_other_files(tmp_path: Path) -> None:
    """As `map` with another `num_proc` does it."""

    def of_files(count: int) -> Any:
        parts = []
        for index in range(count):
            place = tmp_path / f"{index}-of-{count}"
            given = datasets.Dataset.from_dict({"x": [[float(i)] * 40 for i in range(RECORDS)]})
            given.shard(count, index).save_to_disk(place)
            parts.append(datasets.load_from_disk(place))
        return datasets.concatenate_datasets(parts)

    two, four = (fingerprint(of_files(count), RECORDS) for count in (2, 4))
    assert "Dataset._data.table" in two
    assert differing(two, four) == []


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_stateful_dataloader_of_torchdata(tmp_path: Path, shuffle: bool) -> None:
    first, second = train(
        tmp_path, lambda: StatefulDataLoader(Numbers(RECORDS), batch_size=4, shuffle=shuffle)
    )
    assert sorted(first + second) == sorted(Numbers(RECORDS).x[:, 0].tolist() * 2)
    given = StatefulDataLoader(Numbers(RECORDS), batch_size=4, shuffle=shuffle)
    source = read_source(given, batch_size=None, records=None, data=Data(), late=False, options={})
    assert source.shuffle is shuffle


def test_a_stateful_dataloader_that_chooses_records_is_refused() -> None:
    other = type("Halves", (SequentialSampler,), {})
    for wrong in (other(range(5)), [1, 2, 3]):
        given = StatefulDataLoader(Numbers(RECORDS), batch_size=4, sampler=wrong)
        with pytest.raises(UsageError, match="which chooses records itself"):
            read_source(given, batch_size=None, records=None, data=Data(), late=False, options={})
