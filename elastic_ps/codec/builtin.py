"""The codecs that come with elastic-ps."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch

from elastic_ps.api import codecs
from elastic_ps.codec.base import Codec, Encoded, Sparse, require
from elastic_ps.codec.memory import dtype_of
from elastic_ps.codec.places import LOW, of_large, packed, unpacked

FLOATS: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
"""The dtype in which codecs compute, whatever default a script has set."""


class Bf16(Codec):
    """bfloat16, rounded to nearest: half the bytes, float32's range, a relative error of at most 2^-8."""

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:  # noqa: ARG002
        return Encoded({"values": tensor.to(torch.bfloat16)})

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        out.copy_(require("values", encoded.tensors["values"], torch.bfloat16, out.numel()))


_SMALLEST = -126
"""The smallest exponent of float32. float16 has smaller values after a division by this power of two."""


class Fp16(Codec):
    """float16, rounded to nearest: half the bytes, a relative error of at most 2^-10.

    All values are first divided by a power of two, so that the largest one is close to the end of float16's
    range. Values below 2^-29 of the largest one lose precision, and below 2^-41 they become zero.
    """

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:  # noqa: ARG002
        scale = self._scale(tensor)
        if scale == 1.0:
            return Encoded({"values": tensor.to(torch.float16)})
        return Encoded({"values": (tensor / scale).to(torch.float16)}, {"scale": scale})

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        out.copy_(require("values", encoded.tensors["values"], torch.float16, out.numel()))
        out.mul_(float(encoded.values.get("scale", 1.0)))

    @staticmethod
    def _scale(tensor: torch.Tensor) -> float:
        largest = float(tensor.abs().max()) if tensor.numel() else 0.0
        if not largest:
            return 1.0
        exponent = math.ceil(math.log2(largest / torch.finfo(torch.float16).max))
        return 2.0 ** max(exponent, _SMALLEST)


_NOISE = codecs.MOST_OF_INTEGERS
"""The number of different random numbers, and of elements that are rounded at a time."""

_SAMPLE = 1 << 12
"""The size of the sample by which large elements of a much larger tensor are found."""


