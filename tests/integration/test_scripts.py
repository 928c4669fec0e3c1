"""What ordinary training scripts do: it works as on one process, or is refused with a sentence that helps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from elastic_ps.errors import ElasticPSError, InvalidModel, ModelMismatch, UsageError
from elastic_ps.worker.session import Session
from tests.integration.harness import Job, Numbers, make_mlp, running_job
from tests.integration.oracle import (
    Loss,
    MakeOptimizer,
    assert_each_record_once,
    assert_equal_up_to_round_off,
    mse,
    replay,
)

Models = dict[int, torch.nn.Module]
MakeModel = Callable[[], torch.nn.Module]
Scheduler = Callable[[torch.optim.Optimizer], Any]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.005)


def training(job: Job, worker: int) -> bool:
    return any(m.worker == worker and m.state == "training" for m in job.status().members)


def alone(tmp_path: Path, script: Callable[[Session], Any], **fields: Any) -> list[dict[str, Any]]:
    """Run a script as a job's only worker; returns the commits."""
    with running_job(tmp_path, **fields) as job:
        job.start(0, script)
        job.join()
        return job.commits()


# --- parameter groups and schedulers


def test_parameter_groups_keep_their_hyperparameters(tmp_path: Path) -> None:
    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        first, *others = [list(layer.parameters()) for layer in model.children()]
        rest = [p for layer in others for p in layer]
        groups = [{"params": first, "lr": 0.01}, {"params": rest, "momentum": 0.5, "weight_decay": 0.1}]
        return torch.optim.SGD(groups, lr=0.03, momentum=0.9)

    check_against_replay(tmp_path, make_mlp, make, parameterServer={"replicas": 2, "bucketBytes": 1024})


def check_against_replay(
    tmp_path: Path,
    make_model: MakeModel,
    make: MakeOptimizer,
    *,
    loss: Loss = mse,
    scheduler: Scheduler | None = None,
    before: Callable[[int, torch.nn.Module, torch.optim.Optimizer], None] | None = None,
    set_to_none: bool = True,
    step_scheduler: Callable[[Any, torch.optim.Optimizer], None] = lambda s, o: s.step(),
    **fields: Any,
) -> None:
    """Two workers; at the end the model is the one of plain torch.

    Args:
        before: called before each step, with the version, in the workers and in the replay.
    """
    data, models = Numbers(160), Models()

    def script(session: Session) -> None:
        model = make_model()
        optimizer = session.optimizer(make(model), model)
        schedule = session.scheduler(scheduler(optimizer)) if scheduler else None
        for x, y in session.loader(data, 4):
            if before is not None:
                before(session.version, model, optimizer)
            optimizer.zero_grad(set_to_none)
            loss(model, x, y).backward()
            optimizer.step()
            if schedule is not None:
                step_scheduler(schedule, optimizer)
        models[session.worker] = model

    with running_job(tmp_path, **fields) as job:
        for worker in range(2):
            job.start(worker, script)
        job.join()
        commits, spec = job.commits(), job.spec

    def replayed(model: torch.nn.Module) -> None:
        made: list[Any] = []

        def after(version: int, optimizer: torch.optim.Optimizer) -> None:
            if made:
                step_scheduler(made[0], optimizer)

        def with_scheduler(m: torch.nn.Module) -> torch.optim.Optimizer:
            optimizer = make(m)
            if scheduler is not None:
                made.append(scheduler(optimizer))
            return optimizer

        replay(
            commits,
            data,
            model,
            with_scheduler,
            spec,
            loss=loss,
            before=before,
            after=after,
            set_to_none=set_to_none,
        )

    assert_each_record_once(commits, records=160, epochs=1)
    assert_equal_up_to_round_off(models[0], make_model(), replayed)


