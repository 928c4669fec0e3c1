"""The weight of a step in the mean that makes a version.

By default a step weighs as many as it has records. If the loss is a mean over tokens, the step has to weigh
as many as it has tokens. The mean of the gradients g with the weights w is sum(w * g) / sum(w), which is then
the gradient that one process computes on all of the records.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_ps.errors import UsageError

HEAVIEST = 2.0**64
"""The largest weight, and 1 divided by the smallest. Float32 holds their products with usual gradients."""


def is_weight(weight: float) -> bool:
    """Whether a step may weigh that. False for NaN."""
    return 1 / HEAVIEST <= weight <= HEAVIEST


def shares_of(
    weights: Sequence[float | None], records: Sequence[float]
) -> tuple[float | None, Sequence[float]]:
    """The weight of a worker's processes together, and the share of each in the worker's gradient.

    Args:
        weights: what the script said in each process; None: nothing. Some may be 0.
        records: its share of the records. A process without any has no share, and no weight.

    Raises:
        UsageError: it said something in some of the processes only, or 0 in all of them.
    """
    there = [weight for weight, share in zip(weights, records, strict=True) if share]
    said = [weight for weight in there if weight is not None]
    if not said:
        return None, records
    if len(said) < len(there):
        raise UsageError(
            "session.weigh was called in only some of this worker's processes. Call it in each process that "
            "has records of the batch, with the weight of the process's own part: 0 if that has no tokens"
        )
    total = sum(said)
    if not total:
        raise UsageError(
            "session.weigh got 0 in each process of this worker. At least one has to weigh more. If a batch "
            "has nothing to train on, call optimizer.skip() in all of them"
        )
    return total, [
        (weight or 0.0) / total if share else 0.0 for weight, share in zip(weights, records, strict=True)
    ]
