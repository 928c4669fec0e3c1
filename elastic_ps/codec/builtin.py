"""The codecs that come with elastic-ps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from elastic_ps.codec.base import Codec, Encoded


def _require(name: str, tensor: torch.Tensor, dtype: torch.dtype, elements: int) -> torch.Tensor:
    """Raises ValueError unless the tensor is one of these."""
    if tensor.dtype is not dtype or tensor.numel() != elements:
        raise ValueError(
            f"{name!r} has {tensor.numel()} elements of {tensor.dtype}; expected {elements} of {dtype}"
        )
    return tensor


class Bf16(Codec):
    """bfloat16, rounded to nearest: half the bytes, float32's range, a relative error of at most 2^-8."""

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:  # noqa: ARG002
        """See `Codec.encode`."""
        return Encoded({"values": tensor.to(torch.bfloat16)})

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        """See `Codec.decode`."""
        out.copy_(_require("values", encoded.tensors["values"], torch.bfloat16, out.numel()))

    def error_bound(self, tensor: torch.Tensor) -> float:
        """See `Codec.error_bound`."""
        return float(tensor.abs().max()) * 2.0**-8 if tensor.numel() else 0.0


class Fp16(Codec):
    """float16, rounded to nearest: half the bytes, a relative error of at most 2^-10.

    If the largest value were above float16's range, all are divided by a power of two before. What is then
    below 2^-24 of the range's end becomes coarse, and finally zero.
    """

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:  # noqa: ARG002
        """See `Codec.encode`."""
        scale = self._scale(tensor)
        if scale == 1.0:
            return Encoded({"values": tensor.to(torch.float16)})
        return Encoded({"values": (tensor / scale).to(torch.float16)}, {"scale": scale})

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        """See `Codec.decode`."""
        out.copy_(_require("values", encoded.tensors["values"], torch.float16, out.numel()))
        out.mul_(float(encoded.values.get("scale", 1.0)))

    @staticmethod
    def _scale(tensor: torch.Tensor) -> float:
        largest = float(tensor.abs().max()) if tensor.numel() else 0.0
        limit = torch.finfo(torch.float16).max
        return 1.0 if largest <= limit else 2.0 ** math.ceil(math.log2(largest / limit))

    def error_bound(self, tensor: torch.Tensor) -> float:
        """See `Codec.error_bound`."""
        if not tensor.numel():
            return 0.0
        return max(float(tensor.abs().max()) * 2.0**-10, self._scale(tensor) * 2.0**-25)


