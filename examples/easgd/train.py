"""Elastic averaging, written by hand on the parameter server's primitives: `session.server` and nothing else.

elastic-ps run examples/easgd/job.yaml, or alone in one process: python examples/easgd/train.py

Each worker trains a model of its own. Every `tau` steps it moves towards the centre, and the centre towards
it: S. Zhang, A. Choromanska, Y. LeCun, "Deep learning with Elastic Averaging SGD", 2015. TorchMPI's examples
have the same (`EASGDUpdate`). As a mode of the job, with records that are counted, it is `consistency: {mode:
local, outer: easgd}`.
"""

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import elastic_ps
from elastic_ps.contrib.datasets import digits
from elastic_ps.contrib.models import LeNet, accuracy


def main(epochs: int = 10, batch_size: int = 16, lr: float = 0.05, tau: int = 5, alpha: float = 0.3) -> None:
    """Train on the digits and report the accuracy of the centre on the held-out fifth of them."""
    training, test = digits()
    torch.manual_seed(1)
    model, loss_fn = LeNet(size=8), torch.nn.CrossEntropyLoss()
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

    session = elastic_ps.connect()
    server = session.server
    if not server.init("centre", parameters_to_vector(model.parameters())):  # begin where the others are
        vector_to_parameters(server.pull("centre"), model.parameters())

    def exchange() -> None:
        mine = parameters_to_vector(model.parameters()).detach()
        try:
            difference = alpha * (mine - server.pull("centre"))
            server.push("centre", difference, rule="add").wait()
            vector_to_parameters(mine - difference, model.parameters())
        except elastic_ps.TensorLost as lost:  # a parameter server was started again: go on from here
            print(lost)
            server.init("centre", mine)

    order = torch.Generator().manual_seed(session.worker)  # nobody shares out the records
    loader = torch.utils.data.DataLoader(training, batch_size, shuffle=True, generator=order)
    for _ in range(epochs):
        for step, (images, labels) in enumerate(loader):
            sgd.zero_grad()
            loss_fn(model(images), labels).backward()
            sgd.step()
            if step % tau == 0:
                exchange()

    exchange()
    if session.worker == 0:
        vector_to_parameters(server.pull("centre"), model.parameters())
        session.report(test_accuracy=accuracy(model, *test.tensors))


if __name__ == "__main__":
    main()
