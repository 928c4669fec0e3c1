"""Saving the rounds that are on no disk, when a shard has lost them: from the other shards and the standbys.

The version that is saved becomes a checkpoint like any other, and the job continues from it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from elastic_ps.errors import CheckpointError, ElasticPSError, Fenced, Refused, TransportError
from elastic_ps.server.follower import for_standby
from elastic_ps.server.keeper import Keeper
from elastic_ps.server.orders import Advance, ShardControl
from elastic_ps.server.remote import RemoteShard

logger = logging.getLogger(__name__)

ANSWER = timedelta(seconds=5)
"""How long a parameter server that starts asks for its standby."""


def held(standby: RemoteShard, term: int) -> list[Advance]:
    """The orders that shard 0's standby can carry out, oldest first; none if it does not answer. Blocks.

    Raises:
        Fenced: another parameter server has begun a newer term.
    """
    deadline = time.monotonic() + ANSWER.total_seconds()
    while True:
        try:
            return standby.held(term)
        except Refused as refusal:
            raise Fenced(str(refusal)) from refusal
        except TransportError as error:
            if time.monotonic() > deadline:
                logger.warning("the standby does not answer: %s", error)
                return []
            time.sleep(0.1)


def rescue(
    keeper: Keeper,
    shards: Sequence[ShardControl],
    standbys: Sequence[RemoteShard],
    orders: Sequence[Advance],
) -> bool:
    """Make a checkpoint of the newest of `orders` that the shards, or their standbys, can all carry out.

    Args:
        orders: of one shard 0, oldest first, each with the state of its version.

    Returns:
        Whether there is a newer checkpoint now. If not, the job continues from the one before.
    """
    for order in reversed(orders):
        if keeper.durable_version is not None and order.version <= keeper.durable_version:
            return False
        try:
            _save(keeper, shards, standbys, order)
        except (TransportError, Refused, CheckpointError) as error:
            logger.warning("version %d cannot be saved from the standbys: %s", order.version, error)
        else:
            logger.info("version %d was saved from the standbys", order.version)
            return True
    return False


def _save(
    keeper: Keeper, shards: Sequence[ShardControl], standbys: Sequence[RemoteShard], order: Advance
) -> None:
    """Raises TransportError, Refused, CheckpointError."""
    number = keeper.number()
    write = replace(order, checkpoint=number, term=keeper.term, expected={}, prepare=False, rescue=True)
    writers = [_order(*pair, write) for pair in zip(shards, standbys, strict=True)]
    keeper.begin(order.version, time.monotonic(), json.loads(order.state), number=number)
    probe = Advance(order.version, 0, {}, term=keeper.term, rescue=True)

    def ask() -> None:
        for index, writer in enumerate(writers):
            keeper.part(index, writer.advance(probe).written)

    keeper.await_whole(ask)
    if keeper.durable_version != order.version:
        raise CheckpointError(keeper.failure)


def _order(shard: ShardControl, standby: RemoteShard, order: Advance) -> ShardControl:
    """Have a shard carry `order` out, or its standby if the shard has lost the model. Returns who has."""
    try:
        shard.advance(order)
    except ElasticPSError as error:
        logger.info("the shard cannot carry out the order, so its standby is asked: %s", error)
        standby.advance(for_standby(order))
        return standby
    return shard
