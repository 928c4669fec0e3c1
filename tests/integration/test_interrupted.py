"""A script that is interrupted where it waits, as by Ctrl-C in a notebook, and goes on.

A signal comes at no certain place, so some tests let the call that is under way there raise what it would.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.server.limits import ServerLimits
from elastic_ps.standalone import connect
from elastic_ps.transport.base import Connection, Frame, Incoming
from elastic_ps.worker.model.flat import Flat
from elastic_ps.worker.optimizer import ElasticOptimizer
from elastic_ps.worker.runtime.membership import Membership
from elastic_ps.worker.runtime.runtime import Runtime
from elastic_ps.worker.session import Session
from elastic_ps.worker.strategies.strategy import Future
from tests.testing import machine
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.oracle import assert_each_record_once, mse
from tests.testing.polling import eventually
from tests.testing.trained import alone, sgd
from tests.testing.watched import Watched


def test_while_it_asks_again_for_records(tmp_path: Path) -> None:
    """The other worker has the last ones, so the first call is answered that there are none yet."""
    data, interrupted = Numbers(15), threading.Event()

    def interrupt(pending: set[bytes], method: str, frame: Frame) -> None:
        if method == "Take" and frame.header in pending and not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def note(pending: set[bytes], method: str, frame: Frame) -> None:
        if method == "Take" and job.version == 1:
            pending.add(frame.header)  # it is asked again so if it was answered that there are none

    def through(worker: int, inner: Connection) -> Connection:
        pending: set[bytes] = set()
        return Watched(inner, partial(interrupt, pending), after=partial(note, pending))

    def both_have_records() -> bool:
        rounds = job.coordinator.job.state.rounds
        return len(rounds.expected | rounds.waiting) == 2

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        loader = session.loader(data, 5)

        def train() -> None:
            for x, y in loader:
                if not session.version:
                    eventually(both_have_records, "both have records")
                if session.version == 1:
                    eventually(interrupted.is_set, "the other worker is interrupted")
                optimizer.zero_grad()
                mse(model, x, y).backward()
                optimizer.step()

        try:
            train()
        except KeyboardInterrupt:
            train()
        assert session.version == 2

    limits = ServerLimits(answer=timedelta(milliseconds=200))
    with running_job(tmp_path, data={"shardRecords": 5}, limits=limits) as job:
        job.through = through
        job.run(script, workers=2)
        assert_each_record_once(job.commits(), records=15, epochs=1)
    assert interrupted.is_set()


def test_while_it_asks_for_its_first_records(tmp_path: Path) -> None:
    """The call goes on at the parameter server. Nobody waits for the worker after that."""
    data, asked = Numbers(120), list[threading.Thread]()

    class Interrupted(Watched):
        def call(self, method: str, frame: Frame, *, timeout: timedelta) -> Iterator[Incoming]:
            answers = super().call(method, frame, timeout=timeout)
            if method != "Take" or asked:
                return answers
            asked.append(threading.Thread(target=lambda: list(answers)))
            asked[0].start()
            asked[0].join(10)  # whatever comes of it, the script does not get it
            raise KeyboardInterrupt

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        if session.worker == 0:
            job.until(lambda: bool(asked) and not asked[0].is_alive(), "worker 1 is interrupted")
        with suppress(KeyboardInterrupt):
            for x, y in session.loader(data, 4):
                optimizer.zero_grad()
                mse(model, x, y).backward()
                optimizer.step()
        job.until(lambda: job.status().progress.finished, "worker 0 trains all records")

    with running_job(tmp_path, data={"shardRecords": 4}) as job:
        job.through = lambda worker, inner: Interrupted(inner) if worker == 1 else inner
        job.run(script, workers=2)
        assert_each_record_once(job.commits(), records=120, epochs=1)


def test_while_values_are_given_to_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tensors have those of another version then. The next step is computed on one version."""
    data = Numbers(60)
    calls = itertools.count(1)

    def trained(directory: Path) -> torch.nn.Module:
        models: list[torch.nn.Module] = []

        def script(session: Session) -> None:
            model = make_mlp()
            layer = model[2]
            assert isinstance(layer, torch.nn.Linear)
            # Its elements are not one after the other, so it has memory of its own.
            layer.weight = torch.nn.Parameter(layer.weight.detach().t().contiguous().t())
            optimizer = session.optimizer(sgd(model), model)
            for x, y in session.loader(data, 5):
                optimizer.zero_grad()
                mse(model, x, y).backward()
                with suppress(KeyboardInterrupt):
                    optimizer.step()
            models.append(model)

        assert_each_record_once(alone(directory, script), records=60, epochs=1)
        return models[0]

    expected = trained(tmp_path / "usual")
    machine.fails(monkeypatch, Flat, "publish", KeyboardInterrupt(), lambda: next(calls) == 5)
    found = trained(tmp_path / "interrupted")
    for ours, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("soon", [True, False])
