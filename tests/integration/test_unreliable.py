"""Messages that get lost, come late, come twice, or come again when nobody expects them any more."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias, get_args

import pytest

from elastic_ps.drill.history import Data, check
from elastic_ps.drill.recorded import read
from elastic_ps.errors import ConnectionLost, ElasticPSError
from elastic_ps.transport.base import Connection, Frame, Incoming
from elastic_ps.worker.optimizer import ElasticOptimizer
from elastic_ps.worker.session import Session
from elastic_ps.worker.wire.dialogue import WorkerLimits
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.oracle import assert_each_record_once, assert_equal_up_to_round_off, mse, replay
from tests.testing.trained import Models, sgd
from tests.testing.transports import whole_jobs

Fate: TypeAlias = Literal["lost", "answer lost", "late", "twice", "again later"]
FATES: tuple[Fate, ...] = get_args(Fate)


class Network:
    """Decides what becomes of messages, from a seed; counts it."""

    def __init__(self, seed: int, probability: float) -> None:
        self.happened: Counter[Fate] = Counter()
        self.later: list[threading.Timer] = []
        self._random, self._probability = random.Random(seed), probability
        self._pauses = random.Random(seed)  # else their order would change what happens
        self._lock = threading.Lock()

    def draw(self) -> Fate | None:
        with self._lock:
            if self._random.random() > self._probability:
                return None
            fate = self._random.choice(FATES)
            self.happened[fate] += 1
            return fate

    def pause(self) -> float:
        """Seconds, enough for other messages to overtake."""
        with self._lock:
            return self._pauses.uniform(0.001, 0.03)


class Unreliable(Connection):
    """A connection over such a network."""

    def __init__(self, inner: Connection, network: Network) -> None:
        self._inner, self._network = inner, network

    def call(self, method: str, frame: Frame, *, timeout: timedelta) -> Iterator[Incoming]:
        fate = self._network.draw()
        if fate == "lost":
            raise ConnectionLost("a test has lost a message")
        if fate == "late":
            time.sleep(self._network.pause())
        copy = Frame(frame.header, memoryview(bytes(frame.body)))
        if fate == "answer lost":
            self._send(method, copy, timeout)
            raise ConnectionLost("a test has lost an answer")
        if fate == "twice":
            self._send(method, copy, timeout)
        if fate == "again later":
            timer = threading.Timer(self._network.pause(), self._send, (method, copy, timeout))
            self._network.later.append(timer)
            timer.start()
        return self._inner.call(method, frame, timeout=timeout)

    def _send(self, method: str, frame: Frame, timeout: timedelta) -> None:
        """Whatever the answer is, nobody hears it. Of several the first is waited for."""
        with contextlib.suppress(ElasticPSError):
            for _ in self._inner.call(method, frame, timeout=timeout):
                return

    def close(self) -> None:
        self._inner.close()


@pytest.mark.covering(1)
@whole_jobs
@pytest.mark.parametrize(
    ("shards", "bucket_bytes", "probability"), [(1, 1024, 0.1), (2, 1024, 0.1), (1, 1 << 20, 0.3)]
)
@pytest.mark.parametrize("seed", [1, 2])
def test_everything_is_applied_once(
    tmp_path: Path, seed: int, shards: int, bucket_bytes: int, probability: float, transport: str
) -> None:
    """With large buckets, a step is a single call."""
    data, models, network = Numbers(240), Models(), Network(seed, probability)

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        models[session.worker] = model
        for x, y in session.loader(data, 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    server = {"replicas": shards, "bucketBytes": bucket_bytes}
    with running_job(tmp_path, transport=transport, parameterServer=server) as job:
        reliable = job.open_connections
        job.open_connections = lambda: [Unreliable(inner, network) for inner in reliable()]
        job.run(script, workers=3)
        for timer in network.later:
            timer.join()
        commits, spec = job.commits(), job.spec
    assert set(network.happened) == set(FATES), network.happened
    assert_each_record_once(commits, records=len(data), epochs=1)
    assert check(read(tmp_path / "history"), Data(len(data), 1)) == []
    assert_equal_up_to_round_off(models[0], make_mlp(), lambda m: replay(commits, data, m, sgd, spec))


class Interrupted(Connection):
    """Its first call for the optimizer's state loses the answers after the first one."""

    def __init__(self, inner: Connection) -> None:
        self._inner, self.interrupted = inner, False

    def call(self, method: str, frame: Frame, *, timeout: timedelta) -> Iterator[Incoming]:
        answers = self._inner.call(method, frame, timeout=timeout)
        if method != "OptimizerState" or self.interrupted:
            return answers
        self.interrupted = True
        return self._cut_off(answers)

    def close(self) -> None:
        self._inner.close()

    def _cut_off(self, answers: Iterator[Incoming]) -> Iterator[Incoming]:
        yield next(answers)
        raise ConnectionLost("a test has cut the connection")


def two_steps(session: Session) -> ElasticOptimizer:
    """Train a small model; returns its optimizer."""
    model = make_mlp()
    optimizer = session.optimizer(sgd(model), model)
    for x, y in session.loader(Numbers(20), 10):
        optimizer.zero_grad()
        mse(model, x, y).backward()
        optimizer.step()
    return optimizer


def test_the_optimizers_state_is_asked_for_again(tmp_path: Path) -> None:
    kept = dict[str, Any]()

    def script(session: Session) -> None:
        optimizer = two_steps(session)
        kept.update(optimizer.state_dict()["state"])
        assert len(kept) == len(list(make_mlp().parameters()))

    with running_job(tmp_path) as job:
        ways = [Interrupted(inner) for inner in job.open_connections()]
        job.open_connections = lambda: [*ways]
        job.run(script, workers=1)
    assert [way.interrupted for way in ways] == [True]
    assert all("momentum_buffer" in entries for entries in kept.values())


def test_a_bucket_that_never_arrives_whole_ends_a_worker_after_its_patience(tmp_path: Path) -> None:
    """Each answer begins, so it would else ask for the bucket for ever."""

    class Cut(Connection):
        """Every pulled body breaks off."""

        def __init__(self, inner: Connection) -> None:
            self._inner = inner

        def call(self, method: str, frame: Frame, *, timeout: timedelta) -> Iterator[Incoming]:
            answers = self._inner.call(method, frame, timeout=timeout)
            return map(self._cut, answers) if method == "Pull" else answers

        def _cut(self, answer: Any) -> Any:
            def read_into(_: memoryview) -> None:
                raise ConnectionLost("a test has cut a body")

            return SimpleNamespace(
                header=answer.header, size=answer.size, view=lambda: None, read_into=read_into
            )

        def close(self) -> None:
            self._inner.close()

    with running_job(tmp_path, parameterServer={"bucketBytes": 1024}) as job:
        job.worker_limits = WorkerLimits(patience=timedelta(seconds=1))
        job.through = lambda _, inner: Cut(inner)
        with pytest.raises(ConnectionLost, match=r"has not answered for .* s: a test has cut a body"):
            job.run(two_steps, workers=1)
