"""What a script changes itself is part of the job, or its own, or refused; never lost without a word."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.checkpoint.plain import load_checkpoint
from elastic_ps.errors import InvalidModel, ModelMismatch, UsageError
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.inside import runtime_of
from tests.testing.oracle import mse
from tests.testing.polling import LIMIT
from tests.testing.trained import Models, alone, failing, sgd, training

Change = Callable[[torch.nn.Module], None]


def clamp(model: torch.nn.Module) -> None:
    """As WGAN does: torch's counters do not see it."""
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def load(model: torch.nn.Module) -> None:
    model.load_state_dict(make_mlp(seed=9).state_dict())


def swap_and_restore(model: torch.nn.Module) -> None:
    """As one evaluates an average."""
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    load(model)
    model.load_state_dict(saved)


def move(model: torch.nn.Module) -> None:
    """As `flatten_parameters` of an RNN on a GPU does."""
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.clone()


def replace(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = torch.ones_like(parameter)


def channels_last() -> torch.nn.Module:
    """Parameters that have memory of their own."""
    model = make_mlp()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()
    return model


def train(session: Session, change: Change, *, at: int, make: Callable[[], torch.nn.Module]) -> None:
    model = make()
    optimizer = session.optimizer(sgd(model), model)
    for x, y in session.loader(Numbers(40), 4):
        if session.version == at:
            change(model)
        optimizer.zero_grad()
        mse(model, x, y).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("make", "change", "at"),
    [
        (make_mlp, clamp, 0),
        (make_mlp, clamp, 6),
        (make_mlp, load, 0),
        (make_mlp, load, 6),
        (channels_last, clamp, 0),
        (channels_last, load, 6),
    ],
)
def test_values_changed_between_steps_are_refused(
    tmp_path: Path, make: Callable[[], torch.nn.Module], change: Change, at: int
) -> None:
    match = (
        r"the script has changed .* since .* in mode sync, call session.assign\(model\). "
        r"Load values before session.optimizer"
    )
    failing(tmp_path, lambda s: train(s, change, at=at, make=make), UsageError, match)


