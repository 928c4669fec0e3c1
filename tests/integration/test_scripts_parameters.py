"""Whatever parameters and buffers a model has, they are trained and saved as on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.checkpoint.plain import load_checkpoint
from elastic_ps.checkpoint.store import Store
from elastic_ps.codec.optimizers import MASTER
from elastic_ps.errors import UsageError
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.oracle import (
    MakeOptimizer,
    mse,
    replay,
)
from tests.testing.trained import (
    Models,
    adam,
    alone,
    await_training,
    check_against_replay,
    sgd,
    training,
)


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
def test_odd_parameters_are_trained_as_alone(tmp_path: Path, make: MakeOptimizer, set_to_none: bool) -> None:
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


class Quantised(torch.nn.Module):
    """An integer weight, as quantised layers have it, and a scale and a layer that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.05))
        integers = torch.arange(-18, 18, dtype=torch.int8).view(6, 6)
        self.weight = torch.nn.Parameter(integers, requires_grad=False)
        self.head = make_mlp((6, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(x @ (self.weight.to(x.dtype) * self.scale))
        return output


def test_integer_parameters_of_the_optimizer_stay(tmp_path: Path) -> None:
    """torch's optimizers take them, since they never have a gradient."""
    check_against_replay(tmp_path / "replayed", Quantised, adam)
    saved: list[dict[str, Any]] = []

    def script(session: Session) -> None:
        model = Quantised()
        optimizer = session.optimizer(adam(model), model)
        for x, y in session.loader(Numbers(40), 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
        saved.append({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    alone(tmp_path / "alone", script, checkpoints=tmp_path / "kept")
    assert torch.equal(saved[0]["model"]["weight"], Quantised().weight)
    assert not torch.equal(saved[0]["model"]["scale"], Quantised().scale)
    model = Quantised()
    optimizer = adam(model)
    optimizer.load_state_dict(saved[0]["optimizer"])
    load_checkpoint(tmp_path / "kept", model, optimizer)
    assert {*optimizer.state} == {model.scale, *model.head.parameters()}


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
        for step, (x, y) in enumerate(session.loader(data, 4)):
            if step == 0:
                await_training(job, 0, 1)
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
        job.run(script, workers=2)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_updates_add_up_in_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    """Each step changes a weight of 1 by 2**-12, which is nothing in either precision; plain torch loses it.

    The parameter server's master, which has all of them, survives the parameter server.
    """

    class Weights(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(300, dtype=dtype))

    models, data = Models(), Numbers(512)

    def script(session: Session) -> None:
        model = models[session.worker] = Weights()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=2.0**-12), model)
        for step, _ in enumerate(session.loader(data, 2)):
            optimizer.zero_grad()
            model.weight.sum().backward()
            if session.worker == 0 and step == 20:
                job.restart(0)
            optimizer.step()

    server = {"checkpoint": {"everyVersions": 10, "interval": "1h"}}
    with running_job(tmp_path, checkpoints=tmp_path / "kept", parameterServer=server) as job:
        job.run(script, workers=2)
        versions = job.version
    exact = 1 - versions * 2.0**-12
    alone = Weights()
    optimizer = torch.optim.SGD(alone.parameters(), lr=2.0**-12)
    for _ in range(versions):
        alone.weight.grad = torch.ones_like(alone.weight)
        optimizer.step()
    assert torch.equal(alone.weight, torch.ones_like(alone.weight)), "plain torch loses every one"
    for model in models.values():
        parameter = next(model.parameters())
        assert parameter.dtype is dtype
        assert torch.equal(parameter, torch.full((300,), exact).to(dtype))
    with Store(tmp_path / "kept").open(versions) as kept:
        assert torch.equal(kept.state(0, 0, 300)[MASTER], torch.full((300,), exact))


def test_the_order_of_elements_in_memory_is_kept(tmp_path: Path) -> None:
    """channels_last stays channels_last, and means the same as on one process."""

    class Pictures(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = torch.nn.Conv2d(3, 4, 2)
            self.last = make_mlp((4, 1))
            with torch.no_grad():
                self.convolution.weight.copy_(torch.linspace(-1, 1, 48).view(4, 3, 2, 2))
                self.convolution.bias.fill_(0.1)  # type: ignore[union-attr]
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

        def forward(self, x: torch.Tensor) -> Any:
            picture = x[:, :, None, None].expand(-1, -1, 2, 2).view(-1, 3, 2, 2, 2).sum(2)
            return self.last(torch.tanh(self.convolution(picture)).flatten(1))

    def before(version: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        assert isinstance(model, Pictures)
        assert model.convolution.weight.is_contiguous(memory_format=torch.channels_last)

    check_against_replay(tmp_path, Pictures, sgd, before=before, parameterServer={"replicas": 2})


def test_a_mixture_of_precisions(tmp_path: Path) -> None:
    class Mixed(torch.nn.Module):
        def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
            super().__init__()
            self.body = make_mlp()
            self.scale = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
            self.shift = torch.nn.Parameter(torch.zeros(1, dtype=dtype))
            self.register_buffer("flags", torch.tensor([True, False]))
            self.register_buffer("count", torch.zeros(2, dtype=torch.int16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) * self.scale.float() + self.shift.bfloat16().float()  # type: ignore[no-any-return]

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
    reference = Mixed(torch.float32)  # the parameter server steps a master in single precision
    optimizer = sgd(reference)
    from elastic_ps.data.shuffle import permutation

    data = Numbers(40)
    order = permutation(40, 0, shuffle=True, seed=0)
    for commit in commits:
        ((_, start, stop),) = commit["contributions"][0]["records"]
        x, y = (torch.stack(c) for c in zip(*[data[i] for i in order[start:stop]], strict=True))
        optimizer.zero_grad()
        mse(reference, x, y).backward()
        optimizer.step()
    for name, value in reference.state_dict().items():
        ours = model.state_dict()[name]
        torch.testing.assert_close(ours, value.to(ours.dtype))


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
