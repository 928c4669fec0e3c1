"""Train DeepFM with a table that grows on clicks whose best possible AUC is known.

elastic-ps run examples/clicks/job.yaml, or alone in one process: python examples/clicks/train.py
"""

import torch

import elastic_ps
from elastic_ps.contrib.datasets import auc, clicks
from elastic_ps.contrib.models import DeepFM, ids_for
from elastic_ps.embedding import Adagrad


def main(records: int = 60_000, epochs: int = 2, batch_size: int = 256, lr: float = 0.01) -> None:
    """Report the expected AUC on the test set, that of the teacher, and the share of it beyond a guess."""
    training, test = clicks(records, categories=100)
    torch.manual_seed(1)
    model = DeepFM(fields=8, width=4, hidden=(32,), tables={"optimizer": Adagrad(lr=0.1)})

    session = elastic_ps.connect()
    optimizer = session.optimizer(torch.optim.Adam(model.parameters(), lr=lr), model)
    loader = session.loader(
        training, batch_size=batch_size, epochs=epochs, prefetch=lambda batch: ids_for(model, batch[0])
    )
    for categories, clicked, _ in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(categories), clicked)
        loss.backward()
        session.report(loss=loss)
        optimizer.step()

    if session.is_chief:
        categories, _, probability = test.tensors
        with torch.no_grad():
            found = auc(model(categories)[:, 1], probability)
        best = auc(probability, probability)
        session.report(test_auc=found, best_auc=best, share=(found - 0.5) / (best - 0.5))


if __name__ == "__main__":
    main()
