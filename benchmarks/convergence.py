"""How each mode learns: loss against samples and against time, with one slow worker.

`python -m benchmarks.convergence` trains LeNet on the handwritten digits in every mode of `consistency`, with
the same script, optimizer and number of epochs, in real processes on this machine. One worker takes
several times as long for each batch. It prints a table, and draws a picture with `--picture`.

With `--steps 100 --pause 0 --slowness 1 --modes sync local` it shows what local steps save in bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from elastic_ps.api.job import TrainingJob, parse_job

ROOT = Path(__file__).resolve().parents[1]
LIMIT = timedelta(minutes=10)
BATCH = 16


def train(epochs: int, lr: float, pause: float, slowness: float) -> None:
    """What a worker runs. Each batch takes `pause` seconds longer, of worker 0 `slowness` times as much."""
    import elastic_ps
    from elastic_ps.contrib.datasets import digits
    from elastic_ps.contrib.models import LeNet, accuracy

    torch.set_num_threads(1)
    training, test = digits()
    torch.manual_seed(1)
    model = LeNet(size=8)
    session = elastic_ps.connect()
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    optimizer = session.optimizer(sgd, model)
    for images, labels in session.loader(training, batch_size=BATCH, epochs=epochs):
        time.sleep(pause * (1 if session.worker else slowness))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        session.report(loss=loss)
        optimizer.step()
    if session.is_chief:
        session.report(test_accuracy=accuracy(model, *test.tensors))


def modes(workers: int, steps: int) -> Mapping[str, Mapping[str, Any]]:
    """The modes as they are to be set for this model. With few local steps momentum has to be smaller."""
    local = {"mode": "local", "steps": steps}
    return {
        "sync": {},
        "backupWorkers": {"backupWorkers": 1},
        "globalBatchSize": {"globalBatchSize": workers * BATCH, "balance": "speed"},
        "accumulate": {"mode": "accumulate", "gradients": workers + 1},
        "bounded": {"mode": "bounded", "maxStaleness": 8},
        "async": {"mode": "async", "stalenessScale": "inverse"},
        "local, diloco": {**local, "outer": "diloco", "outerMomentum": 0.9 if steps >= 100 else 0.6},
        "local, average": {**local, "outer": "average"},
        "local, easgd": {**local, "outer": "easgd"},
        "local, downpour": {**local, "outer": "downpour", "outerLearningRate": 1 / workers},
    }


@dataclass
class Run:
    """What was seen of a job.

    Attributes:
        points: seconds since the first version, samples in the model, loss.
        score: what the chief reported at the end.
    """

    points: list[tuple[float, int, float]] = field(default_factory=list)
    score: float = 0.0
    versions: int = 0
    samples: int = 0
    stale: int = 0
    pushed: int = 0
    pulled: int = 0

    @property
    def seconds(self) -> float:
        return self.points[-1][0] if self.points else 0.0

    @property
    def loss(self) -> float:
        """The mean over the last tenth of the samples."""
        last = [loss for _, samples, loss in self.points if samples > 0.9 * self.samples]
        return sum(last) / max(1, len(last))


def make_job(
    workers: int,
    consistency: Mapping[str, Any],
    arguments: Mapping[str, float],
    *,
    entrypoint: str = "benchmarks.convergence:train",
    **spec: Any,
) -> TrainingJob:
    """A job of `entrypoint`; `spec` are further parts of its spec."""
    spec = {
        "entrypoint": entrypoint,
        "arguments": dict(arguments),
        "worker": {"replicas": workers},
        "consistency": dict(consistency),
        **spec,
    }
    document = {"apiVersion": "elastic-ps.dev/v1alpha1", "kind": "TrainingJob"}
    return parse_job({**document, "metadata": {"name": "benchmark"}, "spec": spec}, source="benchmark")


def measure(job: TrainingJob, *, score: str = "test_accuracy", limit: timedelta = LIMIT) -> Run:
    """Run a job to its end. `score` names what its chief reports."""
    from elastic_ps.local import Launcher, Options
    from elastic_ps.local.poller import fetch_status

    run, began, address = Run(), 0.0, ""
    with tempfile.TemporaryDirectory() as name:
        options = Options(root=Path(name), trace=Path(name) / "trace.json")
        with Launcher(job, options) as launcher:
            launcher.start()
            deadline = time.monotonic() + limit.total_seconds()
            while not launcher.wait(timedelta(seconds=0.05)) and time.monotonic() < deadline:
                address = address or next(iter(launcher.status().http), "")
                status = fetch_status(address) if address else None
                if status is None or status.progress.loss is None:
                    continue
                now, progress = time.monotonic(), status.progress
                began = began or now
                if not run.points or progress.records_applied > run.points[-1][1]:
                    run.points.append((now - began, progress.records_applied, progress.loss or 0.0))
            outcome = launcher.outcome()
        if outcome.verdict.phase != "Succeeded" or outcome.status.server is None:
            raise RuntimeError(f"{outcome.verdict.phase}: {outcome.verdict.message}")
        progress = outcome.status.server.progress
        run.score, run.versions = progress.metrics[score], progress.version
        run.samples, run.stale = progress.records_applied, progress.staleness.max if progress.staleness else 0
        trace = json.loads((Path(name) / "trace.json").read_text())
        spans = trace["traceEvents"] if isinstance(trace, dict) else trace
        run.pushed, run.pulled = (
            sum(span["args"]["bytes"] for span in spans if span.get("name") == name)
            for name in ("push", "pull")
        )
    return run


def smooth(values: Sequence[float], width: int) -> list[float]:
    """The mean of each value and those before it, `width` at most."""
    return [
        sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i + 1 - width) : i + 1])
    ]


def draw(runs: Mapping[str, Run], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), dpi=130, layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    figure.suptitle(title, x=0.015, ha="left", fontsize=11)
    for number, (name, run) in enumerate(runs.items()):
        losses = smooth([loss for *_, loss in run.points], max(1, len(run.points) // 12))
        style = {
            "color": colormaps["tab10"](number),
            "linewidth": 1.7,
            "linestyle": "--" if name.startswith("local") else "-",
        }
        axes[0].plot([samples for _, samples, _ in run.points], losses, label=name, **style)
        axes[1].plot([seconds for seconds, *_ in run.points], losses, **style)
    axes[0].set_xlabel("samples in the model")
    axes[1].set_xlabel("seconds since the first version")
    axes[0].set_ylabel("training loss")
    for axis in axes:
        axis.set_yscale("log")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", linewidth=0.5, alpha=0.5)
    axes[0].legend(frameon=False, fontsize=8.5, loc="lower left")
    figure.savefig(path)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--steps", type=int, default=10, help="of mode local")
    parser.add_argument("--pause", type=float, default=0.01, help="seconds that each batch takes longer")
    parser.add_argument("--slowness", type=float, default=4.0, help="of one worker")
    parser.add_argument("--modes", nargs="*", default=[""], help="those that begin so; all by default")
    parser.add_argument("--picture", type=Path, default=None, help="a PNG file to be written")
    parsed = parser.parse_args()
    os.chdir(ROOT)
    arguments = {name: getattr(parsed, name) for name in ("epochs", "lr", "pause", "slowness")}
    runs: dict[str, Run] = {}
    print(f"{'mode':20} seconds  samples/s    loss  accuracy  versions  most stale  bytes pushed per sample")
    for name, consistency in modes(parsed.workers, parsed.steps).items():
        if not any(name.startswith(wanted) for wanted in parsed.modes):
            continue
        run = runs[name] = measure(make_job(parsed.workers, consistency, arguments))
        print(
            f"{name:20} {run.seconds:7.1f} {run.samples / max(run.seconds, 1e-9):10.0f} {run.loss:7.3f} "
            f"{run.score:9.4f} {run.versions:9} {run.stale:11} {run.pushed / run.samples:24.1f}",
            flush=True,
        )
    if parsed.picture is not None:
        slow = f"one of {parsed.workers} workers {parsed.slowness:g} times as slow"
        draw(runs, f"LeNet on the digits, {slow}, {parsed.steps} local steps", parsed.picture)


if __name__ == "__main__":
    main()
