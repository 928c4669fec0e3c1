"""Random numbers that are other ones on each worker, and the same when a step is computed again."""

from __future__ import annotations

import hashlib
import random
import sys

import torch


def seed_everything(base: int, *, worker: int, version: int, local: int = 0, process: int = 0) -> int:
    """Seed torch (all devices), `random`, and numpy if it is loaded; returns the seed.

    It follows from the numbers alone, so no two workers or versions have the same by design.

    Args:
        local: the steps that the worker has made by itself since that version.
        process: which one of the worker's processes draws them.
    """
    text = f"{base}/{worker}/{version}" + (f"/{local}" if local else "") + (f"/p{process}" if process else "")
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    return seed
