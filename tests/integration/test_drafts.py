"""Drafts of the next version, in whole jobs: what is trained does not depend on them."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Frame
from elastic_ps.worker.model.values import VOID_STEPS
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.oracle import assert_each_record_once, assert_equal_up_to_round_off, mse, replay
from tests.testing.polling import LIMIT, eventually
from tests.testing.trained import Models, alone, await_training, sgd
from tests.testing.watched import Watched

FIELDS: dict[str, Any] = {"parameterServer": {"replicas": 2, "bucketBytes": 1024}}


def drafted(traces: Path) -> set[int]:
    """The versions of which a shard has made drafts. A last line that is being written is left out."""
    written = [file.read_text().rpartition("\n")[0] for file in traces.glob("ps-*.jsonl")]
    lines = [line for text in written for line in text.splitlines()]
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
            if session.version < versions:  # a busy server may come to it too late, and makes none then
                eventually(lambda: session.version + 1 in drafted(traces), "a draft is made")
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


def test_a_job_without_drafts_makes_none(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = make_mlp((6, 40, 40, 1))
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(Numbers(16), 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    traces = tmp_path / "traces"
    server = FIELDS["parameterServer"] | {"drafts": False}
    with running_job(tmp_path, traces=traces, parameterServer=server) as job:
        job.start(0, script)
        job.join()
        assert job.version == 4
    assert drafted(traces) == set()


def test_a_step_that_is_skipped_leaves_no_call_that_changes_the_model(tmp_path: Path) -> None:
    """Each shard was asked for the next version when it began, and a shard other than 0 is not told."""

    def script(session: Session) -> None:
        model = make_mlp((6, 40, 40, 1))
        optimizer = session.optimizer(sgd(model), model)
        for number, (x, y) in enumerate(session.loader(Numbers(200), 4)):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if session.worker == 1 and number % 3 == 2:
                time.sleep(0.05)
                optimizer.skip()
            else:
                optimizer.step()

    with running_job(tmp_path, **FIELDS) as job:
        job.run(script, workers=2)
        assert job.version >= 20


def test_an_answer_that_comes_when_its_step_is_over_is_not_one_of_the_next_step(tmp_path: Path) -> None:
    """Worker 1 leaves in the middle of a step, so the other one pushes again. A push is answered late."""
    data = Numbers(80)
    held, late = threading.Event(), threading.Event()
    holding: list[int] = []
    edges: list[int] = []
    answered: list[tuple[int, int]] = []  # of worker 0: step and attempt of each push

    def slow(method: str, frame: Frame) -> None:
        if method != "Push":
            return
        push = pb.PushRequest.FromString(frame.header)
        step = push.step
        if push.version >= 3 and not holding and push.bucket == edges[0]:
            holding.append(step)
            held.set()
            eventually(lambda: (step, 1) in answered, "the step is pushed again")
            assert late.wait(LIMIT)
        elif holding and step == holding[0] + 1 and push.bucket == edges[1]:
            eventually(lambda: answered.count((step, 0)) == edges[2] - 1, "the others are answered")
            late.set()
            time.sleep(0.2)  # the late answer is dealt with
        answered.append((step, push.attempt))

    def script(session: Session) -> None:
        model = make_mlp((6, 40, 40, 1))
        optimizer = session.optimizer(sgd(model), model)
        built = job.coordinator.job.state.model
        assert built is not None
        pushed = built.layout.pushed
        edges[:] = [pushed[0].index, pushed[-1].index, len(pushed)]
        for number, (x, y) in enumerate(session.loader(data, 4)):
            if not number:
                await_training(job, 0, 1)
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if session.worker == 1 and session.version >= 3:
                assert held.wait(LIMIT)
                return
            optimizer.step()

    with running_job(tmp_path, **FIELDS) as job:
        job.through = lambda worker, inner: inner if worker else Watched(inner, after=slow)
        job.run(script, workers=2)
        assert_each_record_once(job.commits(), records=len(data), epochs=1)
    assert holding


def test_a_shard_may_have_nothing_to_send(tmp_path: Path) -> None:
    """Of a model that has fewer tensors than there are shards."""

    def script(session: Session) -> None:
        model = make_mlp((6, 1))
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(Numbers(16), 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    assert len(alone(tmp_path, script, parameterServer={"replicas": 4})) == 4
