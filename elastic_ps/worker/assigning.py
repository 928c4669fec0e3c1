"""Values that a script has changed become the job's next version: see `Session.assign`."""

from __future__ import annotations

import logging

from elastic_ps.errors import RefusalCode, Refused, UsageError
from elastic_ps.worker.client import expelled
from elastic_ps.worker.engine import Engine
from elastic_ps.worker.model import Flat
from elastic_ps.worker.strategy import Strategy

logger = logging.getLogger(__name__)


def assign(engine: Engine, flat: Flat) -> None:
    """Make the values that the script has changed the job's next version. Blocks.

    If another worker's were assigned meanwhile, this worker gets those.

    Raises:
        UsageError: the values cannot be assigned, or not here.
        Refused, ConnectionLost: the parameter server did not take them.
    """
    exchange = engine.exchange
    assert exchange is not None, "the model has been given to session.optimizer"
    _require_allowed(engine, exchange)
    flat.take_values()
    base = exchange.version
    while True:
        try:
            takes_part = _assign_since(engine, exchange, base)
            break
        except Refused as refusal:
            if not expelled(refusal):
                raise
            engine.come_back(refusal)
            base = min(base, exchange.version)
    if exchange.version != base + 1:
        engine.take_settings()
    if engine.records.computing and not takes_part:
        engine.drop_step()


def _require_allowed(engine: Engine, exchange: Strategy) -> None:
    """Raises UsageError."""
    if exchange.cannot_assign:
        raise UsageError(exchange.cannot_assign)
    if exchange.under_way is not None or engine.batches.computed:
        raise UsageError(
            "session.assign was called in the middle of a step. Call it between optimizer.step() and the "
            "next backward()"
        )
    if not engine.spec.consistency.may_assign:
        raise UsageError(
            "session.assign needs consistency.mode sync, without backupWorkers, globalBatchSize, "
            "maxStalenessP99 and deterministic: elsewhere a version is made of the steps of some workers, at "
            "a time that they do not choose"
        )


def _assign_since(engine: Engine, exchange: Strategy, base: int) -> bool:
    """Assign what the contributions hold, until some values were assigned since `base`, and pull them.

    Returns whether this worker takes part in the open round.
    """
    while not (reply := engine.client.assign(base)).done:
        if reply.version > base and not engine.abandoned:
            logger.warning(
                "session.assign replaces version %d. This script has changed the values of version %d, "
                "so the model loses the steps in between",
                reply.version,
                base,
            )
        engine.abandoned = True  # until it is done
        try:
            exchange.assign(engine.new_step(reply.version), reply.attempt)
        except Refused as refusal:
            if refusal.code not in (RefusalCode.STALE_ATTEMPT, RefusalCode.LATE):
                raise
    engine.step_over()
    exchange.fetch(reply.version, contributor=reply.takes_part)
    return reply.takes_part
