"""A sweep: train the digits once with each learning rate, each time as a job, and print a table.

python examples/sweep/sweep.py, or with rates of your own: python examples/sweep/sweep.py 0.003 0.3 --epochs 5
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

JOB = Path(__file__).parents[1] / "digits" / "job.yaml"


def train(lr: float, epochs: int, report: Path) -> dict[str, Any]:
    """Run the job with this learning rate; returns what its report says."""
    fields = {"metadata.name": "sweep", "arguments.lr": lr, "arguments.epochs": epochs}
    settings = [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "elastic_ps.cli", "run", str(JOB), *settings, "--report", str(report)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    run: dict[str, Any] = json.loads((report / "run.json").read_text())
    return run


def main() -> None:
    """The command; the reports are in runs/sweep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rates", nargs="*", type=float, default=[0.005, 0.05, 0.5])
    parser.add_argument("--epochs", type=int, default=10)
    given = parser.parse_args()
    print(f"{'lr':>8} {'loss':>8} {'accuracy':>9} {'seconds':>8}")
    for lr in given.rates:
        run = train(lr, given.epochs, Path("runs", "sweep", str(lr)))
        loss, accuracy = run["loss"][-1][1], run["test_accuracy"]
        print(f"{lr:>8g} {loss:>8.4f} {accuracy:>9.1%} {run['duration_seconds']:>8.1f}", flush=True)


if __name__ == "__main__":
    main()
