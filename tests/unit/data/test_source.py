"""What the arguments of `session.loader` mean, without a job."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from elastic_ps.api.job import Data
from elastic_ps.data.source import Source, read_source
from elastic_ps.errors import InvalidModel, UsageError

RECORDS = TensorDataset(torch.arange(10.0))


def read(given: Any, batch_size: int | None = None, records: int | None = None, **options: Any) -> Source:
    return read_source(
        given, batch_size=batch_size, records=records, data=Data(), late=False, options=options
    )


def test_a_dataloader_of_a_torch_without_in_order_keeps_the_order() -> None:
    loader = DataLoader(RECORDS, batch_size=4, shuffle=True, drop_last=True)
    vars(loader).pop("in_order", None)
    source = read(loader)
    assert (source.batch_size, source.shuffle, source.drop_last) == (4, True, True)
    assert source.records == 10


def test_an_empty_data_set_says_what_was_expected() -> None:
    with pytest.raises(InvalidModel, match="TensorDataset is empty; expected at least one record"):
        read(TensorDataset(torch.empty(0)), batch_size=4)


def test_a_dataloader_has_its_options_already() -> None:
    with pytest.raises(UsageError, match="takes its options from the DataLoader"):
        read(DataLoader(RECORDS, batch_size=4), batch_size=2)
