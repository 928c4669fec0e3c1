"""Residual networks (He et al., "Deep residual learning for image recognition", 2015).

The tensors have the names of torchvision's ResNet, so its weights for ImageNet load into this one.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional

from elastic_ps.errors import InvalidModel

LARGE = 64
"""From this size of images on, in pixels, a network is built as for ImageNet."""

BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Blocks in each of the four stages, table 1 of the paper; from 50 on they are bottlenecks."""
SMALL = (32, 110)
"""Depths of the form 6n + 2 with three stages of n blocks, section 4.2 of the paper; for small images."""


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, shortcut: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, inputs, h, w) to (batch, width, h / stride, w / stride)."""
        y = functional.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return functional.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut; the 3 x 3 one has the stride."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, shortcut: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.downsample = shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, inputs, h, w) to (batch, 4 * width, h / stride, w / stride)."""
        y = functional.relu(self.bn1(self.conv1(x)))
        y = functional.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return functional.relu(y + (x if self.downsample is None else self.downsample(x)))


class _Padded(nn.Module):
    """A shortcut without parameters: every second pixel, and zeros for the new channels (option A)."""

    def __init__(self, new: int, stride: int) -> None:
        super().__init__()
        self._before, self._stride = new // 2, stride
        self._after = new - self._before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = x[:, :, :: self._stride, :: self._stride]
        return functional.pad(seen, (0, 0, 0, 0, self._before, self._after))


def _projected(inputs: int, outputs: int, stride: int) -> nn.Module:
    """A shortcut with a 1 x 1 convolution (option B)."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """Takes (batch, channels, size, size) float images and returns (batch, classes) logits.

    For images below 64 pixels the first layer is a 3 x 3 convolution without pooling, as is usual for
    CIFAR. Depths 32 and 110 are the paper's networks for CIFAR, with a quarter of the channels. A stage does
    not halve what is 2 pixels wide or less.

    Args:
        depth: the number of layers: 18, 34, 50, 101 or 152; or 32 or 110, for images below 64 pixels.
        size: height and width of the images in pixels.
        channels: of the images.
        classes: to tell apart.

    Raises:
        InvalidModel: there is no network of this depth for images of this size.
    """

    def __init__(self, depth: int, *, size: int = 32, channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        large = size >= LARGE
        known = [*BLOCKS, *(() if large else SMALL)]
        if depth not in known:
            raise InvalidModel(
                f"there is no ResNet of depth {depth} for images of {size} x {size} pixels; there are depths "
                f"{', '.join(map(str, sorted(known)))}"
            )
        if size < 8:
            raise InvalidModel(f"a ResNet needs images of 8 x 8 pixels or more, got {size} x {size}")
        small = depth in SMALL
        width = 16 if small else 64
        stages = ((depth - 2) // 6,) * 3 if small else BLOCKS[depth]
        block = Bottleneck if depth in (50, 101, 152) else BasicBlock
        stride = 2 if large else 1
        kernel, padding = (7, 3) if large else (3, 1)
        self.conv1 = nn.Conv2d(channels, width, kernel, stride=stride, padding=padding, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if large else nn.Identity()
        inputs, pixels = width, size // 4 if large else size
        for number, blocks in enumerate(stages):
            outputs = width * 2**number * block.expansion
            layers: list[nn.Module] = []
            stride = 2 if number and pixels > 2 else 1
            pixels //= stride
            for _ in range(blocks):
                shortcut: nn.Module | None = None
                if stride != 1 or inputs != outputs:
                    new = partial(_Padded, outputs - inputs, stride)
                    shortcut = new() if small else _projected(inputs, outputs, stride)
                layers.append(block(inputs, width * 2**number, stride, shortcut))
                inputs, stride = outputs, 1
            self.add_module(f"layer{number + 1}", nn.Sequential(*layers))
        self.fc = nn.Linear(inputs, classes)
        self._stages = len(stages)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, channels, size, size) to (batch, classes)."""
        x = self.maxpool(functional.relu(self.bn1(self.conv1(x))))
        for number in range(self._stages):
            x = self.get_submodule(f"layer{number + 1}")(x)
        return self.fc(x.mean(dim=(2, 3)))  # type: ignore[no-any-return]
