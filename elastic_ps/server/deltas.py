"""What a version has changed in a bucket, encoded: workers change the values that they have by it.

A shard knows what all workers have, and encodes how its own values differ from that. So what a delta has lost
is in the next one's difference: error feedback, on the way down (Tang et al. 2019, "DoubleSqueeze";
Richtárik et al. 2021, "EF21"). Nothing of it depends on who pulls, or when: the same sums give the same
deltas, also on a standby, and when a round is made again from a checkpoint.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from elastic_ps.codec.base import Codec, Packed, few, pack
from elastic_ps.codec.changes import FewChanges, difference, follow
from elastic_ps.codec.finite import is_finite


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
        random = torch.Generator()
        digest = hashlib.blake2b(f"{bucket}/{version}".encode(), digest_size=8).digest()
        random.manual_seed(int.from_bytes(digest, "little"))
        encoded = codec.encode(change, {"version": version}, random)
        packed = pack(encoded)
        if packed.nbytes < exact.nbytes:
            body = memoryview(b"".join(packed.body))
            if codec.bits:  # nothing is lost, so that need not be decoded
                held.copy_(exact)
            elif (sent := few(codec, encoded, change.numel())) is not None:
                FewChanges(codec, sent).make(held)
            else:
                codec.decode(encoded, change)
                follow(codec, held, change, held)
            return Delta(since, version, packed._replace(body=[body]))
    held.copy_(exact)
    return None
