"""Reading the histories that the processes of a job have written (`telemetry.History`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elastic_ps.api.compression import Compression
from elastic_ps.api.consistency import Consistency
from elastic_ps.core.ledger import Range
from elastic_ps.drill.history import (
    Acknowledged,
    Coding,
    Committed,
    Histories,
    Joined,
    Restored,
    Sent,
    Started,
    StepId,
    Values,
)


def read(directory: Path) -> Histories:
    """All histories in `directory`, of every process that ever wrote there."""
    histories = Histories()
    events = sorted(_events(directory), key=lambda event: float(event["time"]))
    for event in events:
        _add(histories, event)
    recorded = {(committed.term, committed.version) for committed in histories.committed}
    for event in events:
        # A parameter server may die between applying a round and recording it; its successor knows.
        if event["event"] == "restore" and (known := event.get("round")):
            committed = _committed(float(event["time"]), known)
            histories.skipped.extend(_skipped(known))
            if (committed.term, committed.version) not in recorded:
                histories.committed.append(committed)
                recorded.add((committed.term, committed.version))
    return histories


def _events(directory: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(directory.glob("*.jsonl")):
        role, process = path.name.partition("-")[0], path.name.rpartition("-")[0]
        with path.open(errors="replace") as lines:
            for line in lines:
                try:
                    yield {"role": role, "process": process, **json.loads(line)}
                except ValueError:
                    continue  # cut off: the process was killed while writing


def _add(histories: Histories, event: dict[str, Any]) -> None:
    time = float(event["time"])
    match event["role"], event["event"]:
        case _, "values":
            histories.values += [
                Values(time, event["process"], event["term"], version, bucket, found)
                for bucket, version, found in event["values"]
            ]
        case _, "coding":
            compression = Compression.model_validate(event["compression"])
            histories.codings.append(Coding(time, event["process"], event["term"], compression))
        case "ps", "start":
            histories.started.append(Started(time, event["term"], _consistency(event)))
        case "ps", "restore":
            histories.restored.append(Restored(time, event["term"], event["version"], _consistency(event)))
        case "ps", "join":
            histories.joined.append(Joined(time, event["worker"], event["incarnation"]))
        case "ps", "skip":
            histories.skipped.extend(_ranges(event["records"]))
        case "ps", "commit":
            histories.skipped.extend(_skipped(event))
            histories.committed.append(_committed(time, event))
        case "worker", "push":
            bucket, version, attempt = event["bucket"], event["version"], event["attempt"]
            stale = version - event["base"]
            histories.sent.append(Sent(time, _step(event), bucket, version, attempt, stale))
        case "worker", "applied":
            records = _ranges(event["records"])
            histories.acknowledged.append(
                Acknowledged(time, _step(event), event["term"], event["version"], records)
            )


def _consistency(event: dict[str, Any]) -> Consistency | None:
    said = event.get("consistency")
    return None if said is None else Consistency.model_validate(said)


def _committed(time: float, event: dict[str, Any]) -> Committed:
    steps = {_step(c): _ranges(c["records"]) for c in event["contributions"]}
    return Committed(time, event["term"], event["version"], steps, event["decided"])


def _skipped(event: dict[str, Any]) -> Iterator[Range]:
    for contribution in event["contributions"]:
        yield from _ranges(contribution.get("skipped", []))


def _step(event: dict[str, Any]) -> StepId:
    return StepId(event["worker"], event["incarnation"], event["step"])


def _ranges(values: list[list[int]]) -> tuple[Range, ...]:
    return tuple(Range(*value) for value in values)
