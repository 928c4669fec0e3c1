"""Changes that a script makes itself become the job's next version with `session.assign`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic_ps
from elastic_ps.errors import UsageError
from elastic_ps.worker.session import Session
from tests.testing.harness import Job, Numbers, make_mlp, running_job
from tests.testing.oracle import (
    Loss,
    MakeOptimizer,
    assert_each_record_once,
    assert_equal_up_to_round_off,
    mse,
    ranges_of,
    replay,
)
from tests.testing.polling import LIMIT
from tests.testing.trained import Models, adam, alone, await_training, failing, sgd

SERVERS = [
    pytest.param({"bucketBytes": 1024}, id="one shard"),
    pytest.param({"replicas": 2, "bucketBytes": 1024}, id="two shards"),
    pytest.param({"replicas": 2, "durability": "standby"}, id="standby"),
]


class Normed(torch.nn.Module):
    """With buffers, which are assigned as well."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.body, self.norm, self.head = (
            make_mlp((6, 16), seed),
            torch.nn.BatchNorm1d(16),
            make_mlp((16, 1), seed),
        )

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.norm(self.body(x)))


def permuted() -> torch.nn.Module:
    """Parameters that have memory of their own."""
    model = make_mlp()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()
    return model


def assert_trained_and_assigned(
    job: Job, model: torch.nn.Module, data: Numbers, *, version: int, loss: Loss = mse
) -> None:
    """`version` is what `load_another` has done, and each record is in one of the other versions."""
    commits = job.commits()
    assert [c["version"] for c in commits if not ranges_of(c)] == [version]
    assert_each_record_once(commits, records=len(data), epochs=1)
    assert_equal_up_to_round_off(
        model,
        make_mlp(),
        lambda m: replay(commits, data, m, sgd, job.spec, loss=loss, assigned=load_another),
    )


def load_another(model: torch.nn.Module) -> None:
    other = make_mlp(seed=9) if isinstance(model, torch.nn.Sequential) else Normed(seed=9)
    model.load_state_dict(
        {name: value.to(model.state_dict()[name].dtype) for name, value in other.state_dict().items()}
    )


@pytest.mark.covering(2)
@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("make_model", [make_mlp, Normed, permuted])
@pytest.mark.parametrize("make", [sgd, adam])
def test_an_assigned_change_is_as_in_plain_torch(
    tmp_path: Path, make_model: Callable[[], torch.nn.Module], make: MakeOptimizer, server: dict[str, Any]
) -> None:
    """The optimizer's state stays; between the batches and before the first step, twice in a row."""

    batches: list[tuple[torch.Tensor, torch.Tensor]] = []
    states: list[dict[str, torch.Tensor]] = []
    assigned = {0: 1, 7: 2, 11: 1}

    def script(session: Session) -> None:
        model = make_model().double()
        optimizer = session.optimizer(make(model), model)
        for x, y in session.loader(Numbers(80), 4):
            for _ in range(assigned.get(len(batches), 0)):
                version = session.version
                load_another(model)
                session.assign(model)
                assert session.version == version + 1
            optimizer.zero_grad()
            mse(model, x.double(), y.double()).backward()
            optimizer.step()
            batches.append((x.double(), y.double()))
            states.append({name: value.clone() for name, value in model.state_dict().items()})
        assert session.version == 24

    commits = alone(tmp_path, script, checkpoints=tmp_path / "kept", parameterServer=server)
    assert_each_record_once(commits, records=80, epochs=1)
    plain = make_model().double()
    reference = make(plain)
    for step, (x, y) in enumerate(batches):
        if step in assigned:
            load_another(plain)
        reference.zero_grad()
        mse(plain, x, y).backward()
        reference.step()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(states[step][name], value)


