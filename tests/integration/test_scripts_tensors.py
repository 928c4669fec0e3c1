"""The model's tensors that a script replaces, ties or computes on across a step: right, or refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from elastic_ps.core.partition import partition
from elastic_ps.errors import InvalidModel, UsageError
from elastic_ps.worker.model.checks import left_over
from elastic_ps.worker.model.description import ModelDescription
from elastic_ps.worker.model.flat import Flat
from elastic_ps.worker.session import Session
from tests.testing.harness import Indexes, Numbers, make_mlp, running_job
from tests.testing.oracle import mse
from tests.testing.trained import Models, alone, failing, sgd

RECORDS = torch.arange(32.0).view(32, 1)
LOCAL: dict[str, Any] = {"consistency": {"mode": "local", "steps": 2, "outer": "average"}}


class Centered(torch.nn.Module):
    """Keeps the mean of what it has seen in a buffer that it assigns anew."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = make_mlp((1, 1))
        self.center: Any
        self.register_buffer("center", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            self.center = self.center * 0.5 + x.mean(0) * 0.5
        return self.fc(x - self.center)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        loss = (model(x) ** 2).mean()
        loss.backward()
        value: float = loss.item()
        return value

    optimizer.step(closure)


@pytest.mark.parametrize("fields", [{}, LOCAL], ids=["sync", "local"])
def test_a_buffer_that_is_assigned_anew_is_the_jobs(tmp_path: Path, fields: dict[str, Any]) -> None:
    """All workers end with what the job has made of it."""
    models = Models()

    def script(session: Session) -> None:
        model = models[session.worker] = Centered()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model)
        for x in session.loader(RECORDS, batch_size=8, epochs=2):
            step(model, optimizer, x)

    with running_job(tmp_path, **fields) as job:
        job.run(script, workers=2)
    first, second = (model.state_dict() for model in models.values())
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert float(first["center"]) > 1


@pytest.mark.parametrize("fields", [{}, LOCAL], ids=["sync", "local"])
def test_a_model_that_is_pruned_later_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(Numbers(40), 4):
            if session.version == 2:
                prune.l1_unstructured(model[0], "weight", amount=4)
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    failing(tmp_path, script, UsageError, r"0\.weight no longer exists.*keep_zeros", **fields)


def tied() -> torch.nn.Sequential:
    """An autoencoder whose decoder is the encoder's weight, transposed: two parameters on one memory."""
    model = make_mlp((6, 3, 6))
    encoder = model.get_submodule("0").get_parameter("weight")
    model.get_submodule("2").weight = torch.nn.Parameter(encoder.t())
    return model


