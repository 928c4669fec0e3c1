"""Images in memory, as a map-style data set."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional
from torch.utils.data import Dataset

PADDING = 4
"""The largest shift of an image, in pixels."""


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Records are (image, label): float32 of shape (channels, height, width), normalised, and an int.

    The images stay in memory as bytes.

    Args:
        images: uint8 of shape (records, channels, height, width).
        labels: int64 of shape (records,).
        mean, deviation: of each channel, for values from 0 to 255.
        augment: move each image by up to 4 pixels at random, with its edges mirrored, and mirror half of
            them. The random numbers are torch's.
    """

    def __init__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        *,
        mean: Sequence[float],
        deviation: Sequence[float],
        augment: bool = False,
    ) -> None:
        self.images, self.labels, self.augment = images, labels, augment
        self._mean = torch.tensor(mean).view(-1, 1, 1)
        self._deviation = torch.tensor(deviation).view(-1, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = (self.images[index].float() - self._mean) / self._deviation
        return (_moved(image) if self.augment else image), int(self.labels[index])


def _moved(image: torch.Tensor) -> torch.Tensor:
    """The image, randomly shifted and mirrored; same shape."""
    _, height, width = image.shape
    down, right, mirrored = (int(torch.randint(high, ())) for high in (2 * PADDING + 1, 2 * PADDING + 1, 2))
    padded = functional.pad(image.unsqueeze(0), (PADDING,) * 4, mode="reflect").squeeze(0)
    seen = padded[:, down : down + height, right : right + width]
    return seen.flip(2) if mirrored else seen
