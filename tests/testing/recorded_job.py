"""A job whose processes record what they do, and which outlives all that a test does to it.

Its workers train at a steady pace, also on a fast machine. A worker that has made a quarter of all steps
crawls, so that three of them do not finish the job. When the test has done everything, it lets them hurry.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from elastic_ps.drill import recorded
from elastic_ps.drill.history import Histories
from tests.testing.operator_process import Jobs

SCRIPT = """
import pathlib, time, torch, elastic_ps

HURRY = pathlib.Path("/histories/hurry")

def main(records, epochs):
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(records, 4), torch.randn(records, 1))
    model = torch.nn.Linear(4, 1)
    session = elastic_ps.connect()
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    steady = records * epochs // 4 // 4
    for step, (x, y) in enumerate(session.loader(data, batch_size=4, epochs=epochs)):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        if not HURRY.exists():
            time.sleep(0.04 if step < steady else 1)
        optimizer.step()
"""
CONFIG = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "script"},
    "data": {"slow.py": SCRIPT},
}


def template(container: str) -> dict[str, Any]:
    """The script is there, and every process writes its history to a folder of its pod's own on the claim."""
    uid = {"name": "POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}
    main = {
        "name": container,
        "env": [
            uid,
            {"name": "ELASTIC_PS_HISTORY", "value": "/histories/$(POD_UID)"},
            {"name": "PYTHONPATH", "value": "/app:/script"},
        ],
        "volumeMounts": [
            {"name": "histories", "mountPath": "/histories"},
            {"name": "script", "mountPath": "/script"},
        ],
    }
    volumes = [
        {"name": "histories", "persistentVolumeClaim": {"claimName": "histories"}},
        {"name": "script", "configMap": {"name": "script"}},
    ]
    return {"spec": {"containers": [main], "volumes": volumes}}


def hurry(jobs: Jobs) -> None:
    """From now on the workers train as fast as they can."""
    (_claim(jobs) / "hurry").touch()


def histories(jobs: Jobs, into: Path) -> Histories:
    """What all processes of all pods have recorded, gathered from the machine's side of the claim."""
    for path in _claim(jobs).glob("*/*.jsonl"):
        shutil.copy(path, into / f"{path.stem}-{path.parent.name}.jsonl")
    return recorded.read(into)


def _claim(jobs: Jobs) -> Path:
    """The machine's side of the claim."""
    volume = jobs.cluster.get("-n", jobs.namespace, "pvc", "histories")["spec"]["volumeName"]
    return Path(jobs.cluster.get("pv", volume)["spec"]["hostPath"]["path"])