def test_while_an_exchange_under_way_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soon: bool
) -> None:
    """In mode `local`. None or some tensors have moved by then: the steps since it departed are void."""
    data, flats, landed, interrupted = Numbers(60), list[Flat](), list[Flat](), list[Flat]()
    finish, value, armed = Future.finish, Flat.value, False

    def arm(self: Future) -> bool:
        there = finish(self)
        landed.clear()
        if armed and soon and not interrupted:
            interrupted.append(flats[-1])
            raise KeyboardInterrupt
        return there

    def interrupt(self: Flat, index: int) -> torch.Tensor:
        flats.append(self)
        landed.append(self)
        if armed and not soon and len(landed) == 2 and not interrupted:
            interrupted.append(self)
            raise KeyboardInterrupt
        return value(self, index)

    def script(session: Session) -> None:
        nonlocal armed
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(data, 5):
            armed = session.version == 2
            optimizer.zero_grad()
            mse(model, x, y).backward()
            try:
                optimizer.step()
            except KeyboardInterrupt:
                (flat,) = interrupted
                assert all(torch.equal(each, value(flat, i)) for i, each in enumerate(flat.tensors))

    # Before tensors move, and in the middle of that; see the top of this file.
    monkeypatch.setattr(Future, "finish", arm)
    monkeypatch.setattr(Flat, "value", interrupt)
    commits = alone(tmp_path, script, consistency={"mode": "local", "steps": 2, "overlap": 1})
    assert interrupted
    assert_each_record_once(commits, records=60, epochs=1)


@pytest.mark.parametrize("by_epochs", [False, True])
@pytest.mark.parametrize("consistency", [{}, {"mode": "local", "steps": 2}], ids=["sync", "local"])
def test_between_backward_and_step(tmp_path: Path, consistency: dict[str, Any], by_epochs: bool) -> None:
    """The loop is run again. The batch that was computed on comes once more."""
    data = Numbers(20)

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        loader = session.loader(data, 5, epochs=2)

        def train(interrupted: bool) -> None:
            for _ in loader.epochs() if by_epochs else [0]:
                for number, (x, y) in enumerate(loader):
                    optimizer.zero_grad()
                    mse(model, x, y).backward()
                    if interrupted and number == 2:
                        raise KeyboardInterrupt
                    optimizer.step()

        with suppress(KeyboardInterrupt):
            train(True)
        train(False)

    commits = alone(tmp_path, script, consistency=consistency)
    assert_each_record_once(commits, records=20, epochs=2)


def test_cells_that_connect_are_run_a_second_time() -> None:
    """The model goes on from the values that it has, with all epochs once more."""
    data, model, versions = Numbers(20), make_mlp(), list[int]()
    for _ in range(2):
        session = connect()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(data, 5, epochs=2):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if versions or session.version < 3:  # the first time the last cell is interrupted
                optimizer.step()
            else:
                break
        versions.append(session.version)
    session.close()
    assert versions == [3, 8]


@pytest.mark.parametrize("where", [(Membership, "_initialise"), (ElasticOptimizer, "__init__")], ids=str)
def test_an_interrupt_while_a_worker_joins_leaves_it_able_to_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[type, str]
) -> None:
    """The parameter server knows the worker, but the script has got no optimizer: it asks for one again."""
    calls = itertools.count(1)
    machine.fails(monkeypatch, *where, KeyboardInterrupt(), lambda: next(calls) == 1)

    def script(session: Session) -> None:
        model = make_mlp()
        with suppress(KeyboardInterrupt):
            session.optimizer(sgd(model), model)
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(Numbers(20), 5):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    assert_each_record_once(alone(tmp_path, script), records=20, epochs=1)
    assert next(calls) == 3, "it was called twice"


@pytest.mark.parametrize("more", [{"outer": "average"}, {"overlap": 1}, {"outer": "easgd"}], ids=str)
@pytest.mark.parametrize("where", ["begin", "ready"])
def test_while_an_exchange_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, more: dict[str, Any]
) -> None:
    """In mode `local`. Nobody knows how much of it is sent: it is void, with the steps that it is about."""
    data, interrupted = Numbers(60), list[Runtime]()
    usual = getattr(Runtime, where)

    def interrupt(self: Runtime, *arguments: Any, **options: Any) -> Any:
        done = usual(self, *arguments, **options)
        if self.version == 2 and not interrupted:
            interrupted.append(self)
            raise KeyboardInterrupt
        return done

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(data, 5):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            try:
                optimizer.step()
            except KeyboardInterrupt:
                assert (steps := interrupted[0].local) is not None
                assert steps.made == 0
                assert all(torch.equal(*each) for each in values.pop())

    publish, values = Flat.publish, list[list[tuple[torch.Tensor, torch.Tensor]]]()

    def note(self: Flat, **given: Any) -> None:
        publish(self, **given)
        values[:] = [[(each, self.value(index)) for index, each in enumerate(self.tensors)]]

    # Notes the model of each whole exchange, and interrupts the next one; see the top of this file.
    monkeypatch.setattr(Flat, "publish", note)
    monkeypatch.setattr(Runtime, where, interrupt)
    commits = alone(tmp_path, script, consistency={"mode": "local", "steps": 2, **more})
    assert interrupted
    assert_each_record_once(commits, records=60, epochs=1)
