"""VGG (Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition", 2014).

With batch normalisation (Ioffe and Szegedy, 2015). The tensors have the names of torchvision's `vgg*_bn`, so
its weights for ImageNet load into this one.
"""

from __future__ import annotations

import torch
from torch import nn

from elastic_ps.contrib.models.resnet import LARGE
from elastic_ps.errors import InvalidModel

SMALLEST = 32
"""The images are halved five times."""

WIDTHS = (64, 128, 256, 512, 512)
CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""3 x 3 convolutions before each of the five poolings, table 1 of the paper: columns A, B, D and E."""


class VGG(nn.Module):
    """Takes (batch, channels, size, size) float images and returns (batch, classes) logits.

    For images below 64 pixels the hidden layers of the classifier have 512 units in place of 4096.

    Args:
        depth: the number of layers: 11, 13, 16 or 19.
        size: height and width of the images in pixels, 32 or more.
        channels: of the images.
        classes: to tell apart.

    Raises:
        InvalidModel: there is no network of this depth, or the images are too small.
    """

    def __init__(self, depth: int, *, size: int = 32, channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        if depth not in CONVOLUTIONS:
            known = ", ".join(map(str, CONVOLUTIONS))
            raise InvalidModel(f"there is no VGG of depth {depth}; there are depths {known}")
        if size < SMALLEST:
            raise InvalidModel(
                f"a VGG halves its images five times, so it needs {SMALLEST} x {SMALLEST} pixels or more; "
                f"got {size} x {size}. Enlarge the images, or take a LeNet or a ResNet"
            )
        layers: list[nn.Module] = []
        inputs = channels
        for width, count in zip(WIDTHS, CONVOLUTIONS[depth], strict=True):
            for _ in range(count):
                convolution = nn.Conv2d(inputs, width, 3, padding=1)
                layers += [convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
                inputs = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        if size >= LARGE:
            self.avgpool = nn.AdaptiveAvgPool2d(7)
            self.classifier = nn.Sequential(
                *(nn.Linear(inputs * 49, 4096), nn.ReLU(inplace=True), nn.Dropout()),
                *(nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout()),
                nn.Linear(4096, classes),
            )
        else:
            self.avgpool = nn.AdaptiveAvgPool2d(1)
            self.classifier = nn.Sequential(
                *(nn.Dropout(), nn.Linear(inputs, 512), nn.ReLU(inplace=True)),
                *(nn.Dropout(), nn.Linear(512, 512), nn.ReLU(inplace=True)),
                nn.Linear(512, classes),
            )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, channels, size, size) to (batch, classes)."""
        return self.classifier(self.avgpool(self.features(x)).flatten(1))  # type: ignore[no-any-return]
