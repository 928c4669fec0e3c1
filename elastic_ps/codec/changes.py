"""What makes a version's values of those before: numbers that are added to them, or the bits that differ.

A shard knows what all workers have, and encodes how its own values differ from that. So what a delta has lost
is in the next one's difference: error feedback, on the way down (Tang et al. 2019, "DoubleSqueeze";
Richtárik et al. 2021, "EF21"). Nothing of it depends on who pulls, or when: the same sums give the same
deltas, also on a standby, and when a round is made again from a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from elastic_ps.codec.base import Codec, Encoded, Packed, Sparse, few, pack, random_of, require
from elastic_ps.codec.finite import is_finite
from elastic_ps.codec.places import LOW, of_nonzero, packed, unpacked


def difference(codec: Codec, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """What `codec` encodes of a change. `before` and `after` are flat, float32, of the same length."""
    if codec.bits:
        return torch.bitwise_xor(_bits(before), _bits(after)).view(torch.float32)
    return after - before


def follow(codec: Codec, before: torch.Tensor, change: torch.Tensor, out: torch.Tensor) -> None:
    """Write into `out` what the values before become with the change, as `codec` has decoded it."""
    if codec.bits:
        torch.bitwise_xor(_bits(before), _bits(change), out=_bits(out))
    else:
        torch.add(before, change, out=out)


class FewChanges(NamedTuple):
    """What a version changes in few elements. All others stay as they are, to the bit.

    Attributes:
        codec: which has made it.
        elements: what it has made.
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
    """What changes the values of a bucket.

    Attributes:
        since: the first version that has the values it changes; all up to `version` have them.
        version: the one that it makes.
        packed: what it is made of, and its bytes, in one piece. They never change.
    """

    since: int
    version: int
    packed: Packed


def make_delta(
    codec: Codec, held: torch.Tensor, exact: torch.Tensor, *, bucket: int, since: int, version: int
) -> Delta | None:
    """Change `held`, what workers have, to what they have with the delta. Returns that.

    None: `held` is `exact` now, and workers need all of it. So it is if the difference is not finite, unless
    the codec encodes its bits, or if the codec would save nothing.

    Args:
        held, exact: flat, float32, of the same length.
        bucket, since, version: see `Delta`. With `bucket` and `version` come the same random numbers.
    """
    change = difference(codec, held, exact)
    if change.numel() and (codec.bits or is_finite(change)):
        encoded = codec.encode(change, {"version": version}, random_of(f"{bucket}/{version}"))
        made = pack(encoded).copied()
        if made.nbytes < exact.nbytes:
            if codec.bits:  # nothing is lost, so that need not be decoded
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
    """Of two versions' values, those that differ, and their places. Nothing is lost.

    It saves bytes where an optimizer steps few elements: those that `topk` has sent, if it is SGD without
    momentum or weight decay, or the rows of an embedding that a batch has used.
    """

    lossless = bits = True
    version = "2"

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:  # noqa: ARG002
        bits = _bits(tensor)
        places = of_nonzero(bits)
        if places is None:
            return Encoded({"bits": bits})
        if not len(places):  # one is sent in any case: no bytes would mean something else
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
