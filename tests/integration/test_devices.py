"""Gradients come from a device, and values go to it, beside what it computes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.codec import devices
from elastic_ps.codec.encoder import CodecSelection
from elastic_ps.embedding import SGD
from elastic_ps.embedding.module import Embedding
from elastic_ps.standalone import connect
from elastic_ps.worker.session import Session
from tests.testing.devices import LateDevice, Said
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.oracle import assert_each_record_once, assert_equal_up_to_round_off, mse, replay
from tests.testing.polling import eventually
from tests.testing.trained import Models, sgd, together
from tests.testing.transports import whole_jobs

BUCKETS = {"bucketBytes": 1024}


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    """The CPU is a device whose copies are late."""
    late = LateDevice()
    # A GPU, which no machine for tests has.
    monkeypatch.setattr(devices, "streams_of", lambda device: late.streams())
    return late


def train(
    tmp_path: Path,
    *,
    workers: int,
    device: str = "cpu",
    note: Callable[[str], object] = lambda what: None,
    **fields: Any,
) -> None:
    """A job's script on a device; what comes of it is what one process gets. `note`: of each backward."""
    data, models = Numbers(160), Models()

    def script(session: Session) -> None:
        model = make_mlp().to(device)
        optimizer = session.optimizer(sgd(model), model)
        models[session.worker] = model
        for x, y in together(job, session.loader(data, 4), workers):
            optimizer.zero_grad()
            loss = mse(model, x.to(device), y.to(device))
            note("begin")
            loss.backward()
            note("end")
            optimizer.step()

    with running_job(tmp_path, **fields) as job:
        job.run(script, workers=workers)
        commits, spec = job.commits(), job.spec
    assert_each_record_once(commits, records=len(data), epochs=1)
    for model in models.values():
        assert_equal_up_to_round_off(
            model.cpu(), make_mlp(), lambda other: replay(commits, data, other, sgd, spec)
        )


@pytest.mark.covering(1)
@whole_jobs
@pytest.mark.parametrize("bucket_bytes", [1024, 1 << 20], ids=["buckets", "one call a step"])
def test_nothing_is_sent_or_computed_on_before_it_is_there(
    tmp_path: Path, late: LateDevice, transport: str, bucket_bytes: int
) -> None:
    """What is there too early is NaN, which the parameter server refuses."""
    server = {"bucketBytes": bucket_bytes, "replicas": 2 if bucket_bytes == 1024 else 1}
    train(tmp_path, workers=2, transport=transport, parameterServer=server)
    assert {"copy", "wait", "compute after"} == {said.what for said in late.said}


def test_workers_that_add_up_gradients_wait_for_none_in_backward(tmp_path: Path, late: LateDevice) -> None:
    """A gradient that was added up before it is there would be NaN."""
    fields: dict[str, Any] = {"strategy": "all-reduce", "checkpoints": tmp_path / "c"}
    train(tmp_path, workers=2, note=lambda what: late.note(what, True), parameterServer=BUCKETS, **fields)
    for worker in ("worker-0", "worker-1"):
        assert_waits_outside(late, worker)


def assert_waits_outside(late: LateDevice, thread: str) -> None:
    """A thread has waited for gradients, but never between "begin" and "end"."""
    within, waited = False, 0
    for what in (said.what for said in late.said if said.thread == thread and said.down):
        within = what == "begin" or (within and what != "end")
        assert not (within and what == "wait")
        waited += what == "wait"
    assert waited