SCHEDULERS: dict[str, Scheduler] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=7, gamma=0.5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=20),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.03, total_steps=100),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, cooldown=1),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rate_schedulers(tmp_path: Path, name: str, make: MakeOptimizer) -> None:
    def step(schedule: Any, optimizer: torch.optim.Optimizer) -> None:
        schedule.step(1.0) if name == "ReduceLROnPlateau" else schedule.step()

    check_against_replay(tmp_path, make_mlp, make, scheduler=SCHEDULERS[name], step_scheduler=step)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_late_joiner_goes_on_where_the_schedule_stands(tmp_path: Path, name: str) -> None:
    """Worker 0 leaves after some steps together with worker 1, whose schedule is then the one that counts."""
    data, models = Numbers(160), Models()
    rates: dict[int, list[float]] = {}
    joined = threading.Event()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        schedule = session.scheduler(SCHEDULERS[name](optimizer))
        for step, (x, y) in enumerate(session.loader(data, 4)):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if session.worker == 0 and session.version == 10:
                job.start(1, script)
                job.until(lambda: training(job, 1), "worker 1 waits for the next round")
                joined.set()
            rates.setdefault(session.version, []).append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step(1.0) if name == "ReduceLROnPlateau" else schedule.step()
            if session.worker == 0 and step == 14:
                session.drain()
        models[session.worker] = model

    with running_job(tmp_path) as job:
        job.start(0, script)
        job.join()
        commits, spec = job.commits(), job.spec
    assert {c["worker"] for c in commits[-1]["contributions"]} == {1}
    reference = sgd(make_mlp())
    expected = SCHEDULERS[name](reference)
    for version in range(len(commits)):
        assert rates[version] == pytest.approx([reference.param_groups[0]["lr"]] * len(rates[version])), (
            version
        )
        reference.step()
        expected.step(1.0) if name == "ReduceLROnPlateau" else expected.step()

    def replayed(model: torch.nn.Module) -> None:
        optimizer = sgd(model)
        schedule = SCHEDULERS[name](optimizer)

        def after(version: int, _: torch.optim.Optimizer) -> None:
            schedule.step(1.0) if name == "ReduceLROnPlateau" else schedule.step()

        replay(commits, data, model, lambda m: optimizer, spec, after=after)

    assert_equal_up_to_round_off(models[1], make_mlp(), replayed)


def test_who_joins_first_and_begins_last_does_not_set_the_schedule_back(tmp_path: Path) -> None:
    data, joined = Numbers(80), threading.Event()
    rates: dict[int, float] = {}

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        schedule = session.scheduler(SCHEDULERS["LambdaLR"](optimizer))
        if session.worker == 0:
            joined.set()
            job.until(lambda: training(job, 1), "the other one computes")
        for x, y in session.loader(data, 4):
            if session.worker == 1 and session.version == 0:
                job.until(lambda: training(job, 0), "the first one waits for the next round")
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            rates[session.version] = optimizer.param_groups[0]["lr"]
            schedule.step()

    with running_job(tmp_path) as job:
        job.start(0, script)
        joined.wait(30)
        job.start(1, script)
        job.join()
        assert any(len(commit["contributions"]) == 2 for commit in job.commits())
    assert rates == {version: pytest.approx(0.02 / version) for version in rates}


