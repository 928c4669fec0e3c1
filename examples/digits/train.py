"""Train LeNet on handwritten digits: an ordinary PyTorch loop, with the lines of elastic-ps marked.

elastic-ps run examples/digits/job.yaml, or alone in one process: python examples/digits/train.py
"""

import torch

import elastic_ps
from elastic_ps.contrib.datasets import digits
from elastic_ps.contrib.models import LeNet, accuracy


def main(epochs: int = 30, batch_size: int = 16, lr: float = 0.05) -> None:
    """Train on the digits and report the accuracy on the held-out fifth of them."""
    training, test = digits()
    torch.manual_seed(1)
    model = LeNet(size=8)
    loss_fn = torch.nn.CrossEntropyLoss()

    session = elastic_ps.connect()  # 1: who am I, where is the parameter server
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-3)
    optimizer = session.optimizer(sgd, model)  # 2: its step happens on the parameter server
    loader = session.loader(training, batch_size=batch_size, epochs=epochs)  # 3: elastic
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    session.scheduler(cosine, interval="epoch")  # stepped by the job's progress, the same on all workers
    for images, labels in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(images), labels)
        loss.backward()
        session.report(loss=loss)  # optional: the loss in the progress and the report
        optimizer.step()

    if session.is_chief:  # one worker, when every record of every epoch is in the model
        session.report(test_accuracy=accuracy(model, *test.tensors))


if __name__ == "__main__":
    main()
