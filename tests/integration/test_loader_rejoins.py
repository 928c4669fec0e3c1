"""A parameter server that is lost while a worker asks for the rest of a batch."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from elastic_ps.drill.history import Data, check
from elastic_ps.drill.recorded import read
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.worker.session import Session
from tests.testing.harness import Indexes, Job, Numbers, Tally, make_mlp, running_job
from tests.testing.inside import runtime_of
from tests.testing.oracle import assert_each_record_once, mse
from tests.testing.trained import sgd


def lose_server_in_request(number: int, session: Session, job: Job, lost: list[int]) -> None:
    """Restart the parameter server just before request `number` for records that does not wait, once.

    The model's version is put into `lost` then.
    """
    calls = 0
    take = runtime_of(session).client.take

    def taken(request: pb.TakeRequest) -> pb.TakeReply:
        nonlocal calls
        calls += not request.wait
        if calls == number and not lost:
            lost.append(session.version)
            job.restart(0)
        return take(request)

    runtime_of(session).client.take = taken  # type: ignore[method-assign]


@pytest.mark.parametrize("ahead", [0, 2], ids=["half a batch in hand", "batches fetched ahead"])
def test_what_was_handed_out_before_is_dropped(tmp_path: Path, ahead: int) -> None:
    """Hand-outs of 8 records make one batch of 5 and a part of the next, which needs another hand-out."""
    data, lost = Numbers(60), list[int]()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        lose_server_in_request(2, session, job, lost)
        source = torch.utils.data.DataLoader(data, batch_size=5, num_workers=ahead)
        for x, y in session.loader(source):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    with running_job(
        tmp_path,
        checkpoints=tmp_path / "checkpoints",
        consistency={"deterministic": True},
        data={"shardRecords": 8},
    ) as job:
        job.start(0, script)
        job.join()
    assert lost
    histories = read(tmp_path / "history")
    assert check(histories, Data(len(data), 1)) == []
    assert len(histories.joined) == 2, "a step on what was dropped would be refused, and it would join again"


def train_pairs(
    directory: Path, records: int, request_number: int, *, together: bool, overlap: bool = True
) -> None:
    """Two batches make a step, and the parameter server is lost between them; the model counts records.

    Args:
        together: both batches are loaded before the script computes.
    """
    lost, counted = list[int](), list[torch.Tensor]()

    def script(session: Session) -> None:
        model = Tally(records)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, overlap=overlap)
        lose_server_in_request(request_number, session, job, lost)
        batches, held = iter(session.loader(Indexes(records), 4)), 1
        while held:
            pair, held = itertools.islice(batches, 2), 0
            for batch in list(pair) if together else pair:
                held += 1
                with optimizer.no_sync() if held < 2 else nullcontext():
                    model(batch).backward()
            if held:
                optimizer.step()
                optimizer.zero_grad()
        counted.append(-model.weight.detach())

    with running_job(
        directory,
        checkpoints=directory / "checkpoints",
        parameterServer={"checkpoint": {"everyVersions": 1}},
        data={"shardRecords": 4},
    ) as job:
        job.start(0, script)
        job.join()
    assert lost
    assert check(read(directory / "history"), Data(records, 1)) == []
    assert counted[0].tolist() == [1.0] * records


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("request_number", [3, 5], ids=["in the middle", "at the end"])
def test_gradients_of_records_that_are_dropped_are_dropped_too(
    tmp_path: Path, overlap: bool, request_number: int
) -> None:
    train_pairs(tmp_path, 20, request_number, together=False, overlap=overlap)


@pytest.mark.parametrize(
    "request_number", [2, 3, 5], ids=["first group", "between groups", "in a later group"]
)
def test_batches_that_are_loaded_together_are_lost_together(tmp_path: Path, request_number: int) -> None:
    train_pairs(tmp_path, 24, request_number, together=True)


def test_a_script_that_begins_its_step_again_as_the_session_says_comes_to_an_end(tmp_path: Path) -> None:
    """The worker is declared gone with a batch that it leaves out. All is void until it has made a step."""
    records, gone, begun = 24, list[int](), 0

    def script(session: Session) -> None:
        nonlocal begun
        model = Tally(records)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        held, generation = 0, session.generation
        for batch in session.loader(Indexes(records), 4):
            if session.generation != generation:
                held, generation, begun = 0, session.generation, begun + 1
                assert begun < 10, "it begins again with each batch"
            if session.version == 1 and not gone:
                gone.append(session.version)
                job.declare_gone(0)
                continue
            held += 1
            if held < 2:
                with optimizer.no_sync():
                    model(batch).backward()
                continue
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            held = 0

    with running_job(tmp_path, data={"shardRecords": 4}) as job:
        job.start(0, script)
        job.join()
        assert_each_record_once(job.commits(), records=records, epochs=1)
    assert gone