def test_a_learning_rate_set_by_hand_counts_from_the_next_step(tmp_path: Path) -> None:
    def before(version: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.02 / (1 + version % 3)

    check_against_replay(tmp_path, make_mlp, sgd, before=before)


# --- what parameters there are


class Odd(torch.nn.Module):
    """Tied, frozen, unused, scalar and empty parameters, and BatchNorm's buffers."""

    def __init__(self) -> None:
        super().__init__()
        source = make_mlp((6, 6, 6, 1))
        self.first, self.last = source[0], source[4]
        self.tied = torch.nn.Linear(6, 6)
        self.tied.load_state_dict(source[2].state_dict())
        weight = self.first.weight
        assert isinstance(weight, torch.nn.Parameter)
        self.tied.weight = weight
        self.frozen = torch.nn.Parameter(torch.full((6,), 0.5), requires_grad=False)
        self.thawed = torch.nn.Parameter(torch.full((6,), 0.5), requires_grad=False)
        self.sometimes = torch.nn.Parameter(torch.full((6,), 0.25))
        self.never = torch.nn.Parameter(torch.ones(3))
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.empty = torch.nn.Parameter(torch.zeros(0, 4))
        self.version = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = torch.tanh(self.tied(torch.tanh(self.first(x)))) * self.frozen + self.thawed
        if self.version % 3 == 0:
            hidden = hidden * self.sometimes
        output: torch.Tensor = self.last(hidden) * self.scale + self.empty.sum()
        return output


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("make", [sgd, adam])
def test_odd_parameters(tmp_path: Path, make: MakeOptimizer, set_to_none: bool) -> None:
    def before(version: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        assert isinstance(model, Odd)
        model.version = version
        model.thawed.requires_grad_(version >= 10)

    check_against_replay(
        tmp_path,
        Odd,
        make,
        before=before,
        set_to_none=set_to_none,
        parameterServer={"replicas": 2, "bucketBytes": 1024},
    )


def test_parameters_that_are_not_given_to_the_optimizer_stay(tmp_path: Path) -> None:
    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        assert isinstance(model, torch.nn.Sequential)
        return torch.optim.SGD([*model[0].parameters(), *model[4].parameters()], lr=0.05)

    check_against_replay(tmp_path, make_mlp, make)


def test_a_gradient_that_only_one_worker_has(tmp_path: Path) -> None:
    """Worker 0 does not use `sometimes`; worker 1's gradient counts with its share of the samples."""
    data, models = Numbers(16), Models()

    def script(session: Session) -> None:
        model = Odd()
        models[session.worker] = model
        model.version = 1 if session.worker == 0 else 0
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for step, (x, y) in enumerate(session.loader(data, 4)):
            if session.worker == 0 and step == 0:
                job.start(1, script)
                job.until(lambda: training(job, 1), "worker 1 waits")
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            optimizer.zero_grad()
            mse(model, x, y).backward()
            gradient = None if model.sometimes.grad is None else model.sometimes.grad.clone()
            optimizer.step()
            if gradient is not None:
                job.until(lambda: len(job.commits()) >= session.version, "the round is recorded")
                share = 1 / len(job.commits()[session.version - 1]["contributions"])
                moved = before["sometimes"] - model.sometimes.detach()
                torch.testing.assert_close(moved, 0.1 * share * gradient, rtol=1e-4, atol=1e-6)

    with running_job(tmp_path, data={"shardRecords": 4}) as job:
        job.start(0, script)
        job.join()
        assert any(len(c["contributions"]) == 2 for c in job.commits())


def test_batch_norm_statistics_are_the_mean_over_the_workers(tmp_path: Path) -> None:
    """Two workers with the same number of samples: running values are the mean, the counter counts rounds."""
    data, models = Numbers(64), Models()
    local: dict[int, dict[int, torch.Tensor]] = {}

    def script(session: Session) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        models[session.worker] = model
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(data, 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            norm = model[1]
            assert isinstance(norm, torch.nn.BatchNorm1d)
            assert norm.running_mean is not None
            assert norm.num_batches_tracked is not None
            local.setdefault(session.version + 1, {})[session.worker] = norm.running_mean.clone()
            optimizer.step()
            mean = torch.stack(list(local[session.version].values())).mean(0)
            if len(local[session.version]) == 2:
                torch.testing.assert_close(norm.running_mean, mean)
            assert int(norm.num_batches_tracked) == session.version

    with running_job(tmp_path, data={"shardRecords": 4}) as job:
        for worker in range(2):
            job.start(worker, script)
        job.join()
        states = [model.state_dict() for model in models.values()]
    assert any(len(values) == 2 for values in local.values())
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(tmp_path: Path, dtype: torch.dtype) -> None:
    def loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        kind = next(model.parameters()).dtype
        return mse(model, x.to(kind), y.to(kind))

    check_against_replay(tmp_path, lambda: make_mlp().to(dtype), sgd, loss=loss)


def test_a_mixture_of_precisions(tmp_path: Path) -> None:
    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = make_mlp()
            self.scale = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
            self.shift = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
            self.register_buffer("flags", torch.tensor([True, False]))
            self.register_buffer("count", torch.zeros(2, dtype=torch.int16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) * self.scale.float() + self.shift.float()  # type: ignore[no-any-return]

    models = Models()

    def script(session: Session) -> None:
        model = models[0] = Mixed()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(Numbers(40), 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    commits = alone(tmp_path, script, parameterServer={"replicas": 3})
    model = models[0]
    reference = Mixed()
    optimizer = sgd(reference)
    from elastic_ps.worker.loader import permutation

    data = Numbers(40)
    order = permutation(40, 0, shuffle=True, seed=0)
    for commit in commits:
        ((_, start, stop),) = commit["contributions"][0]["records"]
        x, y = (torch.stack(c) for c in zip(*[data[i] for i in order[start:stop]], strict=True))
        optimizer.zero_grad()
        mse(reference, x, y).backward()
        optimizer.step()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)


# --- saving


@pytest.mark.parametrize(
    "make",
    [
        sgd,
        adam,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        lambda m: torch.optim.Adagrad(m.parameters()),
    ],
    ids=["momentum", "adam", "no state", "adagrad"],
)
def test_states_can_be_loaded_into_plain_torch(tmp_path: Path, make: MakeOptimizer) -> None:
    data = Numbers(80)
    saved: dict[str, Any] = {}

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(make(model), model)
        for x, y in session.loader(data, 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
        with pytest.raises(UsageError, match="--resume"):
            optimizer.load_state_dict(optimizer.state_dict())

    with running_job(tmp_path, parameterServer={"replicas": 2, "bucketBytes": 1024}) as job:
        job.start(0, script)
        job.join()
        reference = make_mlp()
        expected = replay(job.commits(), data, reference, make, job.spec)
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    model = make_mlp(seed=5)
    model.load_state_dict(saved["model"])
    optimizer = make(model)
    optimizer.load_state_dict(saved["optimizer"])
    x, y = data.x[:8], data.y[:8]
    for m, o in ((model, optimizer), (reference, expected)):
        o.zero_grad()
        mse(m, x, y).backward()
        o.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


# --- refused, with a sentence


def failing(tmp_path: Path, script: Callable[[Session], Any], kind: type[BaseException], match: str) -> None:
    with pytest.raises(kind, match=match):
        alone(tmp_path, script)


def test_clipping_is_refused_with_overlap_and_works_without(tmp_path: Path) -> None:
    def script(session: Session, *, overlap: bool) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model, overlap=overlap)
        for x, y in session.loader(Numbers(40), 4):
            optimizer.zero_grad()
            (100 * mse(model, x, y)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            if session.version == 1:
                moved = torch.cat(
                    [(a - b).detach().reshape(-1) for a, b in zip(before, model.parameters(), strict=True)]
                )
                assert float(moved.norm()) == pytest.approx(0.02 * 0.1, rel=1e-3)

    failing(tmp_path / "a", lambda s: script(s, overlap=True), UsageError, "overlap=False")
    alone(tmp_path / "b", lambda s: script(s, overlap=False))


def test_a_second_backward_is_refused(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        session.optimizer(sgd(model), model)
        for x, y in session.loader(Numbers(40), 4):
            mse(model, x, y).backward()
            mse(model, x, y).backward()

    failing(tmp_path, script, UsageError, "no_sync")


def test_a_batch_from_elsewhere_is_refused(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model, data = make_mlp(), Numbers(40)
        session.optimizer(sgd(model), model)
        mse(model, data.x, data.y).backward()

    failing(tmp_path, script, UsageError, "session.loader")


def test_a_batch_whose_iterator_is_gone_is_refused(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        session.optimizer(sgd(model), model)
        x, y = next(iter(session.loader(Numbers(40), 4)))
        mse(model, x, y).backward()

    failing(tmp_path, script, UsageError, "keep the iterator")


class MySGD(torch.optim.SGD):
    """A subclass, whose step could be anything."""


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def frozen() -> torch.nn.Module:
    return make_mlp().requires_grad_(False)


def empty() -> torch.nn.Module:
    model = torch.nn.Module()
    model.register_parameter("nothing", torch.nn.Parameter(torch.zeros(0, 3)))
    return model


@pytest.mark.parametrize(
    ("make_model", "make", "match"),
    [
        (
            make_mlp,
            lambda m: torch.optim.LBFGS(m.parameters()),
            "LBFGS cannot run .* use one of .* SGD, Adam",
        ),
        (make_mlp, lambda m: MySGD(m.parameters(), lr=0.1), "MySGD.* not subclasses"),
        (frozen, sgd, "no trainable parameter"),
        (empty, sgd, "no trainable parameter"),
        (make_mlp, lambda m: torch.optim.SGD(make_mlp().parameters(), lr=0.1), "not parameters of the model"),
    ],
)
def test_what_cannot_be_trained(
    tmp_path: Path, make_model: MakeModel, make: MakeOptimizer, match: str
) -> None:
    def script(session: Session) -> None:
        model = make_model()
        session.optimizer(make(model), model)

    failing(tmp_path, script, InvalidModel, match)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (Stream(), "map-style"),
        (TensorDataset(torch.zeros(0, 2)), "empty"),
        (DataLoader(Stream()), "map-style"),
    ],
)
def test_data_that_cannot_be_handed_out(tmp_path: Path, source: Any, match: str) -> None:
    def script(session: Session) -> None:
        session.loader(source, None if isinstance(source, DataLoader) else 4)

    failing(tmp_path, script, InvalidModel, match)


def test_a_second_optimizer_is_refused(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        session.optimizer(sgd(model), model)
        session.optimizer(sgd(model), model)

    failing(tmp_path, script, UsageError, "one model and optimizer")


def test_a_model_that_moved_is_refused(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(Numbers(40), 4):
            model.double()
            mse(model, x.double(), y.double()).backward()
            optimizer.step()

    failing(tmp_path, script, ElasticPSError, "session.optimizer")


def test_another_data_set_is_refused(tmp_path: Path) -> None:
    def script(session: Session, records: int) -> None:
        model = make_mlp()
        session.optimizer(sgd(model), model)
        for _ in session.loader(Numbers(records), 4):
            break

    with running_job(tmp_path) as job:
        job.start(0, lambda s: script(s, 40))
        job.join()
        job.start(1, lambda s: script(s, 41))
        with pytest.raises(InvalidModel, match=r"41 records .* 40 records"):
            job.join()


def test_a_worker_with_another_model_is_refused_and_the_others_train_on(tmp_path: Path) -> None:
    data = Numbers(120)
    refusals: list[str] = []

    def good(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(data, 4):
            if session.worker == 0 and session.version == 5:
                job.start(2, bad)
                job.until(lambda: bool(refusals), "the other model is refused")
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    def bad(session: Session) -> None:
        model = make_mlp((6, 16, 17, 1))
        try:
            session.optimizer(adam(model), model)
        except ModelMismatch as error:
            refusals.append(str(error))

    with running_job(tmp_path) as job:
        for worker in range(2):
            job.start(worker, good)
        job.join()
        assert_each_record_once(job.commits(), records=120, epochs=1)
    for part in ("2.weight", "[17, 16]", "[16, 16]", "4.weight", "Adam", "SGD"):
        assert part in refusals[0]


# --- loops


def test_breaking_out_early_gives_the_records_back(tmp_path: Path) -> None:
    """Worker 0 stops iterating but stays; worker 1 trains all of the rest."""
    data = Numbers(120)
    stopped = threading.Event()

    def script(session: Session, *, stop: bool) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(data, 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            if stop and session.version >= 3:
                break
        if stop:
            stopped.set()
            job.until(lambda: job.status().progress.finished, "the others go on")

    with running_job(tmp_path) as job:
        job.start(0, lambda s: script(s, stop=True))
        job.start(1, lambda s: script(s, stop=False))
        job.join()
        assert_each_record_once(job.commits(), records=120, epochs=1)


def test_breaking_out_before_computing_gives_the_records_back(tmp_path: Path) -> None:
    """The loop is left with a batch that nothing was computed on."""
    data = Numbers(120)

    def script(session: Session, *, stop: bool) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for step, (x, y) in enumerate(session.loader(data, 4)):
            if stop and step == 3:
                break
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
        if stop:
            job.until(lambda: job.status().progress.finished, "the others go on")

    with running_job(tmp_path) as job:
        job.start(0, lambda s: script(s, stop=True))
        job.start(1, lambda s: script(s, stop=False))
        job.join()
        assert_each_record_once(job.commits(), records=120, epochs=1)


def test_a_step_after_breaking_out_lets_the_others_go_on(tmp_path: Path) -> None:
    """backward, break, step: the step counts, and nobody waits for this worker afterwards."""
    data = Numbers(120)

    def script(session: Session, *, stop: bool) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for step, (x, y) in enumerate(session.loader(data, 4)):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if stop and step == 3:
                break
            optimizer.step()
        if stop:
            optimizer.step()
            job.until(lambda: job.status().progress.finished, "the others go on")

    with running_job(tmp_path) as job:
        job.start(0, lambda s: script(s, stop=True))
        job.start(1, lambda s: script(s, stop=False))
        job.join()
        assert_each_record_once(job.commits(), records=120, epochs=1)
        assert sum(m.steps for m in job.status().members if m.worker == 0) == 4


def test_iterating_again_after_breaking_out(tmp_path: Path) -> None:
    data = Numbers(120)

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        loader = session.loader(data, 4)
        for breaking in (True, False):
            for step, (x, y) in enumerate(loader):
                if breaking and step == 3:
                    break
                optimizer.zero_grad()
                mse(model, x, y).backward()
                optimizer.step()
        assert session.is_chief

    assert_each_record_once(alone(tmp_path, script), records=120, epochs=1)


@pytest.mark.parametrize("overlap", [True, False])
def test_batches_left_without_a_step_are_an_error(tmp_path: Path, overlap: bool) -> None:
    """A script that accumulates and forgets the rest at the end would train it twice, or never."""

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model, overlap=overlap)
        loader = session.loader(Numbers(5), 1)
        for _ in loader.epochs():
            for step, (x, y) in enumerate(loader):
                if overlap and step % 2 == 0:
                    with optimizer.no_sync():
                        mse(model, x, y).backward()
                else:
                    mse(model, x, y).backward()
                if step % 2:
                    optimizer.step()
                    optimizer.zero_grad()

    failing(tmp_path, script, UsageError, r"optimizer.step\(\)")


def test_the_rest_of_an_accumulation_is_trained_after_a_plain_loop(tmp_path: Path) -> None:
    """The loop over the loader ends with three of four batches; the script makes its last step then."""

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model, overlap=False)
        number = -1
        for number, (x, y) in enumerate(session.loader(Numbers(7), 1)):
            mse(model, x, y).backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        if number % 4 != 3:
            optimizer.step()
        assert session.is_chief

    assert_each_record_once(alone(tmp_path, script), records=7, epochs=1)


def test_epochs_are_seen_one_after_the_other(tmp_path: Path) -> None:
    seen: dict[int, list[int]] = {}

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        loader = session.loader(Numbers(90), 4, epochs=4)
        for epoch in loader.epochs():
            for x, y in loader:
                assert loader.epoch == epoch
                seen.setdefault(session.worker, []).append(epoch)
                optimizer.zero_grad()
                mse(model, x, y).backward()
                optimizer.step()

    with running_job(tmp_path) as job:
        for worker in range(2):
            job.start(worker, script)
        job.join()
        assert_each_record_once(job.commits(), records=90, epochs=4)
        ranges = [c["records"] for commit in job.commits() for c in commit["contributions"]]
        assert all(len({r[0] for r in records}) == 1 for records in ranges), "no batch spans two epochs"
    assert all(epochs == sorted(epochs) for epochs in seen.values())


def test_a_data_loader_with_processes(tmp_path: Path) -> None:
    data = Numbers(120)

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(DataLoader(data, batch_size=4, num_workers=2, shuffle=True), epochs=2):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    commits = alone(tmp_path, script, data={"shardRecords": 60})
    assert_each_record_once(commits, records=120, epochs=2)


@pytest.mark.parametrize("transport", ["inproc", "grpc"])
def test_a_script_that_raises_in_the_middle_of_a_step(tmp_path: Path, transport: str) -> None:
    data = Numbers(120)
    raised = threading.Event()

    def script(session: Session, *, fails: bool) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for step, (x, y) in enumerate(session.loader(data, 4)):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if fails and step == 3:
                raised.set()
                session.close()
                return
            optimizer.step()

    with running_job(tmp_path, transport=transport, parameterServer={"bucketBytes": 1024}) as job:
        job.start(0, lambda s: script(s, fails=True))
        job.start(1, lambda s: script(s, fails=False))
        job.join()
        assert raised.is_set()
        assert_each_record_once(job.commits(), records=120, epochs=1)
