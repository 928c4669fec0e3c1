"""A Wasserstein GAN, whose two networks learn in turn, each with its own optimizer, to draw a circle.

elastic-ps run examples/gan/job.yaml, or alone in one process: python examples/gan/train.py
"""

import torch
from torch import nn

import elastic_ps

NOISE = 4


def networks() -> nn.ModuleDict:
    """Both networks, in one model."""
    generator = nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    critic = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    return nn.ModuleDict({"generator": generator, "critic": critic})


def circle(points: int) -> torch.Tensor:
    """Random points on the unit circle, of shape (points, 2)."""
    angles = 2 * torch.pi * torch.rand(points)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The energy distance of two sets of points (G. Szekely and M. Rizzo, 2013); 0 if they are alike."""
    return 2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()


def main(epochs: int = 40, batch_size: int = 32, lr: float = 0.003, clamp: float = 0.1) -> None:
    """Train, and report how far from real points the generated ones are."""
    torch.manual_seed(1)
    both, real = networks(), torch.utils.data.TensorDataset(circle(1024))
    generator, critic = both["generator"], both["critic"]

    session = elastic_ps.connect()
    limited = [{"params": critic.parameters(), "clamp": (-clamp, clamp)}]
    optimizers = session.optimizer(
        {
            "generator": torch.optim.RMSprop(generator.parameters(), lr=lr),
            "critic": torch.optim.RMSprop(limited, lr=lr),
        },
        both,
    )
    session.seed(1)  # each worker draws noise of its own
    for (points,) in session.loader(real, batch_size=batch_size, epochs=epochs):
        fake = generator(torch.randn(len(points), NOISE))
        if session.version % 3 == 2:  # the same for all workers (in mode sync)
            name, loss = "generator", -critic(fake).mean()
        else:
            name, loss = "critic", critic(fake.detach()).mean() - critic(points).mean()
        optimizers[name].zero_grad()
        loss.backward()
        session.report(**{f"{name}_loss": loss})
        optimizers[name].step()

    if session.is_chief:
        with torch.no_grad():
            session.report(distance=distance(generator(torch.randn(1024, NOISE)), circle(1024)))


if __name__ == "__main__":
    main()
