"""What the two sides have recorded of a job must be the same story."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.testing.harness import events
from tests.testing.oracle import assert_each_record_once

Key = tuple[int, int, int]
"""(worker, incarnation, step)"""


def worker_steps(directory: Path) -> tuple[dict[Key, dict[str, Any]], dict[Key, set[tuple[int, int]]]]:
    """By (worker, incarnation, step): the 'applied' event, and the (bucket, version) of each push."""
    applied: dict[Key, dict[str, Any]] = {}
    pushed: dict[Key, set[tuple[int, int]]] = defaultdict(set)
    for file in sorted(directory.glob("worker-*.jsonl")):
        worker, incarnation = int(file.name.split("-")[1]), 0
        for line in file.read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "join":
                incarnation = event["incarnation"]
            elif event["event"] == "applied":
                key = (worker, incarnation, event["step"])
                assert key not in applied, f"step {key} was applied twice"
                applied[key] = event
            elif event["event"] == "push":
                pushed[worker, incarnation, event["step"]].add((event["bucket"], event["version"]))
    return applied, pushed


def check_histories(directory: Path, *, records: int, epochs: int) -> list[dict[str, Any]]:
    """Each record once; the commits and the workers' own accounts agree. Returns the commits."""
    commits = [e for e in events(directory, "ps-0") if e["event"] == "commit"]
    assert [c["version"] for c in commits] == list(range(1, len(commits) + 1))
    assert_each_record_once(commits, records=records, epochs=epochs)
    applied, pushed = worker_steps(directory)
    buckets = {bucket for pushes in pushed.values() for bucket, _ in pushes}
    last = {key[:2]: max(k[2] for k in pushed if k[:2] == key[:2]) for key in pushed}
    seen: set[Key] = set()
    for commit in commits:
        for c in commit["contributions"]:
            key = (c["worker"], c["incarnation"], c["step"])
            assert key not in seen, f"step {key} is in the model twice"
            seen.add(key)
            assert pushed[key] >= {(b, commit["version"] - 1) for b in buckets}, f"{key} pushed all of it"
            if key in applied:
                assert applied[key]["version"] == commit["version"]
                assert applied[key]["records"] == c["records"]
            else:
                assert c["step"] == last[key[:2]], f"{key} went on without knowing that it was applied"
    assert applied.keys() <= seen, f"not in the model: {sorted(applied.keys() - seen)}"
    return commits