class _Integers(Codec):
    """Small integers and a scale for each block, rounded at random (Alistarh et al. 2017, "QSGD").

    Each block's largest magnitude becomes the largest integer. A value between two integers is rounded to one
    of them at random, so that it is unbiased.
    """

    _most: int

    def __init__(self, block: int = 256) -> None:
        """`block`: the number of elements that share a scale."""
        codecs.integers(block)
        self._block = block
        random = torch.Generator()
        random.manual_seed(0)
        # Each number between 0 and 1 once, in random order, so that their mean is exact. The sequence is
        # repeated, so that a piece of any length can begin anywhere.
        places = torch.randperm(_NOISE, generator=random, device="cpu")
        noise = (places.to(torch.float32) + 0.5) / _NOISE
        self._noise = torch.cat((noise, noise))

    def _round(
        self, tensor: torch.Tensor, random: torch.Generator, dtype: torch.dtype, *, above: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The integers, in whole blocks, each plus `above`, and the blocks' scales.

        A few blocks at a time stay in the CPU's cache. Random numbers take longer than everything else, so a
        piece of a fixed sequence is used, from a random position on.
        """
        blocks = _padded(tensor, self._block).view(-1, self._block)
        integers = torch.empty(blocks.shape, dtype=dtype, device="cpu")
        scales = torch.empty(len(blocks), **FLOATS)
        rows = _NOISE // self._block
        pieces = -(-len(blocks) // rows)
        starts = torch.randint(_NOISE, (pieces,), generator=random, device="cpu").tolist()
        work = torch.empty(rows, self._block, **FLOATS)
        for number, start in enumerate(starts):
            part = slice(number * rows, (number + 1) * rows)
            values, scale = blocks[part], scales[part]
            now = work[: len(values)]
            torch.amax(torch.abs(values, out=now), 1, out=scale)
            # A little less than the largest integer, so that rounding never gives the next one.
            factor = (self._most * (1 - 2.0**-20)) / scale
            factor[torch.isinf(factor)] = 0.0  # the block is zero, or negligibly small
            torch.mul(values, factor.unsqueeze(1), out=now)
            now += self._noise[start : start + now.numel()].view(now.shape)
            now.floor_()
            if above:
                now += above
            integers[part] = now
        return integers, scales

    def _restore(self, integers: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
        """Write whole blocks of integers, times their scales, to `out`, which may be shorter."""
        scale = require("scale", scale, torch.float32, -(-out.numel() // self._block))
        values = integers.view(-1, self._block) * (scale / self._most).unsqueeze(1)
        out.copy_(values.view(-1)[: out.numel()])


class Int8(_Integers):
    """Whole numbers from -127 to 127: about a quarter of the bytes. Unbiased; see `_Integers`."""

    _most = 127

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:  # noqa: ARG002
        integers, scale = self._round(tensor, random, torch.int8)
        return Encoded({"scale": scale, "integers": integers.view(-1)[: tensor.numel()]})

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        integers = require("integers", encoded.tensors["integers"], torch.int8, out.numel())
        self._restore(_padded(integers, self._block), encoded.tensors["scale"], out)


class Int4(_Integers):
    """Whole numbers from -7 to 7, two in a byte: about an eighth of the bytes. Unbiased; see `_Integers`."""

    _most = 7

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:  # noqa: ARG002
        integers, scale = self._round(tensor, random, torch.uint8, above=self._most)
        pairs = integers.view(-1, 2)
        pairs = pairs[: -(-tensor.numel() // 2)]
        return Encoded({"scale": scale, "pairs": pairs[:, 0] | (pairs[:, 1] << 4)})

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        pairs = require("pairs", encoded.tensors["pairs"], torch.uint8, -(-out.numel() // 2))
        pairs = _padded(pairs, self._block // 2)
        integers = torch.stack((pairs & 15, pairs >> 4), dim=1).view(-1).to(torch.float32) - self._most
        self._restore(integers, encoded.tensors["scale"], out)


class TopK(Codec):
    """The elements of largest magnitude, with their places; the others wait in the worker.

    Stich et al. 2018, "Sparsified SGD with Memory". In a large tensor the threshold is estimated, so slightly
    fewer elements may be sent.

    The model changes most at first, when waiting elements are soon out of date. So `warmup` sends more at
    first, as in Lin et al. 2018, "Deep Gradient Compression", where the share falls by a factor of 4 after
    each epoch, from a quarter on. Here it falls a little with each version. `momentum` is that of the same
    paper.

    An element takes two bytes, and its place two more. Rounding errors wait, too.
    """

    feedback = True
    version = "2"

    def __init__(
        self, ratio: float = 0.01, warmup: int = 0, momentum: float = 0.0, dtype: str = "bfloat16"
    ) -> None:
        """Raises ValueError if an argument is out of range.

        Args:
            ratio: the share of the elements to send; at least one element is sent.
            warmup: the version from which on `ratio` applies. Before, the share falls exponentially from a
                quarter.
            momentum: see `Codec`; for an optimizer without momentum.
            dtype: `bfloat16` or `float32`, in which elements are sent.
        """
        codecs.largest(ratio, warmup, momentum, dtype)
        self._ratio, self._warmup, self.momentum = ratio, warmup, momentum
        self._dtype = dtype_of(dtype)

    def share(self, version: int) -> float:
        """The share of the elements to send in a step on this version."""
        if version >= self._warmup:
            return self._ratio
        return float(codecs.AT_FIRST * (self._ratio / codecs.AT_FIRST) ** (version / self._warmup))

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:
        ratio = self.share(state.get("version", self._warmup))
        count = math.ceil(ratio * tensor.numel())
        if tensor.numel() < 16 * _SAMPLE or ratio * _SAMPLE < 16:
            places = _largest(tensor, count)
        else:  # Lin et al. 2018, "Deep Gradient Compression": the threshold comes from a sample
            sample = tensor[torch.randint(tensor.numel(), (_SAMPLE,), generator=random, device="cpu")].abs()
            limit = float(sample.topk(math.ceil(ratio * _SAMPLE)).values[-1])
            places = of_large(tensor, limit)
            if len(places) > count:
                places = places[_largest(tensor[places], count)]
        values, limit = tensor[places], torch.finfo(self._dtype).max
        values = values.clamp_(-limit, limit).to(
            self._dtype
        )  # values close to float32's end would be rounded to infinity
        return Encoded({"values": values, **packed(places, tensor.numel())})

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        places, values = self.sparse(encoded, out.numel()).within(out.numel())
        out.zero_()
        out.index_add_(0, places, values)

    def sparse(self, encoded: Encoded, elements: int) -> Sparse:
        values, low = encoded.tensors["values"], encoded.tensors[LOW]
        most = math.ceil(self.share(0) * elements)
        if values.dtype is not self._dtype or not low.numel() == values.numel() <= most:
            said = f"{values.numel()} values of {values.dtype} and {low.numel()} places"
            raise ValueError(
                f"{said} for {elements} elements; expected the same number of both, at most {most}, of "
                f"{self._dtype}"
            )
        return Sparse(unpacked(encoded.tensors, elements), values.to(torch.float32))


def _largest(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the `count` elements of largest magnitude, in order."""
    return tensor.abs().topk(count, sorted=False).indices.sort().values


class SignSGD(Codec):
    """One bit for each element, and the mean magnitude of each block (Karimireddy et al. 2019, EF-SGD).

    Elements of very different size fit a common magnitude badly: the remainders of the large ones wait for as
    many steps as there are elements in a block, and the small ones become noise. So the signs are not those
    of the elements but of a random Hadamard transform of a block, whose values have about the same size, as
    in Vargaftik et al. 2021, "DRIVE: One-bit Distributed Mean Estimation". About 0.6 of any gradient is left
    over, and is soon made up for.
    """

    feedback = True
    version = "2"

    def __init__(self, block: int = 64) -> None:
        """`block`: the number of elements that share a magnitude."""
        codecs.signs(block)
        self._block = block

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:  # noqa: ARG002
        mixing = self._mixing(tensor.numel())
        flat = (_padded(tensor, len(mixing)).view(-1, len(mixing)) @ mixing).view(-1)
        blocks = _padded(flat, self._block).view(-1, self._block)
        scale = blocks.abs().mean(dim=1)
        if missing := blocks.numel() - flat.numel():
            scale[-1] *= self._block / (self._block - missing)
        return Encoded({"scale": scale, "signs": torch.from_numpy(np.packbits(flat.numpy() >= 0))})

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        elements = out.numel()
        mixing = self._mixing(elements)
        signs = require("signs", encoded.tensors["signs"], torch.uint8, _whole(elements, len(mixing)) // 8)
        scale = require("scale", encoded.tensors["scale"], torch.float32, -(-elements // self._block))
        bits = torch.from_numpy(np.unpackbits(signs.numpy())).to(torch.float32).mul_(2).sub_(1)
        # Sums of ones are exact in any order, so all processes get the same values, bit for bit.
        counts = (bits.view(-1, len(mixing)) @ mixing.T).view(-1)[:elements]
        torch.mul(counts, (scale / len(mixing)).repeat_interleave(self._block)[:elements], out=out)

    def _mixing(self, elements: int) -> torch.Tensor:
        """The mixing matrix for so many elements: its size divides a block, and is only a little larger."""
        return _mixing(min(self._block & -self._block, _MIXED, max(8, 1 << elements.bit_length() - 1)))


_MIXED = 256
"""The size of the largest transform of `signsgd`."""


@cache
def _mixing(size: int) -> torch.Tensor:
    """Hadamard's matrix with fixed random signs of its rows. The product with its transpose is `size`."""
    matrix = torch.ones(1, 1, **FLOATS)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    random = torch.Generator("cpu").manual_seed(0)
    return matrix * (torch.randint(2, (size, 1), generator=random, device="cpu") * 2 - 1)


def _whole(elements: int, block: int) -> int:
    """The number of elements, rounded up to whole blocks."""
    return -(-elements // block) * block


def _padded(flat: torch.Tensor, block: int) -> torch.Tensor:
    """The tensor, padded with zeros to whole blocks."""
    missing = _whole(flat.numel(), block) - flat.numel()
    return torch.nn.functional.pad(flat, (0, missing)) if missing else flat