def test_all_workers_may_assign_at_the_same_version(tmp_path: Path) -> None:
    """Their values count once. Worker 2 has joined meanwhile and does not call it; it loses no record."""
    data, models = Numbers(400), Models()

    def script(session: Session) -> None:
        model = models[session.worker] = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(data, 4):
            if session.version == 0:
                await_training(job, 0, 1)
            if session.version == 8 and session.worker == 0 and not job.sessions[2:]:
                job.start(2, script)
                await_training(job, 1, 2)
            if session.version == 10 and session.worker < 2:
                load_another(model)
                session.assign(model)
                assert session.version >= 11, (
                    "the others may train on before the worker that was later has joined again"
                )
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    with running_job(tmp_path, data={"shardRecords": 4}) as job:
        job.run(script, workers=2)
        commits = job.commits()
        outcomes = [(member.worker, member.state) for member in job.status().members]
    assert [c["worker"] for c in commits[9]["contributions"]] == [0, 1, 2]
    assert sorted(outcomes) == [(worker, "left") for worker in range(3)], "nobody was declared lost"
    assert_trained_and_assigned(job, models[2], data, version=11)


@pytest.mark.parametrize("asks", [True, False])
def test_one_worker_goes_back_to_other_values_in_each_epoch(tmp_path: Path, asks: bool) -> None:
    """At the end of the last epoch, too, before or after the end is known: the last checkpoint has them."""
    data, models = Numbers(120), Models()

    def script(session: Session) -> None:
        model = models[session.worker] = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        loader = session.loader(data, 4, epochs=3)
        for _ in loader.epochs():
            for x, y in loader:
                optimizer.zero_grad()
                mse(model, x, y).backward()
                optimizer.step()
            if session.is_chief if asks else session.worker == 0:
                load_another(model)
                session.assign(model)

    server = {"replicas": 2, "bucketBytes": 1024}
    with running_job(tmp_path, checkpoints=tmp_path / "kept", parameterServer=server) as job:
        for worker in range(2 if asks else 1):
            job.start(worker, script)
        job.join()
        commits = job.commits()
    assert sum(not ranges_of(commit) for commit in commits) == 3
    assert not ranges_of(commits[-1])
    assert_each_record_once(commits, records=120, epochs=3)
    kept, expected = make_mlp(seed=1), make_mlp()
    elastic_ps.load_checkpoint(tmp_path / "kept", kept)
    load_another(expected)
    for name, value in expected.state_dict().items():
        assert torch.equal(kept.state_dict()[name], value)


def test_the_first_assignment_counts_and_the_batch_in_hand_goes_to_others(tmp_path: Path) -> None:
    """Gradients of a batch that was lost by that are in no step, also when gradients are accumulated."""
    data, models = Numbers(64), Models()

    def other(session: Session) -> None:
        model = make_mlp()
        session.optimizer(sgd(model), model)
        load_another(model)
        session.assign(model)

    def script(session: Session) -> None:
        model = models[0] = make_mlp()
        optimizer = session.optimizer(sgd(model), model, overlap=False)
        held = 0
        for x, y in session.loader(data, 4):
            if session.version == 3 and not held:
                job.start(1, other).join(LIMIT)
                model.load_state_dict(make_mlp(seed=5).state_dict())
                session.assign(model)
                for ours, theirs in zip(model.parameters(), make_mlp(seed=9).parameters(), strict=True):
                    assert torch.equal(ours, theirs)
            summed(model, x, y).backward()
            held += 1
            if held == 2:
                optimizer.step()
                optimizer.zero_grad()
                held = 0
        if held:
            optimizer.step()

    with running_job(tmp_path) as job:
        job.start(0, script)
        job.join()
    assert_trained_and_assigned(job, models[0], data, version=4, loss=summed)


