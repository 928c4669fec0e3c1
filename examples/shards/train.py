"""Train on tar files in webdataset's form; each worker reads whole blocks of records.

elastic-ps run examples/shards/job.yaml, or alone in one process: python examples/shards/train.py
"""

import contextlib
import io
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch

import elastic_ps
from elastic_ps.contrib.datasets import digits
from elastic_ps.contrib.models import LeNet, accuracy
from elastic_ps.data.tar import TarDataset

PER_SHARD = 200


def write_shards(folder: Path) -> None:
    """Write the handwritten digits to tar files, unless another worker has."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    training = digits()[0]
    for first in range(0, len(training), PER_SHARD):
        with tarfile.open(unfinished / f"{first // PER_SHARD:03}.tar", "w") as tar:
            for number in range(first, min(len(training), first + PER_SHARD)):
                image, label = training[number]
                for field, values in (
                    ("image", (image * 16).flatten().int().tolist()),
                    ("cls", [int(label)]),
                ):
                    info = tarfile.TarInfo(f"{number:06}.{field}")
                    info.size = len(values)
                    tar.addfile(info, io.BytesIO(bytes(values)))
    with contextlib.suppress(OSError):  # another worker was faster
        unfinished.rename(folder)


def decode(record: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """An image, float32 of shape (1, 8, 8), and its label."""
    image = torch.frombuffer(bytearray(record["image"]), dtype=torch.uint8)
    return image.view(1, 8, 8) / 16, record["cls"][0]


def main(folder: str = "runs/digits-tar", epochs: int = 8, batch_size: int = 16, lr: float = 0.05) -> None:
    """Train on the shards in a folder and report the accuracy on other digits."""
    shards = Path(folder)
    write_shards(shards)
    training = TarDataset(shards / "*.tar", transform=decode, index=shards / "index")
    test = digits()[1]
    torch.manual_seed(1)
    model = LeNet(size=8)
    loss_fn = torch.nn.CrossEntropyLoss()

    session = elastic_ps.connect()
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    optimizer = session.optimizer(sgd, model)
    for images, labels in session.loader(training, batch_size=batch_size, epochs=epochs):
        optimizer.zero_grad()
        loss = loss_fn(model(images), labels)
        loss.backward()
        session.report(loss=loss)
        optimizer.step()
    if session.is_chief:
        session.report(test_accuracy=accuracy(model, *test.tensors))


if __name__ == "__main__":
    main()
