"""Deltas between the values of versions: numbers to add, or the bits that differ.

A shard knows the values that all workers have, and encodes the difference to its own. So the loss of a delta
is in the next difference: error feedback in the direction of the workers (Tang et al. 2019, "DoubleSqueeze";
Richtárik et al. 2021, "EF21"). Deltas do not depend on who pulls, or when: the same sums give the same
deltas, also on a standby, and when a round is repeated from a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from elastic_ps.codec.base import Codec, Encoded, Packed, Sparse, few, pack, random_of, require
from elastic_ps.codec.finite import is_finite
from elastic_ps.codec.places import LOW, of_nonzero, packed, unpacked


def difference(codec: Codec, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """The input of `codec` for a change. `before` and `after` are flat, float32, of the same length."""
    if codec.bits:
        return torch.bitwise_xor(_bits(before), _bits(after)).view(torch.float32)
    return after - before


def follow(codec: Codec, before: torch.Tensor, change: torch.Tensor, out: torch.Tensor) -> None:
    """Write to `out` the values before plus the change that `codec` has decoded."""
    if codec.bits:
        torch.bitwise_xor(_bits(before), _bits(change), out=_bits(out))
    else:
        torch.add(before, change, out=out)


class FewChanges(NamedTuple):
    """A version's change of few elements. All others stay the same, bit for bit.

    Attributes:
        codec: the codec that has encoded it.
        elements: the decoded elements.
    """

    codec: Codec
    elements: Sparse

    def make(self, values: torch.Tensor) -> None:
        """Change values: flat, float32."""
        places, by = self.elements
        if self.codec.bits:
            bits = _bits(values)
            bits[places] = bits[places] ^ _bits(by)
        else:
            values.index_add_(0, places, by)


@dataclass(frozen=True)
class Delta:
    """A change of a bucket's values.

    Attributes:
        since: the first version with the values before. All versions below `version` have them.
        version: the version with the values after.
        packed: the encoded change, contiguous. It never changes.
    """

    since: int
    version: int
    packed: Packed


def make_delta(
    codec: Codec, held: torch.Tensor, exact: torch.Tensor, *, bucket: int, since: int, version: int
) -> Delta | None:
    """Make a delta, and apply it to `held`, the values that workers have.

    Returns None if `held` is `exact` now, and workers need all of it: if the difference is not finite, unless
    the codec encodes bits, or if the codec would save nothing.

    Args:
        held, exact: flat, float32, of the same length.
        bucket, since, version: see `Delta`. `bucket` and `version` determine the random numbers.
    """
    change = difference(codec, held, exact)
    if change.numel() and (codec.bits or is_finite(change)):
        encoded = codec.encode(change, {"version": version}, random_of(f"{bucket}/{version}"))
        made = pack(encoded).copied()
        if made.nbytes < exact.nbytes:
            if codec.bits:  # nothing is lost, so decoding is not needed
                held.copy_(exact)
            elif (sent := few(codec, encoded, change.numel())) is not None:
                FewChanges(codec, sent).make(held)
            else:
                codec.decode(encoded, change)
                follow(codec, held, change, held)
            return Delta(since, version, made)
    held.copy_(exact)
    return None


class Changed(Codec):
    """The values of two versions that differ, with their places. Lossless.

    It saves bytes if an optimizer steps few elements: those that `topk` has sent, with SGD without momentum
    or weight decay, or the rows of an embedding that a batch has used.
    """

    lossless = bits = True
    version = "2"

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:  # noqa: ARG002
        bits = _bits(tensor)
        places = of_nonzero(bits)
        if places is None:
            return Encoded({"bits": bits})
        if not len(places):  # at least one is sent: no bytes would mean something else
            places = torch.zeros(1, dtype=torch.int64, device="cpu")
        return Encoded({"bits": bits[places], **packed(places, tensor.numel())})

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        found = self.sparse(encoded, out.numel())
        if found is None:
            _bits(out).copy_(encoded.tensors["bits"])
            return
        places, values = found.within(out.numel())
        out.zero_()[places] = values

    def sparse(self, encoded: Encoded, elements: int) -> Sparse | None:
        low = encoded.tensors.get(LOW)
        expected = elements if low is None else low.numel()
        bits = require("bits", encoded.tensors["bits"], torch.int32, expected)
        if low is None:
            return None
        return Sparse(unpacked(encoded.tensors, elements), bits.view(torch.float32))


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)