def test_what_others_have_trained_meanwhile_is_replaced_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, models, joined, go = Numbers(64), Models(), threading.Event(), threading.Event()
    late: list[threading.Thread] = []

    def other(session: Session) -> None:
        model = make_mlp()
        session.optimizer(sgd(model), model)
        joined.set()
        assert go.wait(LIMIT)
        load_another(model)
        session.assign(model)

    def script(session: Session) -> None:
        model = models[0] = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(data, 4):
            if session.version == 3:
                late.append(job.start(1, other))
                assert joined.wait(LIMIT)
            if session.version == 6:
                go.set()
                late[0].join(LIMIT)
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    with running_job(tmp_path) as job:
        job.start(0, script)
        job.join()
    assert "session.assign replaces version 6 with values made from version 3" in caplog.text
    assert_trained_and_assigned(job, models[0], data, version=7)


@pytest.mark.parametrize("server", SERVERS)
def test_values_are_assigned_once_more_to_a_parameter_server_that_was_lost(
    tmp_path: Path, server: dict[str, Any]
) -> None:
    """The worker joins again and gets the job's values, but has kept those that it assigns."""
    lost: list[int] = []

    def script(session: Session) -> None:
        model, expected = make_mlp(), make_mlp()
        load_another(expected)
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(Numbers(64), 4):
            if session.version == 5 and not lost:
                lost.append(5)
                load_another(model)
                job.restart(0)
                session.assign(model)
                for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
                    assert torch.equal(ours, theirs)
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    server = {**server, "checkpoint": {"everyVersions": 1}}
    with running_job(tmp_path, checkpoints=tmp_path / "kept", parameterServer=server) as job:
        job.start(0, script)
        job.join()
        commits = job.commits()
    assert lost
    made = {c["version"]: c for c in commits}  # the last ones: some versions were made twice
    assert sum(not ranges_of(commit) for commit in made.values()) == 1
    assert_each_record_once(made.values(), records=64, epochs=1)


def summed(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    """What several batches add up to is what the joined batch has."""
    return (model(x) - y).square().sum() / 32


def nothing(model: torch.nn.Module) -> None:
    """The script changes no value."""


def make_infinite(model: torch.nn.Module) -> None:
    next(iter(model.parameters())).data[0] = torch.inf


def change_frozen(model: torch.nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("4.bias").add_(1)


@pytest.mark.parametrize(
    ("change", "fields", "match"),
    [
        (nothing, {"consistency": {"deterministic": True}}, "session.assign needs consistency.mode sync"),
        (nothing, {"consistency": {"backupWorkers": 1}}, "session.assign needs consistency.mode sync"),
        (
            nothing,
            {"consistency": {"mode": "bounded", "maxStaleness": 1}},
            "session.assign needs consistency.mode sync",
        ),
        (make_infinite, {}, "0.weight has values that are NaN or infinite"),
        (change_frozen, {}, "no optimizer trains 4.bias"),
    ],
)
def test_what_cannot_be_assigned_is_refused(
    tmp_path: Path, change: Callable[[torch.nn.Module], None], fields: dict[str, Any], match: str
) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        model.get_parameter("4.bias").requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = session.optimizer(torch.optim.SGD(trained, lr=0.1), model)
        for x, y in session.loader(Numbers(40), 4):
            change(model)
            session.assign(model)
            mse(model, x, y).backward()
            optimizer.step()

    with pytest.raises(UsageError, match=match):
        alone(tmp_path, script, **fields)


@pytest.mark.parametrize("overlap", [True, False])
def test_nothing_is_assigned_in_the_middle_of_a_step(tmp_path: Path, overlap: bool) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model, overlap=overlap)
        for x, y in session.loader(Numbers(40), 4):
            mse(model, x, y).backward()
            session.assign(model)
            optimizer.step()

    failing(tmp_path, script, UsageError, "in the middle of a step")


def test_another_model_is_not_assigned(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        with pytest.raises(UsageError, match=r"needs the model that session\.optimizer"):
            session.assign(make_mlp())
        model = make_mlp()
        session.optimizer(sgd(model), model)
        session.assign(make_mlp())

    failing(tmp_path, script, UsageError, r"needs the model that session\.optimizer")
