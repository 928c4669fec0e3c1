"""What codecs cost in accuracy: LeNet on the digits with two workers.

`python -m benchmarks.accuracy` trains the job of examples/digits with each codec, `--seeds` times with
another order of the records each. It prints the mean test accuracy, its difference to that without a codec in
points, and the share of the bytes. An accuracy is that of 360 images, so one of them is 0.28 points.
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
from typing import Any

from benchmarks.recovery import ROOT

ROWS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "int8": {"codec": "int8"},
    "int8, values bf16": {"codec": "int8", "values": "bf16"},
    "int8, values int8": {"codec": "int8", "values": "int8"},
    "topk 1 %": {"codec": "topk"},
    "topk 1 %, values int8": {"codec": "topk", "values": "int8"},
    "auto": {"codec": "auto"},
    "signsgd": {"codec": "signsgd"},
    "powersgd, rank 4": {"codec": "powersgd"},
}


def run(compression: Mapping[str, Any], *, seed: int, epochs: int) -> dict[str, Any]:
    """Train once; the content of the job's `run.json`."""
    spec = {
        "entrypoint": "examples.digits.train:main",
        "arguments": {"epochs": epochs},
        "worker": {"replicas": 2},
        "data": {"seed": seed},
        "compression": compression,
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
    parser.add_argument("--codec", action="append", choices=ROWS, help="only this row, and none")
    parsed = parser.parse_args()
    plain = None
    for name, compression in ROWS.items():
        if parsed.codec and name not in ("none", *parsed.codec):
            continue
        reports = [run(compression, seed=seed, epochs=parsed.epochs) for seed in range(parsed.seeds)]
        accuracy = 100 * statistics.mean(report["test_accuracy"] for report in reports)
        traffic = reports[0]["traffic"]
        up = traffic["pushed_bytes"] / traffic["pushed_plain_bytes"]
        down = traffic["pulled_bytes"] / traffic["pulled_plain_bytes"]
        plain = accuracy if plain is None else plain
        print(f"{name:20} {accuracy:6.2f} % {accuracy - plain:+5.2f}  bytes: {up:6.1%} up, {down:6.1%} down")


if __name__ == "__main__":
    main()
