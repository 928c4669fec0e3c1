"""Zstandard after another codec: fewer bytes, and nothing is lost by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elastic_ps.codec.base import DTYPES, Codec, Encoded, Part, pack, unpack
from elastic_ps.codec.memory import as_bytes, as_tensor, dtype_of
from elastic_ps.errors import InvalidJob

LEVEL = 1
"""Zstandard's fastest of the usual ones. Higher levels find next to nothing more in a gradient."""

MORE = 4096
"""What a codec makes has at most so many bytes more than twice those of the elements in float32."""


class Plain(Codec):
    """The elements as they are."""

    lossless = unbiased = True

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:  # noqa: ARG002
        """See `Codec.encode`."""
        return Encoded({"values": tensor})

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        """See `Codec.decode`."""
        values = encoded.tensors["values"]
        if values.dtype is not torch.float32:
            raise ValueError(f"the elements are {values.dtype}; expected {torch.float32}")
        out.copy_(values)


class Zstd(Codec):
    """What another codec makes, compressed with Zstandard (Collet and Kucherawy 2021, RFC 8878).

    The bytes of each tensor are sorted by their place in the elements before, as Blosc does (Alted 2010, "Why
    modern CPUs are starving"): signs and exponents are much alike, and the rest is noise.
    """

    def __init__(self, inner: Codec) -> None:
        """Raises InvalidJob: the package zstandard is not installed."""
        self._inner = inner
        self._zstandard = _library()
        self.lossless, self.unbiased, self.feedback = inner.lossless, inner.unbiased, inner.feedback

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:
        """See `Codec.encode`."""
        packed = pack(self._inner.encode(tensor, state, random))
        planes = b"".join(
            _planes(body, dtype_of(part.dtype).itemsize)
            for part, body in zip(packed.parts, packed.body, strict=True)
        )
        compressed = self._zstandard.ZstdCompressor(level=LEVEL).compress(planes)
        values = {"parts": packed.parts, "values": packed.values}
        return Encoded({"zstd": torch.frombuffer(bytearray(compressed), dtype=torch.uint8)}, values)

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        """See `Codec.decode`."""
        parts = [Part(str(name), str(dtype), int(count)) for name, dtype, count in encoded.values["parts"]]
        planes = self._decompressed(encoded.tensors["zstd"], parts, most=8 * out.numel() + MORE)
        body, place = bytearray(len(planes)), 0
        for part in parts:
            size = part.elements * dtype_of(part.dtype).itemsize
            own = slice(place, place + size)
            body[own] = _elements(planes[own], dtype_of(part.dtype).itemsize)
            place += size
        inner, _ = unpack(parts, str(encoded.values["values"]), memoryview(body))
        self._inner.decode(inner, out)

    def _decompressed(self, compressed: torch.Tensor, parts: Sequence[Part], *, most: int) -> memoryview:
        """Raises ValueError before memory is taken for what does not fit."""
        if unknown := {part.dtype for part in parts} - set(DTYPES):
            raise ValueError(f"parts of {', '.join(unknown)}; known: {', '.join(DTYPES)}")
        size = sum(part.elements * dtype_of(part.dtype).itemsize for part in parts)
        if any(part.elements < 0 for part in parts) or size > most:
            raise ValueError(f"it would have {size} bytes; expected at most {most}")
        data = as_bytes(compressed)
        declared = self._zstandard.frame_content_size(data)
        if declared != size:
            raise ValueError(f"it has {declared} bytes when it is decompressed; its parts have {size}")
        return memoryview(self._zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False))

    def error_bound(self, tensor: torch.Tensor) -> float:
        """See `Codec.error_bound`."""
        return self._inner.error_bound(tensor)


def _planes(body: memoryview, width: int) -> bytes:
    """The first bytes of all elements, then the second ones, and so on."""
    if width == 1 or not body.nbytes:
        return bytes(body)
    return bytes(as_bytes(as_tensor(body).view(-1, width).t().contiguous()))


def _elements(planes: memoryview, width: int) -> memoryview:
    """The inverse of `_planes`."""
    if width == 1 or not planes.nbytes:
        return planes
    return as_bytes(as_tensor(planes).view(width, -1).t().contiguous())


def _library() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise InvalidJob(
            "compression.lossless zstd needs the package zstandard, for the workers and for the parameter "
            "server: pip install 'elastic-ps[zstd]'"
        ) from error
    return zstandard