def autoencode(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    mse(model, x, x).backward()
    optimizer.step()


def test_parameters_that_share_memory_stay_tied_or_are_refused(tmp_path: Path) -> None:
    data, models = Numbers(16).x, Models()

    def script(session: Session) -> None:
        model = models[0] = tied()
        optimizer = session.optimizer(sgd(model), model)
        for x in session.loader(data, batch_size=16, epochs=4):
            autoencode(model, optimizer, x)

    failing(tmp_path / "sync", script, InvalidModel, r"0\.weight and 2\.weight share memory.*\.t\(\)")
    with running_job(tmp_path / "reduced", strategy="all-reduce") as job:
        job.run(script, workers=1)
    plain = tied()
    optimizer = sgd(plain)
    for _ in range(4):
        autoencode(plain, optimizer, data)
    assert torch.equal(plain.get_parameter("0.weight"), plain.get_parameter("2.weight").t())
    torch.testing.assert_close(models[0].state_dict(), plain.state_dict())


def test_buffers_that_share_memory_stay_tied() -> None:
    model = make_mlp((2, 1))
    buffer = torch.zeros(4)
    model.register_buffer("all", buffer)
    model.register_buffer("first", buffer[:2])
    described = ModelDescription(model, sgd(model))
    described.require_apart(model)
    flat = Flat(partition(described.specs, bucket_bytes=1 << 20, shards=1), described.tensors)
    flat.value(flat.layout.tensors.index(described.specs[2])).fill_(5)
    flat.value(flat.layout.tensors.index(described.specs[3])).fill_(5)
    flat.publish()
    assert buffer.tolist() == [5] * 4
    buffer[0] = 3
    assert model.get_buffer("first").tolist() == [3, 5]


def test_a_model_in_shared_memory_stays_there(tmp_path: Path) -> None:
    """Other processes see each version there, such as the actors of reinforcement learning."""

    def script(session: Session) -> None:
        model = make_mlp((6, 6)).share_memory()
        model.register_buffer("steps", torch.zeros(1).share_memory_())
        seen_there = [tensor.detach() for tensor in model.state_dict().values()]
        optimizer = session.optimizer(sgd(model), model)
        for x in session.loader(Numbers(8).x, batch_size=4):
            before = seen_there[0].clone()
            model.get_buffer("steps").add_(1)
            autoencode(model, optimizer, x)
            assert not torch.equal(seen_there[0], before)
        for tensor, seen in zip(model.state_dict().values(), seen_there, strict=True):
            assert tensor.is_shared()
            assert tensor.data_ptr() == seen.data_ptr()

    alone(tmp_path, script)


def test_a_model_that_moves_to_shared_memory_later_is_refused(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = make_mlp((6, 6))
        optimizer = session.optimizer(sgd(model), model)
        model.share_memory()
        for x in session.loader(Numbers(8).x, batch_size=4):
            autoencode(model, optimizer, x)

    failing(tmp_path, script, UsageError, r"was replaced after session\.optimizer.*\.share_memory")


@pytest.mark.parametrize("overlap", [True, False])
def test_a_graph_that_lives_across_a_step_raises_as_in_torch(tmp_path: Path, overlap: bool) -> None:
    """A hidden state without detach(): its graph has the values from before the step."""

    def script(session: Session) -> None:
        model = make_mlp((3, 5, 2))
        optimizer = session.optimizer(sgd(model), model, overlap=overlap)
        hidden = torch.zeros(4, 2)
        for x in session.loader(torch.randn(64, 1), batch_size=4):
            hidden = model(torch.cat([hidden, x], dim=1))
            optimizer.zero_grad()
            (hidden**2).mean().backward(retain_graph=True)
            optimizer.step()

    failing(tmp_path, script, RuntimeError, "modified by an inplace operation")


class Twice(torch.nn.Module):
    """A block that is used twice, and checkpointed."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.block, self.reentrant = make_mlp((6, 6)), make_mlp((6, 6)), reentrant

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return x


def test_a_reentrant_checkpoint_that_is_used_twice_is_named(tmp_path: Path) -> None:
    def script(session: Session, *, reentrant: bool) -> None:
        model = Twice(reentrant=reentrant)
        optimizer = session.optimizer(sgd(model), model)
        for x in session.loader(Numbers(8).x, batch_size=4):
            autoencode(model, optimizer, x)

    match = r"checkpointed with use_reentrant=True.*use_reentrant=False"
    failing(tmp_path / "a", lambda s: script(s, reentrant=True), UsageError, match)
    alone(tmp_path / "b", lambda s: script(s, reentrant=False))


def test_a_buffer_that_gets_its_shape_in_the_first_forward_is_refused(tmp_path: Path) -> None:
    """As those of quantisation's observers, in place."""

    def script(session: Session) -> None:
        model = make_mlp((6, 6))
        model.register_buffer("low", torch.zeros(0))
        optimizer = session.optimizer(sgd(model), model)
        for x in session.loader(Numbers(8).x, batch_size=4):
            model.get_buffer("low").resize_(6).copy_(x.amin(0))
            autoencode(model, optimizer, x)

    failing(tmp_path, script, UsageError, r"low had the shape \[0\] .*\[6\] now.* once on a batch before")


def test_a_buffer_that_shrinks_is_refused(tmp_path: Path) -> None:
    """It begins where it did, and the job would train and save the values that it has no more."""

    def script(session: Session) -> None:
        model = make_mlp((6, 6))
        model.register_buffer("low", torch.zeros(8))
        optimizer = session.optimizer(sgd(model), model)
        for x in session.loader(Numbers(8).x, batch_size=4):
            model.get_buffer("low").resize_(6).copy_(x.amin(0))
            autoencode(model, optimizer, x)

    failing(tmp_path, script, UsageError, r"low had the shape \[8\] .*\[6\] now.* once on a batch before")


def test_what_to_do_about_a_buffer_that_cannot_grow_is_said() -> None:
    """As quantisation's scales of each channel: there is nothing behind them in the job's memory."""
    memory = torch.frombuffer(bytearray(4), dtype=torch.float32)
    with pytest.raises(RuntimeError) as torchs:
        memory.resize_(6)
    said = left_over(torchs.value)
    assert __file__ in said
    assert "run the model once on a batch before session.optimizer(...)" in said


class Sharp(torch.optim.Optimizer):
    """SAM: the gradient is computed again where the loss is higher, and another optimizer makes the step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.02)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        compute = torch.enable_grad()(closure)
        loss = compute()
        moved = [p for group in self.param_groups for p in group["params"]]
        away = [0.05 * p.grad for p in moved]
        torch._foreach_add_(moved, away)
        compute()
        torch._foreach_sub_(moved, away)
        self.base.step()
        return loss


def test_sam_runs_on_the_workers(tmp_path: Path) -> None:
    data, models = Numbers(16).x, Models()

    def script(session: Session) -> None:
        model = models[0] = make_mlp((6, 6))
        optimizer = session.optimizer(Sharp(model.parameters()), model)
        for x in session.loader(data, batch_size=16, epochs=4):
            step(model, optimizer, x)

    alone(tmp_path, script, **LOCAL)
    plain = make_mlp((6, 6))
    optimizer = Sharp(plain.parameters())
    for _ in range(4):
        step(plain, optimizer, data)
    torch.testing.assert_close(models[0].state_dict(), plain.state_dict())


class Bank(torch.nn.Module):
    """A row for each record, which a step sets for those of its batch, and how many were set."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = make_mlp((1, 1))
        self.rows: Any
        self.count: Any
        self.short: Any
        self.register_buffer("rows", torch.zeros(32, 1))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("short", torch.tensor([0], dtype=torch.int16))

    def forward(self, indexes: torch.Tensor) -> Any:
        x = indexes.view(-1, 1) + 1.0
        self.rows.index_copy_(0, indexes, x)
        self.count.add_(len(indexes))
        self.short.add_(len(indexes))
        return self.fc(x)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"consistency": {"mode": "async"}},
        {"consistency": {"globalBatchSize": 16}},
        {"strategy": "all-reduce"},
        {"consistency": {"mode": "local", "steps": 4, "overlap": 2, "outer": "average"}},
    ],
    ids=["sync", "async", "global batch", "all-reduce", "local"],
)
def test_each_workers_changes_of_a_memory_bank_are_kept(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Each row is set by one worker, in one step of several of a version."""
    models = Models()

    def script(session: Session) -> None:
        model = models[session.worker] = Bank()
        made = torch.optim.SGD(model.parameters(), lr=1e-5)
        optimizer = session.optimizer(made, model, summed=["rows", "count", "short"])
        for indexes in session.loader(Indexes(32), batch_size=4):
            optimizer.zero_grad()
            model(indexes).mean().backward()
            optimizer.step()

    with running_job(tmp_path, data={"shardRecords": 4}, **fields) as job:
        job.run(script, workers=2)
    for model in models.values():
        assert model.get_buffer("rows").flatten().tolist() == [1.0 + i for i in range(32)]
        assert int(model.get_buffer("count")) == 32
        assert int(model.get_buffer("short")) == 32, "gloo has no int16"


def test_the_processes_of_a_worker_change_a_memory_bank_together(tmp_path: Path) -> None:
    models = Models()

    def script(session: Session, rank: int) -> None:
        model = models[rank] = Bank()
        made = torch.optim.SGD(model.parameters(), lr=1e-5)
        optimizer = session.optimizer(made, model, summed=["rows", "count"])
        for indexes in session.loader(Indexes(13), batch_size=4):
            optimizer.zero_grad()
            model(indexes).mean().backward()
            optimizer.step()

    with running_job(tmp_path, worker={"processes": 2}) as job:
        job.start_processes(0, script)
        job.join()
    for model in models.values():
        assert model.get_buffer("rows").flatten().tolist() == [1.0 + i for i in range(13)] + [0.0] * 19
        assert int(model.get_buffer("count")) == 13


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_average_beside_the_model_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    def script(session: Session, *, within: bool) -> None:
        net = make_mlp()
        model = torch.nn.ModuleDict({"net": net})
        made = [AveragedModel(net)] if within or when == "before" else []
        if within:
            model["average"] = made[0]
        session.optimizer(sgd(net), model, averaged=["average"] if within else [])
        if not made:
            made.append(AveragedModel(net))
        session.stop("that was all")

    alone(tmp_path / "a", lambda session: script(session, within=True))
    assert "AveragedModel" not in caplog.text
    alone(tmp_path / "b", lambda session: script(session, within=False))
    assert "AveragedModel is not part of the job's model" in caplog.text


EASGD: dict[str, Any] = {"consistency": {"mode": "local", "steps": 2, "outer": "easgd"}}


def test_with_easgd_no_change_is_summed_and_the_other_kinds_work(tmp_path: Path) -> None:
    def script(session: Session, kinds: dict[str, Any]) -> None:
        model = make_mlp((6, 6))
        model.register_buffer("rows", torch.zeros(4))
        optimizer = session.optimizer(sgd(model), model, **kinds)
        for x in session.loader(Numbers(16).x, batch_size=4):
            model.get_buffer("rows").add_(1)
            step(model, optimizer, x)

    match = r"summed=\['rows'\] does not work with consistency.outer easgd.* averaged .* or own "
    failing(tmp_path / "summed", lambda s: script(s, {"summed": ["rows"]}), UsageError, match, **EASGD)
    for kind in ("averaged", "own"):
        assert alone(tmp_path / kind, partial(script, kinds={kind: ["rows"]}), **EASGD)
