"""Mode `local` with a quorum: slow workers are waited for a little, and their exchanges count later."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastic_ps.worker.session import Session
from tests.integration.test_local_steps import (
    BATCH,
    Dying,
    adamw,
    check_histories,
    local,
    reference,
    train,
)
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.oracle import assert_each_record_once, assert_equal_up_to_round_off, mse
from tests.testing.polling import eventually
from tests.testing.trained import training


@pytest.mark.parametrize("outer", ["diloco", "average"])
def test_with_a_quorum_of_all_workers_it_is_the_rule_of_the_paper(tmp_path: Path, outer: str) -> None:
    data, models = Numbers(172), dict[int, torch.nn.Module]()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(adamw(model), model)
        train(session, model, optimizer, session.loader(data, BATCH))
        models[session.worker] = model

    with running_job(
        tmp_path,
        consistency=local(3, outer, quorum=2, grace="60s"),
        data={"shardRecords": 8},
        worker={"replicas": 2, "minReplicas": 2},
    ) as job:
        job.run(script, workers=2)
        commits, rule = job.commits(), job.spec.consistency
        check_histories(job, data)
    for model in models.values():
        assert_equal_up_to_round_off(model, make_mlp(), lambda m: reference(commits, data, m, adamw, rule))


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_slow_worker_is_not_waited_for_and_what_it_has_trained_counts(
    tmp_path: Path, fragments: int
) -> None:
    """It takes part for the first time when others have made five versions, and dies with its next steps."""
    data = Numbers(600)

    def hold(number: int) -> None:
        if number == 3:
            eventually(lambda: job.version >= 5, "the others make versions")

    with running_job(
        tmp_path,
        consistency=local(4, quorum=2, grace="0s", fragments=fragments),
        data={"shardRecords": 32},
        worker={"replicas": 3, "minReplicas": 2},
        parameterServer={"bucketBytes": 1024},
    ) as job:
        script = Dying(job, data, worker=2, last=5, waits=30, hold=hold)
        for worker in range(3):
            job.start(worker, script)
        job.until(script.dead.is_set, "worker 2 dies")
        job.start(2, script)
        job.join()
        check_histories(job, data)
        commits = job.commits()
    assert_each_record_once(commits, records=600, epochs=1)
    late = [c["staleness"] for commit in commits for c in commit["contributions"] if c["worker"] == 2]
    assert max(late) >= 3
    assert max(len(commit["contributions"]) for commit in commits) >= 2


def test_a_round_waits_for_the_others_as_long_as_grace_says(tmp_path: Path) -> None:
    """Here, until they come: each round of the time in which all take part has all of them."""
    data = Numbers(240)

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(adamw(model), model)
        for number, (x, y) in enumerate(session.loader(data, BATCH)):
            if number == 0:
                eventually(lambda: all(training(job, w) for w in range(2)), "both have records")
            if session.worker == 1 and number in (4, 8):  # the other's exchange is there, and a tick is over
                eventually(lambda: bool(job.coordinator.job.state.rounds.lagging), "worker 0 is waited for")
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    with running_job(
        tmp_path,
        consistency=local(4, quorum=1, grace="60s"),
        data={"shardRecords": 60},
        worker={"replicas": 2},
    ) as job:
        job.run(script, workers=2)
        check_histories(job, data)
        commits = job.commits()
    assert [len(commit["contributions"]) for commit in commits][:4] == [2, 2, 2, 2]
