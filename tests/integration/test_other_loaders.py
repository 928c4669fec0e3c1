"""Data sets of Hugging Face's `datasets`, and torchdata's DataLoader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler

from elastic_ps.api.job import Data
from elastic_ps.data.source import read_source
from elastic_ps.data.stream import IndexedStream, ItemIndex
from elastic_ps.errors import UsageError
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
        stream = rows().to_iterable_dataset(num_shards=4)
        return stream.shuffle(seed=3, buffer_size=10) if kind == "shuffled stream" else stream

    records = {} if kind == "map" else {"records": RECORDS}
    first, second = train(tmp_path, given, batch_size=4, **records)
    assert sorted(first + second) == sorted([float(i) for i in range(RECORDS)] * 2)


@pytest.mark.parametrize("shuffled", [True, False])
def test_a_stream_of_hugging_face_begins_anywhere_in_each_epochs_order(shuffled: bool) -> None:
    """`datasets` shuffles the shards in each epoch but the first. With 4, the order of epoch 2 differs."""
    stream = rows().to_iterable_dataset(num_shards=4)
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
