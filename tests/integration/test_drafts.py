"""Drafts of the next version, in whole jobs: what is trained does not depend on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.worker.ahead import VOID_STEPS
from elastic_ps.worker.session import Session
from tests.integration.harness import Numbers, make_mlp, running_job
from tests.integration.oracle import assert_equal_up_to_round_off, mse, replay
from tests.integration.trained import Models, sgd

FIELDS: dict[str, Any] = {"parameterServer": {"replicas": 2, "bucketBytes": 1024}}


def drafted(traces: Path) -> set[int]:
    """The versions of which a shard has made drafts."""
    lines = [line for file in traces.glob("ps-*.jsonl") for line in file.read_text().splitlines()]
    return {e["args"]["version"] for e in map(json.loads, lines) if e["name"] == "draft"}


def rate(version: int) -> float:
    return 0.05 / (1 + version)


@pytest.mark.parametrize(("late", "versions"), [(True, VOID_STEPS), (False, 20)])
def test_the_rate_that_is_set_last_counts(tmp_path: Path, late: bool, versions: int) -> None:
    """Drafts are made with the rate at the first gradient. A script that sets it later soon gets none."""
    data, models = Numbers(80), Models()

    def script(session: Session) -> None:
        model = make_mlp((6, 40, 40, 1))
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(data, 4):
            optimizer.zero_grad()
            if not late:
                optimizer.param_groups[0]["lr"] = rate(session.version)
            mse(model, x, y).backward()
            if late:
                optimizer.param_groups[0]["lr"] = rate(session.version)
            optimizer.step()
        models[0] = model

    traces = tmp_path / "traces"
    with running_job(tmp_path, traces=traces, **FIELDS) as job:
        job.start(0, script)
        job.join()
        commits, spec = job.commits(), job.spec

    def set_rate(version: int, _: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = rate(version)

    def in_one_process(model: torch.nn.Module) -> None:
        replay(commits, data, model, sgd, spec, before=set_rate)

    assert drafted(traces) == set(range(1, versions + 1))
    assert_equal_up_to_round_off(models[0], make_mlp((6, 40, 40, 1)), in_one_process)


def test_send_ahead_false_makes_no_drafts(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = make_mlp((6, 40, 40, 1))
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(Numbers(16), 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    traces = tmp_path / "traces"
    server = FIELDS["parameterServer"] | {"sendAhead": False}
    with running_job(tmp_path, traces=traces, parameterServer=server) as job:
        job.start(0, script)
        job.join()
        assert job.version == 4
    assert drafted(traces) == set()
