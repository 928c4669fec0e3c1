"""What codecs cost in accuracy: LeNet on the digits with two workers.

`python -m benchmarks.accuracy` trains the job of examples/digits with each codec, `--seeds` times with
another order of the records each. It prints the mean test accuracy, its difference in points to that of the
row that it is compared with, and the bytes as a share of those without a codec and without local steps. An
accuracy is that of 360 images, so one of them is 0.28 points.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.recovery import ROOT

STEPS = 100
"""Of a worker between two exchanges, in the rows with local steps."""


class Row(NamedTuple):
    """A training. `against` is the row that it is compared with."""

    compression: Mapping[str, Any]
    against: str = "none"
    consistency: Mapping[str, Any] = {}


DILOCO = {
    "mode": "local",
    "steps": STEPS,
    "outer": "diloco",
    "outerMomentum": 0.6,
}  # 0.9 is for more exchanges
EACH = {"mode": "local", "steps": 1, "outer": "average"}

ROWS: Mapping[str, Row] = {
    "none": Row({}),
    "int8": Row({"codec": "int8"}),
    "int8, values bf16": Row({"codec": "int8", "values": "bf16"}),
    "int8, values int8": Row({"codec": "int8", "values": "int8"}),
    "topk 1 %": Row({"codec": "topk"}),
    "topk 1 %, values int8": Row({"codec": "topk", "values": "int8"}),
    "topk 1 %, steps: 1": Row({"codec": "topk"}, consistency=EACH),
    "auto": Row({"codec": "auto"}),
    "signsgd": Row({"codec": "signsgd"}),
    "powersgd, rank 4": Row({"codec": "powersgd"}),
    "diloco": Row({}, consistency=DILOCO),
    "diloco, int4": Row({"codec": "int4"}, "diloco", DILOCO),
}
"""A row comes after the one that it is compared with."""


def run(row: Row, *, seed: int, epochs: int) -> dict[str, Any]:
    """Train once; the content of the job's `run.json`."""
    spec = {
        "entrypoint": "examples.digits.train:main",
        "arguments": {"epochs": epochs},
        "worker": {"replicas": 2},
        "data": {"seed": seed},
        "compression": dict(row.compression),
        "consistency": dict(row.consistency),
    }
    job = {
        "apiVersion": "elastic-ps.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": f"accuracy-{os.getpid()}-{seed}"},
        "spec": spec,
    }
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "job.json"
        file.write_text(json.dumps(job))
        command = [sys.executable, "-m", "elastic_ps.cli", "run", str(file), "--report", name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        report: dict[str, Any] = json.loads((Path(name) / "run.json").read_text())
        return report


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument(
        "--codec", action="append", choices=ROWS, help="only this row, and those it is compared with"
    )
    parsed = parser.parse_args()
    wanted = set(parsed.codec or ROWS)
    wanted |= {ROWS[name].against for name in wanted} | {"none"}
    reached: dict[str, float] = {}
    plain: dict[str, float] = {}
    for name, row in ROWS.items():
        if name not in wanted:
            continue
        reports = [run(row, seed=seed, epochs=parsed.epochs) for seed in range(parsed.seeds)]
        accuracy = 100 * statistics.mean(report["test_accuracy"] for report in reports)
        traffic = reports[0]["traffic"]
        plain = plain or traffic
        up, down = (traffic[key] / plain[key] for key in ("pushed_bytes", "pulled_bytes"))
        reached[name] = accuracy
        print(
            f"{name:22} {accuracy:6.2f} % {accuracy - reached[row.against]:+5.2f} to {row.against:7}  "
            f"bytes: {up:7.2%} up, {down:7.2%} down",
            flush=True,
        )


if __name__ == "__main__":
    main()
