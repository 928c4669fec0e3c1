"""A model whose gradients are one bucket on one shard: a step is one call of the training thread."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.codec.base import Payload
from elastic_ps.core.partition import Bucket
from elastic_ps.transport.base import Connection, Frame, Incoming
from elastic_ps.worker.session import Session
from elastic_ps.worker.wire.dialogue import Answers, Step
from tests.testing.harness import Numbers, events, make_mlp, running_job
from tests.testing.inside import push_pull_of, runtime_of
from tests.testing.oracle import assert_each_record_once, assert_equal_up_to_round_off, mse, replay
from tests.testing.polling import eventually
from tests.testing.trained import Models, sgd, together


class Counting(Connection):
    """Counts calls."""

    def __init__(self, inner: Connection, counter: Counter[str]) -> None:
        self._inner, self._counter = inner, counter

    def call(self, method: str, frame: Frame, *, timeout: timedelta) -> Iterator[Incoming]:
        self._counter[method] += 1
        return self._inner.call(method, frame, timeout=timeout)

    def close(self) -> None:
        self._inner.close()


def with_buffers() -> torch.nn.Module:
    torch.manual_seed(0)
    linear = torch.nn.Linear
    return torch.nn.Sequential(linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), linear(16, 1))


@pytest.mark.parametrize(("make", "pushes"), [(make_mlp, 1), (with_buffers, 3)])
def test_a_step_is_one_call(tmp_path: Path, make: Any, pushes: int) -> None:
    """And one more for each bucket of buffers: they are pushed before."""
    calls: Counter[str] = Counter()
    before: list[Counter[str]] = []

    def script(session: Session) -> None:
        model = make()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(Numbers(80), 8):
            before.append(calls.copy())
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    with running_job(tmp_path) as job:
        open_connections = job.open_connections
        job.open_connections = lambda: [Counting(inner, calls) for inner in open_connections()]
        job.start(0, script)
        job.join()
    made = before[-1] - before[0]
    assert made["Push"] == 9 * pushes
    assert set(made) <= {"Push", "Take", "Heartbeat"}


class Halt(Exception):
    """A worker's end."""


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_step_is_pushed_again_if_another_worker_vanishes(tmp_path: Path, deterministic: bool) -> None:
    """One worker waits for the answer to its push; the other has pushed, and dies before its step ends."""
    data, models = Numbers(160), Models()
    begun, pushed = threading.Event(), threading.Event()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        if session.worker == 1 and not pushed.is_set():
            eventually(begun.is_set, "the other one asks for records")
            vanish(session)
        else:
            models[session.worker] = model
            begun.set()
        for x, y in together(job, session.loader(data, 4), 2):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    def vanish(session: Session) -> None:
        client = runtime_of(session).client
        usual = client.push_and_pull

        def half(bucket: Bucket, step: Step, attempt: int, payload: Payload, *rest: Any) -> Answers:
            if not of_the_other():
                time.sleep(0.1)  # the other one takes part in rounds from the next one on that begins
                return usual(bucket, step, attempt, payload, *rest)
            client.push(bucket, step, attempt, payload, None)
            eventually(lambda: step.version in of_the_other(), "the other one has pushed")
            pushed.set()
            raise Halt

        client.push_and_pull = half  # type: ignore[method-assign,assignment]

    def of_the_other() -> list[int]:
        """The versions that it has pushed for."""
        return [e["version"] for e in events(job.history, "worker-0") if e["event"] == "push"]

    def halting(session: Session) -> None:
        with suppress(Halt):
            script(session)

    consistency = {"mode": "sync", "deterministic": deterministic}
    with running_job(tmp_path, consistency=consistency, worker={"replicas": 2}) as job:
        job.start(0, script)
        job.start(1, halting)
        job.until(pushed.is_set, "worker 1 vanishes")
        if deterministic:
            job.start(1, script)  # its records are for nobody else
        job.join()
        commits = job.commits()
        attempts = [e["attempt"] for e in events(job.history, "worker-0") if e["event"] == "push"]
    assert max(attempts) == 1
    assert_each_record_once(commits, records=len(data), epochs=1)
    assert_equal_up_to_round_off(models[0], make_mlp(), lambda m: replay(commits, data, m, sgd, job.spec))


@pytest.mark.parametrize(("applied", "shards"), [(False, 1), (True, 2)])
@pytest.mark.parametrize(
    "consistency",
    [{"mode": "sync"}, {"mode": "sync", "backupWorkers": 1}, {"mode": "bounded", "maxStaleness": 2}],
    ids=["sync", "backup", "bounded"],
)
def test_a_script_may_go_on_after_an_interrupt(
    tmp_path: Path, consistency: dict[str, Any], applied: bool, shards: int
) -> None:
    """Ctrl-C while a step waits, in a notebook. The next one is another step, wherever that one is."""
    data, interrupted = Numbers(120), threading.Event()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        interrupt_once(session)
        for x, y in session.loader(data, 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            with suppress(KeyboardInterrupt):
                optimizer.step()

    def interrupt_once(session: Session) -> None:
        strategy = push_pull_of(session)
        at_once = not (applied or shards > 1)
        name = "_receive" if at_once else "_wait"
        usual = getattr(strategy, name)

        def wait(*given: Any) -> None:
            step = strategy.under_way
            now = step is not None and step.base > 2 and not interrupted.is_set()
            if now:
                interrupted.set()
            if applied or not now:
                usual(*given)
            if now:
                raise KeyboardInterrupt

        setattr(strategy, name, wait)

    with running_job(
        tmp_path, consistency=consistency, worker={"replicas": 2}, parameterServer={"replicas": shards}
    ) as job:
        job.run(script, workers=2)
        assert interrupted.is_set()
        assert_each_record_once(job.commits(), records=len(data), epochs=1)
        for worker in range(2):
            pushes = [e for e in events(job.history, f"worker-{worker}") if e["event"] == "push"]
            bases = {(e["incarnation"], e["step"], e["base"]) for e in pushes}
            assert len(bases) == len({(incarnation, step) for incarnation, step, _ in bases})
            first = [e for e in pushes if e["attempt"] == 0 and e["bucket"] == pushes[0]["bucket"]]
            assert len(first) == len({(e["incarnation"], e["step"]) for e in first})
