"""The result of a drill as plain data, for programs."""

from __future__ import annotations

from typing import Any

from elastic_ps.drill.runner import Drill


def build_report(drill: Drill, *, seed: int, command: str) -> dict[str, Any]:
    """The content of `drill.json`. Times are in seconds."""
    result = drill.result
    return {
        "job": result.job,
        "passed": drill.passed,
        "phase": result.phase,
        "reason": result.reason,
        "message": result.message,
        "seed": seed,
        "command": command,
        "duration": result.elapsed.total_seconds(),
        "records": drill.records,
        "commits": drill.commits,
        "faults": [
            {
                "fault": each.fault.kind,
                "worker": each.fault.worker,
                "atPercent": each.fault.at,
                "at": each.at,
                "version": each.version,
                "state": each.state,
                "detail": each.detail,
                "secondsToRecover": each.seconds,
                "versionsRedone": each.redone,
                "recordsLost": each.lost,
                "recordsTwice": each.twice,
            }
            for each in drill.injections
        ],
        "violations": [{"kind": v.kind, "text": v.text, "records": v.records} for v in drill.violations],
    }