class _Integers(Codec):
    """Small integers and a scale for each block, rounded at random (Alistarh et al. 2017, "QSGD").

    Each block's largest magnitude becomes the largest integer. A value between two integers becomes one of
    them by chance, so that it is right on average.
    """

    unbiased = True
    _most: int

    def __init__(self, block: int = 256) -> None:
        """`block`: how many elements share a scale."""
        if not 2 <= block <= 1 << 20 or block % 2:
            raise ValueError(f"block is {block}; expected an even number from 2 to {1 << 20}")
        self._block = block

    def _round(self, tensor: torch.Tensor, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Integers as float32, in blocks, and the blocks' scales."""
        blocks = self._in_blocks(tensor)
        scale = blocks.abs().amax(dim=1)
        factor = torch.where(scale > 0, self._most / scale, 0.0)
        factor[torch.isinf(factor)] = 0.0  # so small that its inverse overflows: as good as zero
        noise = torch.rand(blocks.shape, generator=random)
        integers = noise.addcmul_(blocks, factor.unsqueeze(1)).floor_().clamp_(-self._most, self._most)
        return integers, scale

    def _in_blocks(self, tensor: torch.Tensor) -> torch.Tensor:
        missing = -tensor.numel() % self._block
        return torch.nn.functional.pad(tensor, (0, missing)).view(-1, self._block)

    def _restore(self, integers: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
        """Write whole blocks of integers, times their scales, into `out`, which may end before them."""
        scale = _require("scale", scale, torch.float32, -(-out.numel() // self._block))
        values = integers.view(-1, self._block) * (scale / self._most).unsqueeze(1)
        out.copy_(values.view(-1)[: out.numel()])

    def error_bound(self, tensor: torch.Tensor) -> float:
        """See `Codec.error_bound`."""
        return float(tensor.abs().max()) / self._most * (1 + 1e-5) if tensor.numel() else 0.0


class Int8(_Integers):
    """Whole numbers from -127 to 127: about a quarter of the bytes. Unbiased; see `_Integers`."""

    _most = 127

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:  # noqa: ARG002
        """See `Codec.encode`."""
        integers, scale = self._round(tensor, random)
        return Encoded({"scale": scale, "integers": integers.to(torch.int8).view(-1)[: tensor.numel()]})

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        """See `Codec.decode`."""
        integers = _require("integers", encoded.tensors["integers"], torch.int8, out.numel())
        missing = -out.numel() % self._block
        padded = torch.nn.functional.pad(integers, (0, missing)) if missing else integers
        self._restore(padded, encoded.tensors["scale"], out)


class Int4(_Integers):
    """Whole numbers from -7 to 7, two in a byte: about an eighth of the bytes. Unbiased; see `_Integers`."""

    _most = 7

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:  # noqa: ARG002
        """See `Codec.encode`."""
        integers, scale = self._round(tensor, random)
        pairs = (integers + self._most).to(torch.uint8).view(-1, 2)
        return Encoded({"scale": scale, "pairs": pairs[:, 0] | (pairs[:, 1] << 4)})

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        """See `Codec.decode`."""
        whole = -(-out.numel() // self._block) * self._block
        pairs = _require("pairs", encoded.tensors["pairs"], torch.uint8, whole // 2)
        integers = torch.stack((pairs & 15, pairs >> 4), dim=1).view(-1).to(torch.float32) - self._most
        self._restore(integers, encoded.tensors["scale"], out)


class TopK(Codec):
    """The elements of largest magnitude, and their places; the others wait in the worker.

    Stich et al. 2018, "Sparsified SGD with Memory".
    """

    feedback = True

    def __init__(self, ratio: float = 0.01) -> None:
        """`ratio`: of the elements that are sent; at least one is."""
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio is {ratio}; expected a number above 0, and 1 at most")
        self._ratio = ratio

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:  # noqa: ARG002
        """See `Codec.encode`."""
        count = math.ceil(self._ratio * tensor.numel())
        places = tensor.abs().topk(count, sorted=False).indices
        return Encoded({"values": tensor[places], "places": places.to(torch.int32)})

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        """See `Codec.decode`."""
        values = encoded.tensors["values"]
        places = _require("places", encoded.tensors["places"], torch.int32, values.numel()).to(torch.int64)
        _require("values", values, torch.float32, math.ceil(self._ratio * out.numel()))
        if places.numel() and not (int(places.min()) >= 0 and int(places.max()) < out.numel()):
            raise ValueError(f"places from {int(places.min())} to {int(places.max())} of {out.numel()}")
        out.zero_()
        out[places] = values


class SignSGD(Codec):
    """One bit for each element, and the mean magnitude of each block (Karimireddy et al. 2019, EF-SGD).

    Larger blocks take fewer bytes, and need a smaller learning rate where gradients differ in size.
    """

    feedback = True

    def __init__(self, block: int = 64) -> None:
        """`block`: how many elements share a magnitude."""
        if not 8 <= block <= 1 << 24 or block % 8:
            raise ValueError(f"block is {block}; expected a multiple of 8 from 8 to {1 << 24}")
        self._block = block

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:  # noqa: ARG002
        """See `Codec.encode`."""
        missing = -tensor.numel() % self._block
        blocks = torch.nn.functional.pad(tensor, (0, missing)).view(-1, self._block)
        scale = blocks.abs().mean(dim=1)
        if missing:
            scale[-1] *= self._block / (self._block - missing)
        signs = np.packbits(tensor.numpy() >= 0)
        return Encoded({"scale": scale, "signs": torch.from_numpy(signs)})

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        """See `Codec.decode`."""
        elements = out.numel()
        signs = _require("signs", encoded.tensors["signs"], torch.uint8, -(-elements // 8))
        scale = _require("scale", encoded.tensors["scale"], torch.float32, -(-elements // self._block))
        bits = torch.from_numpy(np.unpackbits(signs.numpy(), count=elements))
        torch.mul(bits, 2, out=out).sub_(1).mul_(scale.repeat_interleave(self._block)[:elements])
