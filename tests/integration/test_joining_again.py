"""Workers that were declared gone, though they live, and join again."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.worker.session import Session
from tests.testing.harness import Job, Numbers, make_mlp, running_job
from tests.testing.inside import runtime_of
from tests.testing.oracle import assert_each_record_once, mse
from tests.testing.polling import LIMIT, eventually


def instance_of(job: Job, worker: int) -> str:
    """The name of the process that is a worker."""
    return job.coordinator.job.state.members.live[worker].instance


def test_a_worker_that_joins_again_in_a_step_waits_to_be_admitted(tmp_path: Path) -> None:
    """Also if it has just used up the records in hand, so that it asks for some while it iterates."""
    data = Numbers(400)
    gone, again = threading.Event(), threading.Event()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for step, (x, y) in enumerate(session.loader(data, 4)):
            mse(model, x, y).backward()
            if session.worker == 0 and step == 3:
                job.coordinator.gone(0, instance_of(job, 0))
                gone.set()
                eventually(lambda: taken[0] >= 3, "worker 1 has taken what worker 0 held")
            if session.worker == 1 and gone.is_set():
                taken[0] += 1
                if taken[0] >= 4:
                    assert again.wait(LIMIT)
            optimizer.step()
            if session.generation:
                again.set()

    taken = [0]
    with running_job(tmp_path, data={"shardRecords": 8}) as job:
        job.run(script, workers=2)
        assert_each_record_once(job.commits(), records=len(data), epochs=1)
        assert [member.worker for member in job.status().members].count(0) == 2, "worker 0 joined again"


def test_who_was_declared_gone_does_not_wait_for_a_version(tmp_path: Path) -> None:
    """Else a worker whose parameter server was frozen would wait for the old incarnation's answer."""
    refused: list[RefusalCode] = []

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for step, (x, y) in enumerate(session.loader(Numbers(40), 4)):
            mse(model, x, y).backward()
            if step == 3:
                job.coordinator.gone(0, instance_of(job, 0))
                member, version = runtime_of(session).client.member_id, session.version + 1
                wanted = pb.PullRequest(version=version, buckets=[0], attempt=9, contributor=True)
                with pytest.raises(Refused) as refusal:
                    list(runtime_of(session).client.pull(member, 0, wanted))
                refused.append(refusal.value.code)
            optimizer.step()

    with running_job(tmp_path) as job:
        job.start(0, script)
        job.join()
        assert_each_record_once(job.commits(), records=40, epochs=1)
    assert refused == [RefusalCode.STALE_INCARNATION]
