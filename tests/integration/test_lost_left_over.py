"""What it costs that a worker ends and what it has left over is lost, or that it is of undone versions."""

from __future__ import annotations

import pytest
import torch

from elastic_ps.api.compression import Compression
from elastic_ps.codec.decoder import Decoder
from elastic_ps.codec.encoder import Encoder
from elastic_ps.codec.plan import Plan
from elastic_ps.contrib.datasets import digits
from elastic_ps.core.partition import Bucket, Layout, Piece, Rule, TensorSpec
from elastic_ps.worker.wire.measuring import Traffic
from tests.testing.shard import arrived as arrived_of

ELEMENTS = 65 * 10
SPEC = TensorSpec("weight", (ELEMENTS,), "float32", Rule.GRADIENT, 0)
BUCKET = Bucket(0, 0, "float32", Rule.GRADIENT, (Piece(0, 0, ELEMENTS),))
LAYOUT = Layout((SPEC,), (BUCKET,), 1)
PLAN = Plan(Compression.model_validate({"codec": "topk", "options": {"ratio": 0.01}}))
STEPS_OF_A_WORKER = 50
STEPS_UNDONE = 25


def trained(*, lost: bool = False, undone: bool = False) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Accuracy on the test images; the sum of all gradients, and of what has arrived of them.

    A linear model learns the digits with one worker at a time, and 1 % of each gradient is sent. `lost`:
    another worker comes every so many steps, and what the one before has left over is lost. `undone`: as
    often, the model goes back by half as many versions, and the worker keeps what it has left over.
    """
    training, test = digits()
    images, labels = training.tensors
    weight = torch.zeros(65, 10, requires_grad=True)
    encoder, decoder = Encoder(LAYOUT, PLAN, worker=0, seed=0, traffic=Traffic()), Decoder(PLAN, LAYOUT)
    given, arrived = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    random = torch.Generator().manual_seed(0)
    kept = (weight.detach().clone(), given, arrived)
    for step in range(1500):
        if step % STEPS_OF_A_WORKER == STEPS_UNDONE:
            kept = weight.detach().clone(), given, arrived
        if undone and step and step % STEPS_OF_A_WORKER == 0:
            with torch.no_grad():
                weight.copy_(kept[0])
            _, given, arrived = kept
        if lost and step and step % STEPS_OF_A_WORKER == 0:
            encoder = Encoder(LAYOUT, PLAN, worker=0, seed=0, traffic=Traffic())
        chosen = torch.randint(len(labels), (32,), generator=random)
        loss = torch.nn.functional.cross_entropy(scores(weight, images[chosen]), labels[chosen])
        gradient = torch.autograd.grad(loss, weight)[0].flatten()
        encoder.begin(step)
        payload = encoder.encode(BUCKET, gradient, (), step=step, version=step)
        encoder.applied()
        decoded = arrived_of(decoder, BUCKET, payload)
        given, arrived = given + gradient, arrived + decoded
        with torch.no_grad():
            weight -= 0.5 * decoded.view(65, 10)
    right = scores(weight, test.tensors[0]).argmax(1) == test.tensors[1]
    return float(right.float().mean()), given, arrived


def scores(weight: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    flat = images.flatten(1)
    return torch.cat((flat, torch.ones(len(flat), 1)), 1) @ weight


@pytest.mark.nightly
def test_what_is_lost_with_a_worker_is_made_up_for_by_later_gradients() -> None:
    """Here with a worker that lives for 50 steps only, 1500 steps long.

    A third of the sum of all gradients never arrives, since an element waits for about as long as a worker
    lives. The model is as good in the end: what is missing is in the loss, and so in the next gradients.
    """
    kept, given, arrived = trained()
    missing = float((given - arrived).norm() / given.norm())
    kept_lost, given_lost, arrived_lost = trained(lost=True)
    missing_lost = float((given_lost - arrived_lost).norm() / given_lost.norm())
    assert missing < 0.05
    assert missing_lost > 0.2
    assert kept > 0.9
    assert abs(kept - kept_lost) <= 0.02


@pytest.mark.nightly
def test_what_undone_versions_have_left_over_is_made_up_for_by_later_gradients() -> None:
    """Here half of all versions are undone, so what waits in the worker is of other steps than the model."""
    kept, _, _ = trained()
    undone, given, arrived = trained(undone=True)
    assert float((given - arrived).norm() / given.norm()) > 0.1
    assert kept > 0.9
    assert abs(kept - undone) <= 0.02