def test_a_codec_is_not_chosen_by_how_long_a_device_computes(
    tmp_path: Path, late: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = CodecSelection.busy

    @contextmanager
    def watched(self: CodecSelection) -> Iterator[None]:
        late.note("begin", True)
        with busy(self):
            yield
        late.note("end", True)

    # What counts as busy shows in nothing but a choice of codec, by real time.
    monkeypatch.setattr(CodecSelection, "busy", watched)
    train(tmp_path, workers=1, transport="shm", parameterServer=BUCKETS)  # it has one send thread
    assert_waits_outside(late, "send-0")


def test_backward_waits_for_no_copy_and_values_are_there_before_the_next_are_pulled(
    tmp_path: Path, late: LateDevice
) -> None:
    train(tmp_path, workers=1, parameterServer=BUCKETS)
    down = [said for said in late.said if said.down]
    assert {said.thread for said in down if said.what == "copy"} == {"worker-0"}
    waiting = {said.thread for said in down if said.what == "wait"}
    assert waiting, "gradients are waited for"
    assert all(thread.startswith("send-") for thread in waiting), "where they are sent"
    steps = [list(said) for _, said in groupby(_up(late.said), key=lambda said: said.what)]
    assert [said[0].what for said in steps] == ["copy", "compute after", "wait"] * (len(steps) // 3) + [
        "copy",
        "compute after",
    ] * (len(steps) % 3 > 0)
    assert len(steps) > 100, "some steps"


def test_the_mean_of_gradients_goes_to_a_device_all_at_once(tmp_path: Path, late: LateDevice) -> None:
    train(tmp_path, workers=1, strategy="all-reduce", checkpoints=tmp_path / "c", parameterServer=BUCKETS)
    steps = [[*said] for _, said in groupby(_up(late.said), key=lambda said: said.what)]
    assert [said[0].what for said in steps] == ["copy", "compute after", "wait"] * (len(steps) // 3)
    assert {len(said) for said in steps[::3]} == {len([*make_mlp().parameters()])}
    assert len(steps) > 100, "some steps"


def _up(said: list[Said]) -> list[Said]:
    return [each for each in said if not each.down]


def test_page_locked_memory_is_given_back(tmp_path: Path, late: LateDevice) -> None:
    pinned = []
    pin = late.pin

    def noting(memory: torch.Tensor) -> Any:
        pinned.append(memory.nbytes)
        return pin(memory)

    late.pin = noting  # type: ignore[method-assign]
    train(tmp_path, workers=1)
    weights = sum(p.nbytes for p in make_mlp().parameters())
    assert sum(pinned) == 2 * weights, "of values and of contributions"
    eventually(lambda: gc.collect() >= 0 and late.pinned == 0, "none is left")


def test_a_codec_waits_for_the_gradients_that_it_encodes(tmp_path: Path, late: LateDevice) -> None:
    """An encoder that looked too early would send NaN as it is, and be refused."""
    data = Numbers(80)

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(data, 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
        assert all(bool(p.isfinite().all()) for p in model.parameters())

    with running_job(tmp_path, compression={"codec": "int8"}, parameterServer=BUCKETS) as job:
        job.run(script, workers=2)
        assert_each_record_once(job.commits(), records=len(data), epochs=1)
        assert job.status().traffic.pushed_bytes < job.status().traffic.pushed_plain_bytes / 2


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device here: the stand-in alone tests the order of copies"
)
def test_a_job_on_cuda_trains_what_one_process_trains(tmp_path: Path) -> None:
    train(tmp_path, workers=2, device="cuda", parameterServer=BUCKETS)


@pytest.mark.parametrize(
    "fields",
    [
        {"parameterServer": {"replicas": 2}},
        {"compression": {"codec": "fp16", "values": "changed"}},
        {"compression": {"values": "int8"}},
        {"strategy": "all-reduce"},
        {"compression": {"codec": "auto"}},
        {"consistency": {"mode": "local", "steps": 2, "outer": "easgd"}},
        {"consistency": {"mode": "local", "steps": 2, "outer": "delayed"}},
    ],
)
def test_the_default_device_is_not_for_what_travels(tmp_path: Path, fields: dict[str, Any]) -> None:
    """`meta` stands in for a GPU. torch's own loader does not bear it, so the default ends with each step."""
    models = Models()

    def script(session: Session) -> None:
        model = make_mlp()
        model.register_buffer("empty", torch.zeros(0))
        made: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with torch.device("meta"):
            optimizer = session.optimizer(made, model)
        for x, y in session.loader(Numbers(40), 4):
            with torch.device("meta"):
                optimizer.zero_grad()
                mse(model, x, y).backward()
                optimizer.step()
        with torch.device("meta"):
            state = optimizer.state_dict()["state"]
        assert state[0]["momentum_buffer"].any()
        models[session.worker] = model

    with running_job(tmp_path, **fields) as job:
        job.run(script, workers=1)
        assert_each_record_once(job.commits(), records=40, epochs=1)
    for name, value in make_mlp().named_parameters():
        assert not torch.equal(models[0].get_parameter(name), value)


def test_the_default_device_is_not_for_a_state_that_is_brought(tmp_path: Path) -> None:
    def made(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def script(session: Session) -> None:
        model = make_mlp()
        before, new = made(model), made(model)
        mse(model, *next(iter(torch.utils.data.DataLoader(Numbers(8), 8)))).backward()
        before.step()
        with torch.device("meta"):
            optimizer = session.optimizer(new, model, state=before.state_dict())
            there = optimizer.state_dict()["state"]
        for number, kept in before.state_dict()["state"].items():
            assert torch.equal(there[number]["momentum_buffer"], kept["momentum_buffer"])

    with running_job(tmp_path) as job:
        job.run(script, workers=1)


@pytest.mark.parametrize("alone", [True, False])
def test_the_default_device_is_not_for_rows_of_tables(tmp_path: Path, alone: bool) -> None:
    """Two layers share the table, so their gradients are added up."""

    def trained(session: Session, default: str) -> dict[str, torch.Tensor]:
        layers = [Embedding("rows", 1, optimizer=SGD(lr=0.5)) for _ in range(2)]
        head = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(head.weight)
        model = torch.nn.ModuleList([*layers, head])
        optimizer = session.optimizer(sgd(model), model)
        for x, _ in session.loader(Numbers(40), 4):
            ids = x[:, 0].abs().mul(4).long()
            with torch.device(default):
                optimizer.zero_grad()
                head(layers[0](ids) + layers[1](ids)).square().mean().backward()
                optimizer.step()
        return {"rows": layers[0](torch.arange(4)).detach(), "weight": head.weight.detach().clone()}

    def train(directory: Path, default: str) -> dict[str, torch.Tensor]:
        if alone:
            with closing(connect()) as session:
                return trained(session, default)
        found: dict[str, torch.Tensor] = {}
        with running_job(directory, parameterServer={"replicas": 2}) as job:
            job.run(lambda session: found.update(trained(session, default)), workers=1)
        return found

    torch.testing.assert_close(train(tmp_path / "a", "meta"), train(tmp_path / "b", "cpu"), rtol=0, atol=0)


def test_the_default_device_is_not_for_tensors_that_a_script_keeps(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        values = torch.arange(6.0).view(2, 3)
        with torch.device("meta"):
            session.server.init("kept", values)
            session.server.push("kept", values).wait()
            pulled.append(session.server.pull("kept"))

    pulled: list[torch.Tensor] = []
    with running_job(tmp_path) as job:
        job.run(script, workers=1)
    assert torch.equal(pulled[0], 2 * torch.arange(6.0).view(2, 3))
