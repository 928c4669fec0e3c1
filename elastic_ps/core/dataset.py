"""Compares a worker's data set with the job's, and explains differences."""

from __future__ import annotations

from elastic_ps.api.consistency import Consistency
from elastic_ps.core import fingerprint
from elastic_ps.core.fixed_schedule import FixedSchedule
from elastic_ps.core.ledger import Ledger


def other(ledger: Ledger | FixedSchedule, records: int, epochs: int, *, resumed: bool) -> str:
    """Why a worker's records and epochs differ from the job's; "" if they do not.

    Args:
        resumed: the job continues from a checkpoint. It may train more epochs than before.
    """
    if (ledger.records, ledger.epochs) == (records, epochs):
        return ""
    advice = ". All workers must call session.loader(...) with the same data set and epochs"
    if resumed and records != ledger.records:
        advice = (
            ". A job that continues from a checkpoint must have as many records as before, because the "
            f"checkpoint names the trained ones by their positions. Give it the {ledger.records} "
            "records, or begin a new job"
        )
    elif resumed:
        advice = ". A job that continues from a checkpoint may train more epochs, not fewer"
    return (
        f"this worker's data set has {records} records for {epochs} epochs; the job trains "
        f"{ledger.records} records for {ledger.epochs} epochs{advice}"
    )


def too_small(ledger: Ledger | FixedSchedule, batch: int, consistency: Consistency, *, begins: bool) -> str:
    """Why no version can have as many steps or records as the job wants; "" if one can.

    Args:
        batch: the number of records in a batch.
        begins: the job has made no version yet.
    """
    records, epochs = ledger.records, ledger.epochs
    if (consistency.global_batch_size or 0) > records:
        return (
            f"consistency.globalBatchSize is {consistency.global_batch_size}, but the data set has "
            f"only {records} records, and a version has records of one epoch. Set globalBatchSize to "
            f"{records} or less"
        )
    steps = -(-records // batch) * epochs
    if (consistency.gradients or 0) <= steps or not begins:
        return ""
    return (
        f"consistency.gradients is {consistency.gradients}, but the job has only {steps} steps: "
        f"{records} records for {epochs} epochs, in batches of {batch}. So no version could be made of "
        f"so many. Set gradients to {steps} or less; a version should be made of far fewer"
    )


def other_records(ours: str, given: str, *, resumed: bool) -> str:
    """Why a worker's records differ from the job's, by their fingerprints; "" if they may be the same.

    Args:
        ours, given: see `core.fingerprint`; "" for nothing.
    """
    try:
        names = fingerprint.differing(ours, given)
    except ValueError as error:
        return str(error)
    if not names:
        return ""
    whose = "those of the checkpoint that the job continues from" if resumed else "the job's"
    return f"this worker's records are not {whose}: {fingerprint.other_records(names)}"
