"""Lossless codecs, which compress the output of another codec."""

from __future__ import annotations

import abc
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from elastic_ps.codec.base import DTYPES, Codec, Encoded, Packed, PackedTensor, pack, require, unpack
from elastic_ps.codec.memory import as_bytes, as_tensor
from elastic_ps.errors import InvalidJob

LEVEL = 1
"""The fastest standard level of Zstandard. Higher ones hardly compress a gradient further."""

MORE = 4096
"""An encoded tensor has at most twice the bytes of its elements, in float32 or wider, plus this many."""

HEADER = 16
"""The size of a Blosc header, in bytes."""


class Plain(Codec):
    """Leaves elements unchanged."""

    lossless = True

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:  # noqa: ARG002
        return Encoded({"values": tensor})

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        out.copy_(require("values", encoded.tensors["values"], torch.float32, out.numel()))


class Compressed(Codec):
    """Compresses the output of another codec with a library.

    The bytes of each tensor are first sorted by their position in the elements, as Blosc does (Alted 2010,
    "Why modern CPUs are starving"): signs and exponents are similar, and the rest is noise.

    Attributes:
        name: its name in `spec.compression.lossless`, and the extra that installs the package.
        package: the package to import.
    """

    name: ClassVar[str]
    package: ClassVar[str]

    def __init__(self, inner: Codec) -> None:
        """Raises InvalidJob if the package is not installed."""
        self._inner = inner
        try:
            self._library: Any = importlib.import_module(self.package)
        except ImportError as error:
            raise InvalidJob(
                f"compression.lossless {self.name} needs the package {self.package}, for the workers and for "
                f"the parameter server: pip install 'elastic-ps[{self.name}]'"
            ) from error
        self.lossless, self.feedback = inner.lossless, inner.feedback
        self.momentum, self.bits = inner.momentum, inner.bits

    @abc.abstractmethod
    def _compress(self, parts: Sequence[tuple[PackedTensor, memoryview]]) -> bytes:
        """The tensors' bytes, one after the other."""

    @abc.abstractmethod
    def _decompress(self, data: memoryview, parts: Sequence[PackedTensor]) -> memoryview:
        """Decompress. Raises, before memory is allocated, if the size is not that of `parts`."""

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:
        packed = pack(self._inner.encode(tensor, state, random))
        compressed = self._compress(list(zip(packed.parts, packed.body, strict=True)))
        values = {"parts": packed.parts, "values": packed.values}
        return Encoded({self.name: torch.frombuffer(bytearray(compressed), dtype=torch.uint8)}, values)

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        codec, inner = self.within(encoded, out.numel())
        codec.decode(inner, out)

    def within(self, encoded: Encoded, elements: int) -> tuple[Codec, Encoded]:
        """See `Codec.within`: the decompressed data."""
        parts = [
            PackedTensor(str(name), str(dtype), int(count)) for name, dtype, count in encoded.values["parts"]
        ]
        _require_sensible(parts, most=8 * elements + MORE)
        body = self._decompress(as_bytes(encoded.tensors[self.name]), parts)
        (inner,) = unpack([Packed(tuple(parts), str(encoded.values["values"]))], body)
        return self._inner.within(inner, elements)


class Zstd(Compressed):
    """With Zstandard (Collet and Kucherawy 2021, RFC 8878)."""

    name, package = "zstd", "zstandard"

    def _compress(self, parts: Sequence[tuple[PackedTensor, memoryview]]) -> bytes:
        planes = b"".join(_planes(body, part.width) for part, body in parts)
        compressed: bytes = self._library.ZstdCompressor(level=LEVEL).compress(planes)
        return compressed

    def _decompress(self, data: memoryview, parts: Sequence[PackedTensor]) -> memoryview:
        _require_length(self._library.frame_content_size(data), sum(part.nbytes for part in parts))
        planes = memoryview(self._library.ZstdDecompressor().decompress(data, allow_extra_data=False))
        body, place = bytearray(len(planes)), 0
        for part in parts:
            own = slice(place, place + part.nbytes)
            body[own] = _elements(planes[own], part.width)
            place = own.stop
        return memoryview(body)


class Blosc(Compressed):
    """With Blosc's own sorting of bytes and LZ4: much faster than Zstandard, but compresses less."""

    name, package = "blosc", "blosc"

    def __init__(self, inner: Codec) -> None:
        super().__init__(inner)
        self._library.set_nthreads(1)  # as many buckets are encoded at a time as there are cores for

    def _compress(self, parts: Sequence[tuple[PackedTensor, memoryview]]) -> bytes:
        options = {"clevel": 5, "shuffle": self._library.SHUFFLE, "cname": "lz4"}
        return b"".join(
            self._library.compress(bytes(body), typesize=part.width, **options) for part, body in parts
        )

    def _decompress(self, data: memoryview, parts: Sequence[PackedTensor]) -> memoryview:
        body = bytearray()
        for part in parts:
            if len(data) < HEADER:
                raise ValueError(f"the header of {part.name!r} has {len(data)} bytes; expected {HEADER}")
            declared, size, _ = self._library.get_cbuffer_sizes(bytes(data[:HEADER]))
            _require_length(declared, part.nbytes)
            frame = bytes(data[:size])
            if len(frame) != size or not self._library.cbuffer_validate(frame):
                raise ValueError(f"the compressed bytes of {part.name!r} are incomplete")
            body += self._library.decompress(frame)
            data = data[size:]
        if len(data):
            raise ValueError(f"the body has {len(data)} compressed bytes more than its parts")
        return memoryview(body)


LOSSLESS: Mapping[str, type[Compressed]] = {"zstd": Zstd, "blosc": Blosc}
"""The lossless codecs by their names in `spec.compression.lossless`, except `none`."""


def _require_sensible(parts: Sequence[PackedTensor], *, most: int) -> None:
    """Raise ValueError, before memory is allocated, for sizes that do not fit."""
    if unknown := {part.dtype for part in parts} - set(DTYPES):
        raise ValueError(f"parts of {', '.join(unknown)}; known: {', '.join(DTYPES)}")
    size = sum(part.nbytes for part in parts)
    if any(part.elements < 0 for part in parts) or size > most:
        raise ValueError(f"it would have {size} bytes; expected at most {most}")


def _require_length(declared: int, size: int) -> None:
    if declared != size:
        raise ValueError(f"it has {declared} bytes when it is decompressed; its parts have {size}")


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
