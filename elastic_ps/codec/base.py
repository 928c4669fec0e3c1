"""The interface of a codec, which encodes gradients for the network.

`encode` turns a gradient into named tensors and plain values, `decode` turns them into a gradient. The worker
uses a biased codec with error feedback: the loss of a step is added to the next one's gradient (Seide et al.
2014, "1-Bit Stochastic Gradient Descent"; Karimireddy et al. 2019, "Error Feedback Fixes SignSGD
and other Gradient Compression Schemes").

A user's own codec is a subclass, named as `module:Class`. Workers and parameter servers import it, so the
images of both need it.
"""

from __future__ import annotations

import abc
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from elastic_ps.codec import NONE
from elastic_ps.codec.memory import as_bytes, as_tensor, dtype_of, name_of
from elastic_ps.errors import Malformed


@dataclass(frozen=True)
class Encoded:
    """The result of `encode`: tensors of any shape on the CPU, and JSON values."""

    tensors: Mapping[str, torch.Tensor]
    values: Mapping[str, Any] = field(default_factory=dict)


class Sparse(NamedTuple):
    """A flat gradient with few elements other than zero.

    Attributes:
        places: the indexes of those elements, int64.
        values: the elements, in the same order. Elements of the same place are summed.
    """

    places: torch.Tensor
    values: torch.Tensor

    def at_once(self) -> torch.Tensor:
        """A copy with one value for each place: values of the same place are summed."""
        places, where = self.places.unique(return_inverse=True)
        if len(places) == len(where):
            return self.values
        return torch.zeros(len(places), dtype=self.values.dtype, device="cpu").index_add_(
            0, where, self.values
        )

    def without(self, absent: Sequence[slice]) -> Sparse:
        """A copy without the elements in these slices."""
        found = self
        for piece in absent:
            kept = (found.places < piece.start) | (found.places >= piece.stop)
            found = Sparse(found.places[kept], found.values[kept])
        return found

    def within(self, elements: int) -> Sparse:
        """Return self. Raises ValueError unless each place is below `elements`, and has a value."""
        places = self.places
        if places.dtype is not torch.int64 or places.dim() != 1 or places.shape != self.values.shape:
            said = f"got {tuple(places.shape)} places of {places.dtype} and {tuple(self.values.shape)} values"
            raise ValueError(
                f"{said}; expected one-dimensional tensors of the same size, the places of {torch.int64}"
            )
        if places.numel() and not (int(places.min()) >= 0 and int(places.max()) < elements):
            raise ValueError(
                f"places are {int(places.min())} to {int(places.max())}; expected 0 to {elements - 1}"
            )
        return self


