"""The results of an evaluator, as a file beside the checkpoints.

The job's parameter server writes it. The command line reads it, so this module does not import torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from elastic_ps.checkpoint import files
from elastic_ps.errors import CheckpointCorrupt, UserError

FILE = "evaluations.json"
LIMIT = 1 << 26
"""The largest size of the file, in bytes."""


def read(directory: Path) -> dict[str, Any] | None:
    """The content of the file; None if there is none.

    Raises:
        CheckpointCorrupt: it is damaged.
        StorageUnavailable: it cannot be read at the moment.
    """
    path = directory / FILE
    text = files.read_text_if_any(path, limit=LIMIT)
    if text is None:
        return None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointCorrupt(f"{path} cannot be read: it is not a JSON object")
    return data


def kept(directory: Path) -> frozenset[int]:
    """The best version, as an evaluator of an earlier job on this directory found it. Blocks for the disk.

    Raises:
        StorageUnavailable: it cannot be read at the moment.
    """
    try:
        return frozenset([best_version(directory)])
    except (CheckpointCorrupt, UserError):
        return frozenset()


def best_version(directory: Path) -> int:
    """The version that the evaluator found to be the best. Raises UserError if it found none."""
    best = (read(directory) or {}).get("best")
    if type(best) is not int:
        raise UserError(
            f"{directory} does not say which version is the best: the job had no spec.evaluator.best, or its "
            "evaluator has not reported that metric"
        )
    return best
