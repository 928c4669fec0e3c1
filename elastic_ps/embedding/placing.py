"""Chooses the shard of a row, by rendezvous hashing (Thaler and Ravishankar 1998).

Each shard has a hash of the id, and the highest one wins. So rows are spread whatever the ids are, and with
another number of shards only those rows move that a new shard wins, or that a shard which is gone had.
"""

from __future__ import annotations

import numpy as np

from elastic_ps.embedding.init import Ids, mixed

_SALT = 0xD1B54A32D192ED03


def shard_of(ids: Ids, shards: int) -> Ids:
    """The shard of each id, from 0."""
    hashes = mixed(ids.view(np.uint64) ^ np.uint64(_SALT))
    best, found = np.zeros(len(ids), dtype=np.uint64), np.zeros(len(ids), dtype=np.int64)
    for shard in range(shards if shards > 1 else 0):
        own = mixed(hashes + mixed(np.array([shard + 1], dtype=np.uint64)))
        wins = own > best
        best[wins], found[wins] = own[wins], shard
    return found
