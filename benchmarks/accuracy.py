"""What codecs cost in accuracy, and whether all modes train: LeNet on the digits.

`python -m benchmarks.accuracy` trains the job of examples/digits with each codec, `--seeds` times with
another order of the records each. It prints the mean test accuracy, its difference in points to that of the
row that it is compared with, and the bytes as a share of those without a codec and without local steps. An
accuracy is that of 360 images, so one of them is 0.28 points.

`python -m benchmarks.accuracy --modes --seeds 20 --workers 2` trains the job with every mode, outer rule and
codec in turn, and nothing else changed. It prints the accuracy of each run, the worst one first, and ends
with exit status 1 if one is below `LEAST`. 20 seeds take hours: with `--kept FILE` each run is a line of JSON
in that file, and a later call goes on from there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.figures import Figure, write
from benchmarks.recovery import ROOT
from elastic_ps.api.compression import CODECS
from elastic_ps.api.consistency import OUTER_RULES
from elastic_ps.api.fields import AUTO

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


def _modes() -> dict[str, Row]:
    found: dict[str, dict[str, Any]] = {
        "sync": {},
        "backupWorkers 1": {"backupWorkers": 1},
        "globalBatchSize 32": {"globalBatchSize": 32},
        "accumulate 2": {"mode": "accumulate", "gradients": 2},
        "bounded 4": {"mode": "bounded", "maxStaleness": 4},
        "async": {"mode": "async"},
        "async, inconsistent": {"mode": "async", "reads": "inconsistent"},
    }
    for outer, steps in itertools.product(OUTER_RULES, (20, 100)):
        found[f"{outer}, {steps} steps"] = {"mode": "local", "steps": steps, "outer": outer}
    rows = {name: Row({}, consistency=consistency) for name, consistency in found.items()}
    codecs = [*CODECS[1:], AUTO]
    values = ("changed", "bf16", "int8", "int4", "topk", "signsgd")
    rows |= {codec: Row({"codec": codec}) for codec in codecs}
    return rows | {f"values {codec}": Row({"values": codec}) for codec in values}


MODES: Mapping[str, Row] = _modes()
"""Every mode, outer rule and codec, with the defaults of all else."""

LEAST = 0.97
"""Each of them comes to this accuracy, whatever the order of the records. `sync` comes to 0.98 to 0.99."""

EPOCHS = 80
"""As in examples/digits/job.yaml."""


def run(row: Row, *, seed: int, epochs: int, workers: int = 2) -> dict[str, Any]:
    """Train once; the content of the job's `run.json`."""
    spec = {
        "entrypoint": "examples.digits.train:main",
        "arguments": {"epochs": epochs, "batch_size": 16, "lr": 0.05},
        "worker": {"replicas": workers},
        "data": {"shardRecords": 128, "shuffle": True, "seed": seed},
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


def _train_all(
    names: Sequence[str], kept: Path, figures: Path | None, *, seeds: int, epochs: int, workers: int
) -> bool:
    """Whether all modes train; see the module. All train with a seed before the next seed."""
    lines = kept.read_text().splitlines() if kept.exists() else []
    reached: dict[tuple[str, int, int, int], float] = {
        tuple(run): low for *run, low in map(json.loads, lines)
    }
    runs = [(name, workers, epochs, seed) for seed in range(seeds) for name in names]
    for each in runs:
        if each not in reached:
            name, *_, seed = each
            report = run(MODES[name], seed=seed, epochs=epochs, workers=workers)
            reached[each] = report["test_accuracy"]
            print(f"{name}, seed {seed}: {reached[each]:.1%}", flush=True)
            with kept.open("a") as file:
                file.write(json.dumps([*each, reached[each]]) + "\n")
    for name in names:
        print(f"{name:22}", *(f"{low:.1%}" for low in sorted(reached[run] for run in runs if run[0] == name)))
    least = {name: min(reached[run] for run in runs if run[0] == name) for name in names}
    of = f"{workers} workers, the least of {seeds} runs"
    write(
        figures,
        [
            Figure(f"{name}, {of}", 100 * low, 100 * LEAST, "%", "target", more=True)
            for name, low in least.items()
        ],
    )
    low = [name for name in names if least[name] < LEAST]
    print(f"below {LEAST:.0%}: {', '.join(low) or 'none'}")
    return not low


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help=f"40 if not given; with --modes {EPOCHS}")
    parser.add_argument(
        "--codec", action="append", choices=ROWS, help="only this row, and those it is compared with"
    )
    parser.add_argument("--modes", nargs="*", choices=MODES, help="see above; only these, if some are named")
    parser.add_argument("--workers", type=int, default=2, help="with --modes")
    parser.add_argument("--kept", type=Path, default=Path(os.devnull), help="with --modes: see above")
    parser.add_argument("--json", type=Path, help="with --modes: write the figures there, too")
    parsed = parser.parse_args()
    if parsed.modes is not None:
        sys.exit(
            not _train_all(
                parsed.modes or list(MODES),
                parsed.kept,
                parsed.json,
                seeds=parsed.seeds,
                epochs=parsed.epochs or EPOCHS,
                workers=parsed.workers,
            )
        )
    parsed.epochs = parsed.epochs or 40
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