@pytest.mark.parametrize(
    "spec",
    [
        {"strategy": "all-reduce"},
        {"consistency": {"mode": "local", "steps": 4}},
        {"consistency": {"mode": "local", "steps": 4, "outer": "easgd"}},
    ],
    ids=["all-reduce", "diloco", "easgd"],
)
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (load, "the script has changed .* since session.optimizer.* Load values before session.optimizer"),
        (torch.nn.Module.half, r"the memory of .* was replaced .*\.half.* before that call"),
    ],
)
def test_values_changed_too_late_are_refused_where_workers_make_the_steps(
    tmp_path: Path, spec: dict[str, Any], change: Change, match: str
) -> None:
    """The job's values would replace them, or be mixed with them."""

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        change(model)
        for x, y in session.loader(Numbers(40), 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    failing(tmp_path, script, UsageError, match, **spec)


@pytest.mark.parametrize(
    ("make", "change"),
    [(make_mlp, swap_and_restore), (channels_last, swap_and_restore), (channels_last, move)],
)
def test_values_that_are_put_back_or_moved_are_not_changed(
    tmp_path: Path, make: Callable[[], torch.nn.Module], change: Change
) -> None:
    with running_job(tmp_path) as job:
        job.start(0, lambda s: train(s, change, at=3, make=make))
        job.join()
        assert len(job.commits()) == 10


@pytest.mark.parametrize("make", [make_mlp, channels_last])
def test_memory_that_is_replaced_is_refused(tmp_path: Path, make: Callable[[], torch.nn.Module]) -> None:
    match = "the memory of .* was replaced"
    failing(tmp_path, lambda s: train(s, replace, at=3, make=make), UsageError, match)


class Student(torch.nn.Module):
    """A model with an average of itself, as BYOL, MoCo and mean teachers have."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.teacher = make_mlp(), make_mlp().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.online(x) + 0.1 * self.teacher(x)

    def follow(self) -> None:
        for mine, other in zip(self.teacher.parameters(), self.online.parameters(), strict=True):
            mine.data.mul_(0.75).add_(other.data, alpha=0.25)


@pytest.mark.parametrize("given", [True, False], ids=["in the optimizer", "outside"])
def test_a_teacher_that_nobody_knows_of_is_refused(tmp_path: Path, given: bool) -> None:
    def script(session: Session) -> None:
        model = Student()
        trained = model if given else model.online
        optimizer = session.optimizer(sgd(trained), model)
        for x, y in session.loader(Numbers(40), 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            model.follow()
            optimizer.step()

    failing(tmp_path, script, UsageError, r"averaged=\[")


def follow(session: Session, models: Models, at: Callable[[int], None]) -> None:
    model = models[session.worker] = Student()
    optimizer = session.optimizer(sgd(model.online), model, averaged=["teacher"])
    for x, y in session.loader(Numbers(80), 4):
        at(session.version)
        optimizer.zero_grad()
        mse(model, x, y).backward()
        model.follow()
        optimizer.step()


@pytest.mark.parametrize("restarted", [False, True])
def test_an_averaged_teacher_is_the_jobs(tmp_path: Path, restarted: bool) -> None:
    """A worker that joins later has the teacher of those that train; so has one after a lost server."""
    models, seen = Models(), dict[tuple[int, int], torch.Tensor]()

    def join_in() -> None:
        job.start(1, script)
        job.until(lambda: training(job, 1), "worker 1 waits for the next round")

    once = {5: join_in}
    if restarted:
        once[7] = lambda: job.restart(0)

    def script(session: Session) -> None:
        def at(version: int) -> None:
            if session.worker == 0:
                once.pop(version, int)()
            student = models[session.worker]
            assert isinstance(student, Student)
            values = torch.cat([p.detach().reshape(-1) for p in student.online.parameters()])
            seen[runtime_of(session).client.term, version] = values

        follow(session, models, at)

    with running_job(
        tmp_path, checkpoints=tmp_path / "kept", parameterServer={"checkpoint": {"everyVersions": 1}}
    ) as job:
        job.start(0, script)
        job.join()
        commits = job.commits()
    assert any(len(c["contributions"]) == 2 for c in commits)
    terms = {c["version"]: c["term"] for c in commits}  # the last ones: some versions were made twice
    expected = seen[1, 0]
    for version, term in sorted(terms.items()):
        expected = 0.75 * expected + 0.25 * seen[term, version - 1]
    for model in models.values():
        assert isinstance(model, Student)
        teacher = torch.cat([p.detach().reshape(-1) for p in model.teacher.parameters()])
        torch.testing.assert_close(teacher, expected)


def test_a_checkpoint_loads_into_an_optimizer_that_has_the_teacher(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = Student()
        optimizer = session.optimizer(sgd(model), model, averaged=["teacher"])
        for x, y in session.loader(Numbers(8), 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            model.follow()
            optimizer.step()

    alone(tmp_path, script, checkpoints=tmp_path / "kept")
    model = Student()
    optimizer = sgd(model)
    assert load_checkpoint(tmp_path / "kept", model, optimizer) == 2
    assert {*optimizer.state} == {*model.online.parameters()}
    trained = sgd(model.requires_grad_())
    with pytest.raises(ModelMismatch, match="is in parameter group 0, but not in the checkpoint's"):
        load_checkpoint(tmp_path / "kept", model, trained)


def test_what_is_a_workers_own_is_left_alone(tmp_path: Path) -> None:
    """A queue of each worker's own, at a join and while versions are made."""
    models = Models()

    class Queue(torch.nn.Module):
        def __init__(self, worker: int) -> None:
            super().__init__()
            self.body = make_mlp()
            self.queue = torch.nn.Module()
            self.queue.register_buffer("items", torch.full((3,), float(worker)))

        def forward(self, x: torch.Tensor) -> Any:
            return self.body(x)

    def script(session: Session) -> None:
        model = models[session.worker] = Queue(session.worker)
        optimizer = session.optimizer(sgd(model), model, own=["queue"])
        for x, y in session.loader(Numbers(80), 4):
            if session.worker == 0 and session.version == 5:
                job.start(1, script)
                job.until(lambda: training(job, 1), "worker 1 waits for the next round")
            optimizer.zero_grad()
            mse(model, x, y).backward()
            items = model.queue.items
            assert isinstance(items, torch.Tensor)
            items.add_(10)
            optimizer.step()

    with running_job(tmp_path) as job:
        job.start(0, script)
        job.join()
        commits = job.commits()
    for worker, model in models.items():
        items = model.get_buffer("queue.items")
        steps = sum(c["worker"] == worker for commit in commits for c in commit["contributions"])
        assert items.tolist() == [worker + 10 * steps] * 3


class Moco(torch.nn.Module):
    """A queue of keys and the position of the oldest, which cannot be averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_mlp()
        self.register_buffer("queue", torch.full((8,), -1, dtype=torch.int64))
        self.register_buffer("position", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x)

    def enqueue(self, key: int) -> None:
        queue, position = self.get_buffer("queue"), self.get_buffer("position")
        queue[position] = key
        position.add_(1).remainder_(8)


@pytest.mark.parametrize("server", [{}, {"replicas": 2}, {"durability": "standby"}], ids=str)
def test_what_is_broadcast_is_one_workers(tmp_path: Path, server: dict[str, Any]) -> None:
    """Worker 1 joins, worker 0 leaves in the middle of a step, and the parameter server is lost."""
    models, gone = Models(), threading.Event()

    def script(session: Session) -> None:
        model = models[session.worker] = Moco()
        optimizer = session.optimizer(sgd(model.body), model, broadcast=["queue", "position"])
        for x, y in session.loader(Numbers(160), 4):
            if session.worker == 0 and session.version == 5:
                job.start(1, script)
                job.until(lambda: training(job, 1), "worker 1 waits for the next round")
            if session.worker == 1 and session.version == 12:
                assert gone.wait(LIMIT)
            if session.worker == 1 and session.version == 15 and session.generation == 0:
                job.restart(0)
            version = session.version
            optimizer.zero_grad()
            mse(model, x, y).backward()
            model.enqueue(1000 * session.worker + version)
            if session.worker == 0 and version == 12:
                session.close()
                gone.set()
                return
            optimizer.step()
            assert int(model.get_buffer("position")) == session.version % 8

    server = {**server, "checkpoint": {"everyVersions": 1}}
    with running_job(
        tmp_path, checkpoints=tmp_path / "kept", parameterServer=server, data={"shardRecords": 4}
    ) as job:
        job.start(0, script)
        job.join()
        assert job.commits()[-1]["term"] == 2
        made = [(c["version"], [each["worker"] for each in c["contributions"]]) for c in job.commits()]
    assert sum(present == [0, 1] for _, present in made) >= 3
    workers = dict(made)  # the last ones: some versions were made twice
    last = max(workers)
    keys = [1000 * min(workers[version]) + version - 1 for version in range(last - 7, last + 1)]
    assert sorted(models[1].get_buffer("queue").tolist()) == sorted(keys)


@pytest.mark.parametrize(
    ("names", "match"),
    [
        ({"averaged": ["techer"]}, "averaged names 'techer', .* it has online.0.weight"),
        ({"own": "teacher"}, r"expected a list of names, as in \['teacher'\]"),
        ({"own": ["online"]}, "the optimizer trains online.0.weight, so do not name it in own"),
        ({"averaged": ["teacher"], "broadcast": ["teacher.0.bias"]}, "named in averaged and broadcast"),
    ],
)
def test_names_that_mean_nothing_are_refused(tmp_path: Path, names: Any, match: str) -> None:
    def script(session: Session) -> None:
        model = Student()
        session.optimizer(sgd(model), model, **names)

    failing(tmp_path, script, InvalidModel, match)


def test_a_hyperparameter_that_a_state_lacks_which_was_brought_cannot_be_switched_on(tmp_path: Path) -> None:
    """No step could be made with it, so the job would go back to its first version again and again."""
    data = Numbers(40)

    def script(session: Session) -> None:
        model = make_mlp()
        raw = torch.optim.Adam(model.parameters())
        mse(model, data.x[:4], data.y[:4]).backward()
        raw.step()
        optimizer = session.optimizer(raw, model, state=raw.state_dict())
        optimizer.param_groups[0]["amsgrad"] = True
        for x, y in session.loader(data, 5):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    failing(tmp_path, script, InvalidModel, "amsgrad is True, and was False before")


def test_a_hyperparameter_that_needs_more_state_cannot_be_switched_on_later(tmp_path: Path) -> None:
    data = Numbers(40)

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.Adam(model.parameters()), model)
        for x, y in session.loader(data, 5):
            optimizer.param_groups[0]["amsgrad"] = session.version >= 2
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    failing(tmp_path, script, UsageError, "amsgrad is True, and was False before")
