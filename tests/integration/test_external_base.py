"""`base="external"`: what is frozen stays each worker's own, and all workers have to have the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.checkpoint.plain import export, load_checkpoint
from elastic_ps.collectives.groups import Group
from elastic_ps.errors import ModelMismatch, UsageError
from elastic_ps.transport import calls
from elastic_ps.transport.base import Frame
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, running_job
from tests.testing.oracle import assert_each_record_once, of_the_end, replay
from tests.testing.trained import adam, await_standbys, await_training, failing
from tests.testing.watched import Watched

WIDTH = 256
DATA = Numbers(64)


class Adapted(torch.nn.Module):
    """Frozen layers, with a quantised parameter and a buffer, and an adapter beside them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = torch.nn.Linear(6, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.second.register_buffer("scales", torch.randn(WIDTH))
        packed = torch.nn.Parameter(torch.arange(seed, seed + 64, dtype=torch.uint8), requires_grad=False)
        self.second.register_parameter("packed", packed)
        self.requires_grad_(False)
        torch.manual_seed(1)
        self.down, self.up = torch.nn.Linear(6, 2, bias=False), torch.nn.Linear(2, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.first(x))
        result: torch.Tensor = hidden.mean(1, keepdim=True) + self.up(self.down(x))
        return result


ONE, OTHER = Adapted(3).double(), Adapted(4).double()
"""Scripts copy them: threads share torch's random numbers."""


def loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.nn.functional.mse_loss(model(x.double()), y.double())


def fit(session: Session, model: torch.nn.Module, before: Callable[[int], object] = lambda _: None) -> None:
    optimizer = session.optimizer(adam(model), model, base="external")
    for step, (x, y) in enumerate(session.loader(DATA, 4)):
        before(step)
        optimizer.zero_grad()
        loss(model, x, y).backward()
        optimizer.step()


SHARDS: dict[str, Any] = {"replicas": 2, "bucketBytes": 1024}
STANDBYS = SHARDS | {"durability": "standby"}
OFTEN: dict[str, Any] = {"checkpoint": {"everyVersions": 1, "interval": "1h"}}


@pytest.mark.parametrize(
    ("server", "lost", "fields"),
    [
        pytest.param(OFTEN, 0, {}, id="parameter server"),
        pytest.param(OFTEN, None, {"strategy": "all-reduce"}, id="all-reduce"),
        pytest.param(SHARDS | OFTEN, 1, {}, id="shards", marks=pytest.mark.nightly),
        pytest.param(STANDBYS | OFTEN, 1, {}, id="standbys, shard 1", marks=pytest.mark.nightly),
        pytest.param(STANDBYS, 0, {"worker": {"processes": 2}}, id="standbys, shard 0, processes"),
        pytest.param(
            SHARDS | OFTEN, 0, {"worker": {"processes": 3}}, id="shards, processes", marks=pytest.mark.nightly
        ),
    ],
)
def test_adapters_of_two_workers_are_those_of_one_process(
    tmp_path: Path, server: dict[str, Any], lost: int | None, fields: dict[str, Any]
) -> None:
    """A parameter server is lost on the way, and a worker. No checkpoint has the base."""
    models, kept = dict[int, torch.nn.Module](), tmp_path / "kept"

    def script(session: Session, rank: int) -> None:
        model = copy.deepcopy(ONE)
        models.setdefault(session.worker, model)
        disturbs = session.worker == rank == 0

        def before(step: int) -> None:
            if step == 0:
                await_training(job, 0, 1)
            if step == 3 and disturbs and "durability" in server:
                await_standbys(job)
            if step == 5 and disturbs and lost is not None:
                if "durability" in server:
                    job.until(lambda: job.followed, "the standbys follow")
                job.restart(lost)
            if step == 2 and disturbs:
                job.declare_gone(1)

        fit(session, model, before)

    data = {"shardRecords": 4}
    with running_job(tmp_path, checkpoints=kept, parameterServer=server, data=data, **fields) as job:
        for worker in range(2):
            job.start_processes(worker, script)
        job.join()
        commits = of_the_end(job.commits())
        assert_each_record_once(commits, records=len(DATA), epochs=1)
        assert any(len(commit["contributions"]) > 1 for commit in commits)
        expected = copy.deepcopy(ONE)
        replay(commits, DATA, expected, adam, job.spec, loss=loss)
    for ours, theirs in zip(models[0].parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    files = [file.stat().st_size for file in kept.glob("version-*/*")]
    assert files
    assert max(files) < 8 * WIDTH * WIDTH / 10
    loaded = copy.deepcopy(ONE)
    optimizer = adam(loaded)
    assert load_checkpoint(kept, loaded, optimizer) == len(commits)
    assert len(optimizer.state) == 2
    for ours, theirs in zip(loaded.parameters(), models[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ModelMismatch, match=r"was trained on: first\.weight has other values"):
        load_checkpoint(kept, copy.deepcopy(OTHER))
    assert export(kept, tmp_path / "adapters.safetensors") == (len(commits), 2)


@pytest.mark.parametrize("strategy", ["parameter-server", "all-reduce"])
def test_workers_send_and_receive_the_adapters_only(
    tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that joins when the job has trained some steps."""
    sent, added = list[int](), list[int]()
    all_reduce = Group.all_reduce

    def adds(group: Group, tensor: torch.Tensor, **options: bool) -> None:
        added.append(tensor.nbytes)
        all_reduce(group, tensor, **options)

    def sends(method: str, frame: Frame) -> None:
        if method != calls.PROBE.name:
            sent.append(frame.body.nbytes)

    def script(session: Session) -> None:
        fit(session, copy.deepcopy(ONE), lambda step: await_training(job, 0, 1) if step == 3 else None)

    monkeypatch.setattr(Group, "all_reduce", adds)
    with running_job(tmp_path, strategy=strategy) as job:
        job.through = lambda _, inner: Watched(inner, sends)
        job.start(0, script)
        job.until(lambda: job.version == 3, "worker 0 has trained 3 steps")
        job.start(1, script)
        job.join()
        adapters = sum(8 * p.numel() for p in ONE.parameters() if p.requires_grad)
        traffic = [member.traffic for member in job.status().members]
        steps = sum(len(commit["contributions"]) for commit in job.commits())
        assert 0 < sum(each.pulled_bytes for each in traffic) <= 2 * (job.version + 1) * adapters
    pushed = sum(each.pushed_bytes for each in traffic)
    if strategy == "all-reduce":
        assert (pushed, {*added}) == (0, {adapters, 24}), "and how many have each gradient"
        assert 0 < sum(sent) <= 20 * adapters, "some versions, with Adam's moments"
    else:
        assert {*sent} == {0, adapters}
        assert (pushed >= steps * adapters, pushed % adapters) == (True, 0)


@pytest.mark.parametrize("differs", ["first.weight", "second.packed"])
def test_another_base_is_refused_by_name(tmp_path: Path, differs: str) -> None:
    other = copy.deepcopy(ONE)
    other.load_state_dict({differs: OTHER.state_dict()[differs]}, strict=False)

    def first(session: Session) -> None:
        fit(
            session,
            copy.deepcopy(ONE),
            lambda _: job.until(lambda: bool(refused), "the other one is refused"),
        )

    refused: list[str] = []

    def second(session: Session) -> None:
        with pytest.raises(ModelMismatch) as told:
            fit(session, other)
        refused.append(str(told.value))

    with running_job(tmp_path) as job:
        job.start(0, first)
        await_training(job, 0)
        job.start(1, second)
        job.join()
    assert f"{differs}: this worker has " in refused[0]
    assert "all workers need the same frozen values" in refused[0]


def test_another_base_in_another_process_is_refused_by_name(tmp_path: Path) -> None:
    def script(session: Session, rank: int) -> None:
        fit(session, copy.deepcopy(OTHER if rank else ONE))

    with running_job(tmp_path, worker={"processes": 2}) as job:
        job.start_processes(0, script)
        match = r"process 1 .* has first\.weight .* with other values in place"
        with pytest.raises(ModelMismatch, match=match):
            job.join()


@pytest.mark.parametrize("what", ["changed", "unfrozen"])
def test_a_base_that_changes_is_refused(tmp_path: Path, what: str) -> None:
    def script(session: Session) -> None:
        model = copy.deepcopy(ONE)

        def before(step: int) -> None:
            if step == 1 and what == "changed":
                with torch.no_grad():
                    model.first.weight.zero_()
            if step == 1 and what == "unfrozen":
                model.first.weight.requires_grad_()

        fit(session, model, before)

    match = {"changed": r"has changed first\.weight", "unfrozen": "requires_grad=True now"}[what]
    failing(tmp_path, script, UsageError, match)
