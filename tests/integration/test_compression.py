"""Training with codecs: accuracy, exact records, rounds that start again, a parameter server that is lost."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic_ps
from elastic_ps.codec.changes import make_delta
from elastic_ps.codec.plan import make
from elastic_ps.contrib.datasets import digits
from elastic_ps.contrib.models import accuracy
from elastic_ps.drill.history import Data, check
from elastic_ps.drill.recorded import read
from elastic_ps.errors import InvalidJob
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.inside import vanish
from tests.testing.oracle import (
    assert_each_record_once,
    assert_equal_up_to_round_off,
    mse,
    of_the_end,
    replay,
)
from tests.testing.polling import LIMIT, eventually
from tests.testing.tiers import per_change
from tests.testing.trained import Models, alone, sgd, together, training
from tests.testing.transports import whole_jobs
from tests.unit.codec.test_codecs import Negative

BOUNDED = {"mode": "bounded", "maxStaleness": 4}
NEGATIVE = "tests.unit.codec.test_codecs:Negative"


def trainer(models: Models, data: Numbers, *, make: Any = sgd, loaded: Callable[[Any], Any] = iter) -> Any:
    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(make(model), model)
        models[session.worker] = model
        for x, y in loaded(session.loader(data, 4)):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    return script


@pytest.mark.parametrize("shards", [1, 2])
def test_a_lossless_codec_changes_nothing_also_if_the_server_is_lost(tmp_path: Path, shards: int) -> None:
    """To round-off of the order in which contributions are added up."""
    data, models = Numbers(240), Models()
    server = {"replicas": shards, "bucketBytes": 1024, "checkpoint": {"everyVersions": 4, "interval": "1h"}}
    with running_job(
        tmp_path,
        transport="grpc",
        checkpoints=tmp_path / "checkpoints",
        parameterServer=server,
        compression={"codec": NEGATIVE, "rules": [{"match": "*bias", "codec": "none"}]},
    ) as job:
        for worker in range(2):
            job.start(worker, trainer(models, data))
        job.until(lambda: (job.status().progress.durable_version or 0) >= 4, "a checkpoint")
        job.restart(0)
        job.join()
        assert job.status().term == 2
        commits = of_the_end(job.commits())
    assert_each_record_once(commits, records=len(data), epochs=1)
    assert_equal_up_to_round_off(models[0], make_mlp(), lambda m: replay(commits, data, m, sgd, job.spec))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "compression",
    [
        {"codec": "int8"},
        {"codec": "topk", "options": {"ratio": 0.05}},
        {"codec": "signsgd", "rules": [{"match": "*.bias", "codec": "none"}]},
        {"codec": "powersgd", "options": {"rank": 2}, "lossless": "zstd"},
        {"codec": "topk", "options": {"ratio": 0.05}, "values": "int8"},
    ],
    ids=lambda compression: compression["codec"] + compression.get("values", ""),
)
def test_the_digits_are_learned(tmp_path: Path, compression: dict[str, Any]) -> None:
    """Each record counts once. Plain gradients reach 0.93 to 0.97, as the first values have it."""
    training, test = digits()
    reached: dict[int, float] = {}

    def script(session: Session) -> None:
        torch.manual_seed(1)
        linear = torch.nn.Linear
        model = torch.nn.Sequential(torch.nn.Flatten(), linear(64, 64), torch.nn.ReLU(), linear(64, 10))
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
        for images, labels in session.loader(training, 32, epochs=12):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        reached[session.worker] = accuracy(model, *test.tensors)

    with running_job(tmp_path, compression=compression) as job:
        job.run(script, workers=2)
        commits, counts = job.commits(), job.status().traffic
    assert_each_record_once(commits, records=len(training), epochs=12)
    steps = sum(len(commit["contributions"]) for commit in commits)
    plain = 4 * sum(p.numel() for p in make_mlp((64, 64, 10)).parameters())
    assert plain * steps * 0.99 <= counts.pushed_plain_bytes <= plain * steps
    assert counts.pushed_bytes < counts.pushed_plain_bytes / 3
    assert 0 < counts.pulled_bytes <= counts.pulled_plain_bytes
    assert counts.encode_seconds > 0
    assert reached[0] == reached[1]
    assert reached[0] > 0.92


@pytest.mark.parametrize(
    ("compression", "steps", "share"),
    [
        ({"codec": "int4"}, 10, 0.15 / 10),
        pytest.param(
            {"codec": "topk", "options": {"ratio": 0.05, "warmup": 40}}, 1, 0.2, marks=pytest.mark.nightly
        ),
    ],
    ids=["int4", "topk"],
)
def test_exchanges_of_local_steps_are_encoded(
    tmp_path: Path, compression: dict[str, Any], steps: int, share: float
) -> None:
    """The digits are learned from them. Each record counts once, though a worker dies with steps of its own.

    `share`: of the bytes that gradients would have taken, at most.
    """
    training_set, test = digits()
    reached: dict[int, float] = {}
    dead = threading.Event()

    def script(session: Session) -> None:
        torch.manual_seed(1)
        linear = torch.nn.Linear
        model = torch.nn.Sequential(torch.nn.Flatten(), linear(64, 64), torch.nn.ReLU(), linear(64, 10))
        dies = session.worker == 1 and not dead.is_set()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model)
        for number, (images, labels) in enumerate(session.loader(training_set, 32, epochs=12)):
            if session.worker == 0 and number == 0:
                eventually(lambda: training(job, 1) or dead.is_set(), "worker 1 has records")
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            if dies and number == 34:
                vanish(session)
                job.declare_gone(1)
                dead.set()
                return
        reached[session.worker] = accuracy(model, *test.tensors)

    rule = {"outer": "diloco", "outerMomentum": 0.6} if steps > 1 else {"outer": "average"}
    with running_job(
        tmp_path,
        compression=compression,
        consistency={"mode": "local", "steps": steps, **rule},
    ) as job:
        for worker in range(2):
            job.start(worker, script)
        job.until(dead.is_set, "worker 1 dies")
        job.start(1, script)
        job.join()
        counts = job.status().traffic
        assert check(read(job.history), Data(len(training_set), 12), max_staleness=0) == []
        assert_each_record_once(job.commits(), records=len(training_set), epochs=12)
        records = sum(c["samples"] for commit in job.commits() for c in commit["contributions"])
    plain = 4 * sum(p.numel() for p in make_mlp((64, 64, 10)).parameters()) * records / 32
    assert 0 < counts.pushed_bytes < share * plain
    assert reached[0] == reached[1]
    assert reached[0] > 0.92


def test_a_codec_of_the_users_own_keeps_its_state(tmp_path: Path) -> None:
    states: list[dict[str, Any]] = []
    usual = Negative.encode

    def encode(self: Negative, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Any:
        states.append(state)
        return usual(self, tensor, state, random)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Negative, "encode", encode)
        alone(tmp_path, trainer(Models(), Numbers(40)), compression={"codec": NEGATIVE})
    assert [state["calls"] for state in states] == list(range(1, 11))


def test_values_are_assigned_exactly(tmp_path: Path) -> None:
    """A codec is for gradients."""
    seen: list[bool] = []

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for step, (x, y) in enumerate(session.loader(Numbers(40), 4)):
            if step == 3:
                with torch.no_grad():
                    wanted = [p.mul_(1.001).clone() for p in model.parameters()]
                session.assign(model)
                seen.append(all(torch.equal(p, w) for p, w in zip(model.parameters(), wanted, strict=True)))
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    alone(tmp_path, script, compression={"codec": "int4"})
    assert seen == [True]


@pytest.mark.parametrize("mode", per_change([{"mode": "sync"}, BOUNDED], keep=[BOUNDED]))
def test_all_workers_compute_on_rounded_values(tmp_path: Path, mode: dict[str, Any]) -> None:
    """Also the one that brings the model, and one that joins later; the parameter server steps float32 ones.

    Buffers, and parameters that are frozen, are as they were.
    """
    data, models, first = Numbers(400), Models(), {}
    joined = threading.Event()

    def script(session: Session) -> None:
        model = make_mlp()
        model.register_buffer("mean", torch.full((3,), 1 / 3))
        model[0].requires_grad_(False)
        optimizer = session.optimizer(sgd(model), model, averaged=["mean"])
        first[session.worker] = session.version, values_of(model)
        for x, y in session.loader(data, 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            if session.worker == 0 and session.version == 3:
                joined.wait(LIMIT)
        models[session.worker] = model

    checkpoints = tmp_path / "checkpoints"
    with running_job(
        tmp_path,
        checkpoints=checkpoints,
        traces=tmp_path / "traces",
        parameterServer={"replicas": 2, "bucketBytes": 1024},
        compression={"codec": "fp16", "values": "bf16"},
        consistency=mode,
    ) as job:
        job.start(0, script)
        job.until(lambda: job.version >= 3, "version 3")
        job.start(1, script)
        job.until(lambda: 1 in first and training(job, 1), "worker 1 trains")
        joined.set()
        job.join()
    assert check(read(job.history), Data(len(data), 1), max_staleness=4) == []
    for name in ("encode", "decode"):
        spans = [event for event in trace_of(tmp_path / "traces", "worker-1") if event["name"] == name]
        assert spans
        assert all(event["args"]["bytes"] > 0 for event in spans)
    kept = make_mlp()
    kept.register_buffer("mean", torch.zeros(3))
    elastic_ps.load_checkpoint(checkpoints, kept)
    exact = values_of(kept)
    rounded = {name: value.bfloat16().float() for name, value in exact.items()}
    assert not torch.equal(exact["2.weight"], rounded["2.weight"])
    same = {name for name in exact if name.startswith("0.") or name == "mean"}
    expected = {name: exact[name] if name in same else rounded[name] for name in exact}
    for model in models.values():
        assert_same(values_of(model), expected)
    begun = values_of(make_mlp())
    assert first[0][0] == 0
    for name, value in begun.items():
        assert torch.equal(first[0][1][name], value if name in same else value.bfloat16().float()), name
    assert first[1][0] >= 3
    assert torch.equal(first[1][1]["2.weight"], first[1][1]["2.weight"].bfloat16().float())


def trace_of(traces: Path, process: str) -> list[dict[str, Any]]:
    (file,) = traces.glob(f"{process}-*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def values_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@whole_jobs
@pytest.mark.parametrize("values", ["int8", "topk"])
def test_deltas_train_what_one_process_trains_that_computes_on_them(
    tmp_path: Path, values: str, transport: str
) -> None:
    """To the bit: gradients are those at the values that workers have, and exact values are stepped."""
    data, models = Numbers(80), Models()
    compression = {"values": values}
    checkpoints = tmp_path / "checkpoints"
    with running_job(tmp_path, transport=transport, checkpoints=checkpoints, compression=compression) as job:
        job.start(0, trainer(models, data))
        job.join()
        commits, spec, traffic = job.commits(), job.spec, job.status().traffic
    assert traffic.pulled_bytes < traffic.pulled_plain_bytes / 2
    reference = make_mlp()
    parameters = list(reference.parameters())[::-1]  # in the order of the bucket
    codec = make(values, {})
    assert codec is not None
    held = flat(parameters)

    def at_what_workers_have(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        exact = [p.data for p in parameters]
        version = at["version"]
        if version:
            make_delta(codec, held, flat(parameters), bucket=0, since=0, version=version)
        for p, own in zip(parameters, held.split([p.numel() for p in parameters]), strict=True):
            p.data = own.view(p.shape).clone()

        def restore(*_: object) -> None:
            for p, own in zip(parameters, exact, strict=True):
                p.data = own
            handle.remove()

        handle = at["optimizer"].register_step_pre_hook(restore)
        return mse(model, x, y)

    at: dict[str, Any] = {}

    def fused(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=True)

    def note(version: int, _: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        at.update(version=version, optimizer=optimizer)

    replay(commits, data, reference, fused, spec, loss=at_what_workers_have, before=note)
    exact = flat(parameters)
    kept = make_mlp()
    elastic_ps.load_checkpoint(checkpoints, kept)
    assert torch.equal(flat(list(kept.parameters())[::-1]), exact)
    make_delta(codec, held, exact, bucket=0, since=0, version=len(commits))
    assert torch.equal(flat(list(models[0].parameters())[::-1]), held)
    assert not torch.equal(held, exact)


@whole_jobs
def test_changed_elements_train_the_same_bits_as_all_values(tmp_path: Path, transport: str) -> None:
    """Few elements change where workers send few, and the optimizer has no momentum."""
    data, found = Numbers(80), dict[str, torch.Tensor]()
    for values in ("none", "changed"):
        models = Models()
        sent = {"codec": "topk", "options": {"ratio": 0.05, "momentum": 0.9}, "values": values}
        with running_job(tmp_path / values, transport=transport, compression=sent) as job:
            job.start(0, trainer(models, data, make=without_momentum))
            job.join()
            traffic = job.status().traffic
        found[values] = flat(list(models[0].parameters()))
    assert torch.equal(found["changed"], found["none"])
    assert traffic.pulled_bytes < 0.2 * traffic.pulled_plain_bytes


def without_momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02)


def flat(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    return torch.cat([p.detach().view(-1) for p in parameters])


@pytest.mark.parametrize(
    "mode",
    per_change(
        [
            {"mode": "sync"},
            {"mode": "sync", "backupWorkers": 1},
            {"mode": "accumulate", "gradients": 2},
            BOUNDED,
            {"mode": "local", "steps": 3},
        ],
        keep=[BOUNDED],
    ),
    ids=lambda mode: "-".join(str(value) for value in mode.values()),
)
def test_all_workers_have_the_same_values_with_deltas(tmp_path: Path, mode: dict[str, Any]) -> None:
    """Also one that joins later, and in mode sync all of them when a shard was lost."""
    data, models, joined = Numbers(400), Models(), threading.Event()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        if session.worker:
            joined.set()
        for x, y in session.loader(data, 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            if session.version >= 4:
                joined.wait(LIMIT)
        models[session.worker] = model

    with running_job(
        tmp_path,
        checkpoints=tmp_path / "checkpoints",
        parameterServer={
            "replicas": 2,
            "bucketBytes": 1024,
            "checkpoint": {"everyVersions": 3, "interval": "1h"},
        },
        compression={"codec": "int8", "values": "int8"},
        consistency=mode,
    ) as job:
        job.start(0, script)
        job.start(1, script)
        job.until(lambda: joined.is_set() and job.version >= 6, "both train")
        if mode == {"mode": "sync"}:
            job.restart(1)
        job.join()
        traffic = job.status().traffic
    assert check(read(job.history), Data(len(data), 1), max_staleness=4) == []
    assert traffic.pulled_bytes < traffic.pulled_plain_bytes
    assert_same(values_of(models[0]), values_of(models[1]))


def test_each_worker_chooses_and_says_what(tmp_path: Path) -> None:
    """With an error of 0 it can only be `none`, and the result is that of plain gradients."""
    data, models = Numbers(240), Models()
    with running_job(
        tmp_path,
        transport="grpc",
        parameterServer={"replicas": 2, "bucketBytes": 1024},
        compression={"codec": "auto", "maxError": 0},
    ) as job:
        for worker in range(2):
            job.start(worker, trainer(models, data, loaded=lambda loader: together(job, loader, 2)))
        job.join()
        commits, members = job.commits(), job.status().members
    assert [member.traffic.codec for member in members] == ["none", "none"]
    assert all(member.traffic.push_seconds > 0 for member in members)
    assert_each_record_once(commits, records=len(data), epochs=1)
    assert_equal_up_to_round_off(models[0], make_mlp(), lambda m: replay(commits, data, m, sgd, job.spec))


def test_a_codec_that_does_not_exist_is_said_before_anything_starts(tmp_path: Path) -> None:
    with (
        pytest.raises(InvalidJob, match=r"no\.such:Codec cannot be imported"),
        running_job(tmp_path, compression={"codec": "no.such:Codec"}),
    ):
        pass
