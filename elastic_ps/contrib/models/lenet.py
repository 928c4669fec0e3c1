"""LeNet-5 (LeCun et al., "Gradient-based learning applied to document recognition", 1998)."""

from __future__ import annotations

import torch
from torch import nn

from elastic_ps.errors import InvalidModel


class LeNet(nn.Sequential):
    """Two convolutions with pooling, three linear layers; ReLU and maxima in place of the original's.

    The kernels have 5 x 5 pixels, as the paper's. For images below 16 pixels, which are too small for these,
    they have 3 x 3.

    Takes (batch, channels, size, size) float images and returns (batch, classes) logits.

    Args:
        size: height and width of the images in pixels; a multiple of 4, so that they can be halved twice.
        channels: of the images.
        classes: to tell apart.

    Raises:
        InvalidModel: `size` is not a multiple of 4.
    """

    def __init__(self, *, size: int = 28, channels: int = 1, classes: int = 10) -> None:
        if size % 4:
            raise InvalidModel(
                f"a LeNet halves its images twice: expected a multiple of 4 pixels, got {size} x {size}"
            )
        kernel, padding = (3, 1) if size < 16 else (5, 0)
        inner = size // 4 if size < 16 else size // 4 - 2
        super().__init__(
            nn.Conv2d(channels, 6, kernel, padding=kernel // 2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, kernel, padding=padding),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * inner**2, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, classes),
        )


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The share, 0 to 1, of `images` (batch, ...) whose class by `model` is that in `labels` (batch,)."""
    model.eval()
    with torch.no_grad():
        correct = int((model(images).argmax(1) == labels).sum())
    model.train()
    return correct / len(labels)
