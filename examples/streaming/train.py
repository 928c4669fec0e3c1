"""Train on a stream that has no end: learn to predict the next byte of the sources of Python's own library.

elastic-ps run examples/streaming/job.yaml, or alone in one process: python examples/streaming/train.py
"""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import torch

import elastic_ps
from elastic_ps.contrib.models import GPT

CONTEXT = 64


class Sources(torch.utils.data.IterableDataset[torch.Tensor]):
    """Pieces of 65 bytes, uint8; the same ones in the same order for each worker."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for file in itertools.cycle(sorted(Path(os.__file__).parent.glob("*.py"))):
            text = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
            yield from text.unfold(0, CONTEXT + 1, CONTEXT + 1)


def main(records: int = 4000, batch_size: int = 16, lr: float = 0.003) -> None:
    """Train the first records of the stream; `loss` is in nats per byte."""
    torch.manual_seed(1)
    model = GPT(context=CONTEXT, width=64, layers=2)

    session = elastic_ps.connect()
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=lr), model)
    # The job has to know how many records it trains. A worker passes over those of the other workers.
    for pieces in session.loader(Sources(), batch_size=batch_size, records=records):
        inputs, targets = pieces[:, :-1].long(), pieces[:, 1:].long()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        session.report(loss=loss)
        optimizer.step()


if __name__ == "__main__":
    main()