def random_of(what: str) -> torch.Generator:
    """The random numbers for this name, the same at each time and place."""
    digest = hashlib.blake2b(what.encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little"))


FEW = 8
"""Elements are added one by one if at most one in this many is not zero."""

MOMENTUM = "momentum"
"""The key of the momentum in a codec's state: flat, float32, never changed in place."""


class Codec(abc.ABC):
    """Encodes gradients, and decodes them. One object serves all threads.

    Attributes:
        lossless: whether `decode` returns exactly what was encoded.
        feedback: whether the loss is added to the next step's gradient; for biased codecs.
        momentum: with `feedback`, from 0 to below 1. Above 0 the worker applies momentum to its gradients
            before they are encoded, and sets it to zero where elements are sent (Lin et al. 2018, "Deep
            Gradient Compression"). The codec's state keeps it, as `MOMENTUM`.
        bits: whether it encodes which bits of two versions of the model's values differ, instead of their
            difference; see `codec.changes`. Codecs of gradients do not.
        by_piece: whether each parameter is encoded by itself, as a matrix; see `for_matrix`.
        version: the version of its format. A worker with another one than the parameter server cannot join.
    """

    version = ""
    lossless = False
    feedback = False
    momentum = 0.0
    bits = False
    by_piece = False

    def for_matrix(self, rows: int, columns: int) -> Codec | None:  # noqa: ARG002
        """With `by_piece`: the codec of a row-major matrix of this shape; None: it is sent unchanged.

        A row is selected by one index of the parameter's first dimension. If a parameter is larger than a
        bucket, each part is a matrix.
        """
        return self

    @abc.abstractmethod
    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:
        """Encode a gradient.

        Args:
            tensor: flat, float32, on the CPU, finite. Do not change it.
            state: `version` is the version that the step is computed on, or that a change of the values leads
                to. The codec may store data for the same part of the model in the next step. It is kept if
                this step gets into the model, and otherwise reset; so replace data instead of changing it in
                place. It is lost with the worker.
            random: the source of all random numbers, so that the same step gives the same bytes.
        """

    @abc.abstractmethod
    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        """Write the gradient into `out`: flat, float32, as long as what was encoded.

        Write all of `out`, which is uninitialised. `encoded` comes from the network. Any exception refuses
        the push.
        """

    def sparse(self, encoded: Encoded, elements: int) -> Sparse | None:  # noqa: ARG002
        """The result of `decode` as a sparse gradient, if most elements are zero; otherwise None.

        The parameter server then adds only these elements to its sum. Any exception refuses the push. Places
        need not be checked here.
        """
        return None

    def within(self, encoded: Encoded, elements: int) -> tuple[Codec, Encoded]:  # noqa: ARG002
        """Return the inner codec of one around another, and its output for so many elements."""
        return self, encoded


def few(codec: Codec, encoded: Encoded, elements: int) -> Sparse | None:
    """A codec's output as a sparse gradient with valid places; None if it is dense.

    Raises any exception of the codec, and ValueError if a place is invalid.
    """
    codec, encoded = codec.within(encoded, elements)
    found = codec.sparse(encoded, elements)
    return None if found is None or found.values.numel() * FEW > elements else found.within(elements)


class PackedTensor(NamedTuple):
    """A tensor of an encoded gradient: its name, dtype and number of elements."""

    name: str
    dtype: str
    elements: int

    @property
    def width(self) -> int:
        """The size of an element, in bytes."""
        return dtype_of(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        return self.elements * self.width


class Packed(NamedTuple):
    """An encoded tensor to send: its parts, its values as JSON, and its bytes.

    `codec` is the name that the other side expects.
    """

    parts: tuple[PackedTensor, ...]
    values: str
    body: Sequence[memoryview] = ()
    codec: str = ""

    @property
    def nbytes(self) -> int:
        return sum(len(part) for part in self.body)

    def joined(self) -> Packed:
        """The same, in one piece."""
        return self if len(self.body) == 1 else self.copied()

    def copied(self) -> Packed:
        """The same, in one piece of memory of its own."""
        return self._replace(body=[memoryview(b"".join(self.body))])


@dataclass(frozen=True)
class Payload:
    """The message for a bucket's gradient.

    Attributes:
        body: the bytes.
        codec: the name of the job's codec; `none` if the bucket is sent unchanged.
        runs: how it is encoded, without the bytes.
        present: whether each piece has a gradient; empty: all have.
        plain: whether it is sent unchanged, although the job may have a codec for the bucket.
    """

    body: memoryview
    codec: str = NONE
    runs: Sequence[Packed] = ()
    present: Sequence[bool] = ()
    plain: bool = False


def pack(encoded: Encoded, codec: str = "") -> Packed:
    """Pack an encoded tensor. Raises TypeError if JSON cannot encode the values."""
    flat = {name: tensor.detach().cpu().contiguous().view(-1) for name, tensor in encoded.tensors.items()}
    parts = tuple(PackedTensor(name, name_of(tensor.dtype), tensor.numel()) for name, tensor in flat.items())
    values = json.dumps(dict(encoded.values), sort_keys=True) if encoded.values else ""
    return Packed(parts, values, [as_bytes(tensor) for tensor in flat.values()], codec)


DTYPES = (
    "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"
)  # fmt: skip
"""The dtypes of the parts of an encoded gradient."""


def unpack(runs: Iterable[Packed], body: memoryview) -> list[Encoded]:
    """Unpack a sequence of encoded tensors. They are views of `body` if they are aligned.

    Raises:
        Malformed: the bytes do not fit the parts.
    """
    found, start = [], 0
    for packed in runs:
        tensors = {}
        for part in packed.parts:
            if part.dtype not in DTYPES:
                raise Malformed(f"part {part.name!r} has dtype {part.dtype!r}; known: {', '.join(DTYPES)}")
            stop = start + part.nbytes
            if stop > len(body):
                raise Malformed(f"part {part.name!r} ends at byte {stop} of {len(body)}")
            piece = body[start:stop]
            if start % part.width:
                piece = memoryview(bytearray(piece))
            tensors[part.name], start = as_tensor(piece, dtype_of(part.dtype)), stop
        try:
            plain = json.loads(packed.values) if packed.values else {}
        except (ValueError, RecursionError) as error:
            raise Malformed(f"the values of an encoded tensor are not JSON: {error}") from error
        if not isinstance(plain, dict):
            raise Malformed("the values of an encoded tensor are not a JSON object")
        found.append(Encoded(tensors, plain))
    if start != len(body):
        raise Malformed(f"the body has {len(body) - start} bytes more than its parts")
    return found


def require(name: str, tensor: torch.Tensor, dtype: torch.dtype, elements: int) -> torch.Tensor:
    """Return `tensor`. Raises ValueError unless it has so many elements of this dtype."""
    if tensor.dtype is not dtype or tensor.numel() != elements:
        raise ValueError(
            f"{name!r} has {tensor.numel()} elements of {tensor.dtype}; expected {elements} of {dtype}"
        )
    return tensor
