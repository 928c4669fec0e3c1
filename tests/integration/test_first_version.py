"""Workers compute on version 0 before it is on disk. A parameter server that is lost then gets it again."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from elastic_ps.checkpoint.store import Store
from elastic_ps.errors import ConnectionLost, RefusalCode, Refused, StorageUnavailable
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Connection, Frame
from elastic_ps.worker.session import Session
from tests.testing import machine
from tests.testing.harness import Job, Numbers, make_mlp, running_job
from tests.testing.oracle import assert_each_record_once, mse
from tests.testing.watched import Watched

DATA = Numbers(24)
WORKERS = 2


class Scene:
    """A job whose disk is full until a test says otherwise.

    Attributes:
        sessions: of the workers, in the order in which they have joined.
    """

    def __init__(self, patch: pytest.MonkeyPatch, checkpoints: Path) -> None:
        self.store, self.full, self.sessions = Store(checkpoints), True, list[Session]()
        error = StorageUnavailable("No space left on device")
        machine.fails(patch, Store, "write_shard", error, lambda: self.full)

    def train(self, session: Session) -> None:
        model = self.make_model(session.worker)
        optimizer = session.optimizer(torch.optim.Adam(model.parameters()), model)
        self.sessions.append(session)
        for x, y in session.loader(DATA, 4):
            mse(model, x, y).backward()
            optimizer.step()

    def make_model(self, worker: int) -> torch.nn.Sequential:
        """With values that tell whose they are."""
        return make_mlp(seed=worker)

    def start(self, job: Job) -> None:
        """Let the workers join one after the other, and make their first steps."""
        for worker in range(WORKERS):
            job.start(worker, self.train)
            job.until(lambda: len(self.sessions) > worker, "the worker has entered")  # noqa: B023

    def first_values(self, worker: int) -> list[torch.Tensor]:
        return [parameter.detach().flatten() for parameter in self.make_model(worker).parameters()]

    def stored(self) -> list[torch.Tensor]:
        with self.store.open(0) as stored:
            specs = enumerate(stored.manifest.specs)
            return [stored.value(index, 0, spec.elements) for index, spec in specs]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Scene:
    return Scene(monkeypatch, tmp_path / "checkpoints")


def finished(job: Job) -> bool:
    """Whether all workers have finished a step of the open round."""
    with job.coordinator.job.lock:
        return len(job.coordinator.job.state.rounds.done) == WORKERS


@pytest.mark.parametrize("standby", [False, True], ids=["", "standby"])
@pytest.mark.parametrize(("shards", "lost"), [(1, 0), (2, 0), (2, 1)])
def test_a_parameter_server_that_is_lost_before_version_0_is_on_disk_gets_it_again(
    scene: Scene, tmp_path: Path, shards: int, lost: int, standby: bool
) -> None:
    server = {
        "replicas": shards,
        "bucketBytes": 4096,
        "checkpoint": {"keep": 100},
        "durability": "standby" if standby else "checkpoint",
    }
    with running_job(tmp_path, checkpoints=scene.store.directory, parameterServer=server) as job:
        scene.start(job)
        job.until(lambda: finished(job), "both have made a step with version 0")
        assert job.version == 0
        assert job.status().progress.durable_version is None
        job.restart(lost)
        job.until(lambda: all(session.generation for session in scene.sessions), "both have joined again")
        job.until(lambda: finished(job), "both have made it again, with the values that they had")
        assert job.version == 0
        assert not scene.store.versions()
        scene.full = False
        job.join()
        assert_each_record_once(job.commits(), records=len(DATA), epochs=1)
    for found, brought in zip(scene.stored(), scene.first_values(0), strict=True):
        torch.testing.assert_close(found, brought, rtol=0, atol=0)


def test_first_values_do_not_lie_where_gradients_are_put(scene: Scene, tmp_path: Path) -> None:
    """A shard that reads them late, or once more, gets the same."""
    sent = list[tuple[memoryview, bytes]]()

    def note(method: str, frame: Frame) -> None:
        if method == "Init":
            sent.append((frame.body, bytes(frame.body)))

    with running_job(tmp_path, checkpoints=scene.store.directory) as job:
        job.through = lambda _, inner: Watched(inner, note)
        scene.start(job)
        job.until(lambda: finished(job), "both have made a step with version 0")
        assert sent
        assert all(memory == values for memory, values in sent)
        scene.full = False
        job.join()


class Assigning(Scene):
    """A job whose worker assigns a model before it trains. `apart`: weights have memory of their own."""

    apart = False

    def train(self, session: Session) -> None:
        model = self.make_model(session.worker)
        for parameter in model.parameters() if self.apart else ():
            parameter.data = parameter.data.t().contiguous().t()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
        self.sessions.append(session)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        session.assign(model)
        self.assigned = [parameter.detach().clone() for parameter in model.parameters()]
        for x, y in session.loader(DATA, 4):
            mse(model, x, y).backward()
            optimizer.step()


@pytest.mark.parametrize("apart", [False, True], ids=["", "apart"])
def test_an_assigned_model_is_kept_when_the_parameter_server_is_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, apart: bool
) -> None:
    scene = Assigning(monkeypatch, tmp_path / "checkpoints")
    scene.apart = apart
    with running_job(tmp_path, checkpoints=scene.store.directory) as job:
        job.start(0, scene.train)
        job.until(lambda: len(job.coordinator.job.state.rounds.done) == 1, "the values were pushed")
        job.restart(0)
        job.until(lambda: scene.sessions[0].generation > 0, "the worker has joined again")
        scene.full = False
        job.join()
    for values in scene.assigned:
        torch.testing.assert_close(values, torch.full_like(values, 0.5), rtol=0, atol=0)


def test_a_model_with_some_values_of_version_1_is_not_taken_for_version_0(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken, shards = set[int](), itertools.count()

    def through(_: int, inner: Connection) -> Connection:
        shard = next(shards)

        def cut(method: str, header: bytes) -> None:
            reply = pb.PullReply.FromString(header) if method == "Pull" else pb.PullReply()
            if reply.HasField("bucket") and reply.version == 1 and not reply.draft:
                taken.add(shard)
                if shard == 0:
                    raise ConnectionLost("cut")

        return Watched(inner, answer=cut)

    scene = Scene(monkeypatch, tmp_path / "unused")
    server = {"replicas": 2, "bucketBytes": 1024}
    with running_job(tmp_path, checkpoints=None, parameterServer=server) as job:
        job.through = through
        job.start(0, scene.train)
        job.until(lambda: taken == {0, 1}, "some values of version 1 have come")
        job.restart(0)
        with pytest.raises(Refused, match="has lost the model") as refused:
            job.join()
    assert refused.value.code is RefusalCode.MODEL_LOST


class Normalised(Scene):
    """A job whose model changes by `forward` alone, so that a worker cannot bring version 0 again."""

    def make_model(self, worker: int) -> torch.nn.Sequential:
        return torch.nn.Sequential(*make_mlp(seed=worker), torch.nn.BatchNorm1d(1))


def test_a_model_that_forward_changes_is_on_disk_before_it_is_trained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scene = Normalised(monkeypatch, tmp_path / "checkpoints")
    with running_job(tmp_path, checkpoints=scene.store.directory) as job:
        job.start(0, scene.train)
        job.until(lambda: "No space left" in job.status().problem, "version 0 was tried to be written")
        assert not job.status().ready
        scene.full = False
        job.join()
        assert scene.store.versions()
