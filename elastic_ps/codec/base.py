"""The interface of a codec: what a gradient looks like on the wire.

`encode` makes named tensors and plain values of a gradient, `decode` makes a gradient of them. A codec that
is biased is used with error feedback by the worker: what a step has lost is added to the next one's gradient
(Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; Karimireddy et al. 2019, "Error Feedback Fixes
SignSGD and other Gradient Compression Schemes").

A codec of your own is a subclass, named as `module:Class`. It is imported by the workers and by the
parameter server, so it has to be in the images of both.
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
    """What `encode` makes: tensors of any shape on the CPU, and values as JSON can carry them."""

    tensors: Mapping[str, torch.Tensor]
    values: Mapping[str, Any] = field(default_factory=dict)


class Sparse(NamedTuple):
    """A flat gradient of which few elements are not zero.

    Attributes:
        places: int64; where those elements are.
        values: the elements, in the same order. If a place is there twice, their sum is meant.
    """

    places: torch.Tensor
    values: torch.Tensor

    def at_once(self) -> torch.Tensor:
        """The values, with one for each place: what is there twice is added up."""
        places, where = self.places.unique(return_inverse=True)
        if len(places) == len(where):
            return self.values
        return torch.zeros(len(places), dtype=self.values.dtype, device="cpu").index_add_(
            0, where, self.values
        )

    def without(self, absent: Sequence[slice]) -> Sparse:
        """But for the elements in these slices."""
        found = self
        for piece in absent:
            kept = (found.places < piece.start) | (found.places >= piece.stop)
            found = Sparse(found.places[kept], found.values[kept])
        return found

    def within(self, elements: int) -> Sparse:
        """The same. Raises ValueError unless each place is one of so many elements, and has a value."""
        places = self.places
        if places.dtype is not torch.int64 or places.dim() != 1 or places.shape != self.values.shape:
            said = f"{tuple(places.shape)} places of {places.dtype} for {tuple(self.values.shape)} values"
            raise ValueError(
                f"{said}; expected one-dimensional tensors of the same size, the places of {torch.int64}"
            )
        if places.numel() and not (int(places.min()) >= 0 and int(places.max()) < elements):
            raise ValueError(
                f"places are {int(places.min())} to {int(places.max())}; expected 0 to {elements - 1}"
            )
        return self


def random_of(what: str) -> torch.Generator:
    """The random numbers for what has this name: the same whenever and wherever it is encoded."""
    digest = hashlib.blake2b(what.encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little"))


FEW = 8
"""Elements are added one by one if at most one in so many of a tensor is not zero."""

MOMENTUM = "momentum"
"""Where the worker keeps the momentum in the state of a codec that has one: flat, float32, never changed."""


class Codec(abc.ABC):
    """Encodes gradients, and decodes them. One object serves all threads.

    Attributes:
        lossless: `decode` gives back exactly what was encoded.
        feedback: what is lost is added to the next step's gradient; for codecs that are biased.
        momentum: with `feedback`, from 0 to below 1. Above 0 the worker makes momentum of its gradients
            before they are encoded, and sets it to zero where something is sent (Lin et al. 2018, "Deep
            Gradient Compression"). It keeps it in the codec's state, as `MOMENTUM`.
        bits: what it encodes is which bits differ, not by how much: of two versions of the model's values, as
            `codec.changes` has it. Gradients have no codec that does that.
        by_piece: each parameter is encoded by itself, as a matrix; see `for_matrix`.
        version: of what it sends. A worker that has another one than the parameter server ends when it joins.
    """

    version = ""
    lossless = False
    feedback = False
    momentum = 0.0
    bits = False
    by_piece = False

    def for_matrix(self, rows: int, columns: int) -> Codec | None:  # noqa: ARG002
        """With `by_piece`: what encodes a matrix of this shape, whose rows lie one after the other.

        None: it is sent as it is. A row is what one index of the parameter's first dimension selects. Of a
        parameter that is larger than a bucket, each part is a matrix.
        """
        return self

    @abc.abstractmethod
    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:
        """Encode a gradient.

        Args:
            tensor: flat, float32, on the CPU, finite. Not to be changed.
            state: `version` is the version that the step is computed on, or that a change of the values leads
                to. The codec may put in here what it needs for the same part of the model in the next step.
                It is kept when this step is in the model, and is as before if it never is; so what is in it
                must be replaced, not changed in place. It is lost with the worker.
            random: for all random numbers, so that the same step gives the same bytes.
        """

    @abc.abstractmethod
    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        """Write the gradient into `out`: flat, float32, as long as what was encoded.

        All of `out` has to be written: it holds anything before. What `encoded` holds comes from the
        network. Whatever is raised refuses the push.
        """

    def sparse(self, encoded: Encoded, elements: int) -> Sparse | None:  # noqa: ARG002
        """What `decode` would write into a tensor of so many elements, if most of that would be zeros.

        Then the parameter server adds these few elements to its sum, and decodes nothing. None: it decodes.
        Whatever is raised refuses the push. Places need not be checked here.
        """
        return None

    def within(self, encoded: Encoded, elements: int) -> tuple[Codec, Encoded]:  # noqa: ARG002
        """Of a codec around another one: that one, and what it has made of so many elements."""
        return self, encoded


def few(codec: Codec, encoded: Encoded, elements: int) -> Sparse | None:
    """What a codec has made of so many elements, if few of them are not zero. Its places are in the tensor.

    Raises whatever the codec does, and ValueError: the places are not.
    """
    codec, encoded = codec.within(encoded, elements)
    found = codec.sparse(encoded, elements)
    return None if found is None or found.values.numel() * FEW > elements else found.within(elements)


class Part(NamedTuple):
    """A tensor of an encoded gradient: its name, dtype and number of elements."""

    name: str
    dtype: str
    elements: int

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return dtype_of(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        return self.elements * self.width


class Packed(NamedTuple):
    """An encoded tensor on its way: its parts, its values as JSON, and its bytes.

    `codec` is the name that the other side expects.
    """

    parts: tuple[Part, ...]
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
    """What is sent of a bucket's gradient.

    Attributes:
        body: the bytes.
        codec: the name of the job's codec; `none` if the bucket is sent as it is.
        runs: how it is encoded, without the bytes.
        present: for each piece, whether it has a gradient; empty: all have.
        plain: it is sent as it is, also if the job has a codec for the bucket.
    """

    body: memoryview
    codec: str = NONE
    runs: Sequence[Packed] = ()
    present: Sequence[bool] = ()
    plain: bool = False


def pack(encoded: Encoded, codec: str = "") -> Packed:
    """Raises TypeError if the values are not plain ones."""
    flat = {name: tensor.detach().cpu().contiguous().view(-1) for name, tensor in encoded.tensors.items()}
    parts = tuple(Part(name, name_of(tensor.dtype), tensor.numel()) for name, tensor in flat.items())
    values = json.dumps(dict(encoded.values), sort_keys=True) if encoded.values else ""
    return Packed(parts, values, [as_bytes(tensor) for tensor in flat.values()], codec)


DTYPES = (
    "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"
)  # fmt: skip
"""Of the parts of an encoded gradient."""


def unpack(runs: Iterable[Packed], body: memoryview) -> list[Encoded]:
    """What was packed, one after the other. The tensors are views of `body`, if they are aligned.

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
    """The same. Raises ValueError unless it has so many elements of this dtype."""
    if tensor.dtype is not dtype or tensor.numel() != elements:
        raise ValueError(
            f"{name!r} has {tensor.numel()} elements of {tensor.dtype}; expected {elements} of {dtype}"
        )
    return tensor
