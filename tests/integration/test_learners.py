"""Mode `local` with workers of several processes: all of them make the same local steps, as one learner.

The reference is that of `test_local_steps`: plain torch in one process, which makes each local step on the
whole batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from elastic_ps.core.balance import Balance
from elastic_ps.errors import InvalidModel, UsageError
from elastic_ps.local import Launcher, Options
from elastic_ps.worker.session import Session
from tests.integration.test_local_steps import BATCH, adamw, check_histories, local, reference
from tests.testing import histories
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.inside import runtime_of
from tests.testing.launching import forks, gone, make_job, version_of, wait_for_end, wait_for_workers
from tests.testing.oracle import assert_each_record_once, assert_equal_up_to_round_off, mse
from tests.testing.polling import eventually
from tests.testing.tiers import per_change

STEADY = "tests.testing.scripts.steady:main"
Place = tuple[int, int]
"""A worker, and which one of its processes."""


class Learners:
    """What the processes of a job's workers have come to.

    Args:
        each: called before each local step with the session, the process's rank and the step's number.

    Attributes:
        models, optimizers: by the places of the processes.
    """

    def __init__(
        self,
        data: Numbers,
        *,
        batch: int = BATCH,
        epochs: int = 1,
        make: Callable[[torch.nn.Module], torch.optim.Optimizer] = adamw,
        model: Callable[[], torch.nn.Module] = make_mlp,
        each: Callable[[Session, int, int], object] = lambda session, rank, step: None,
    ) -> None:
        self.models: dict[Place, torch.nn.Module] = {}
        self.optimizers: dict[Place, torch.optim.Optimizer] = {}
        self._data, self._batch, self._epochs = data, batch, epochs
        self._make, self._model, self._each = make, model, each

    def __call__(self, session: Session, rank: int) -> None:
        model = self._model()
        own = self._make(model)
        optimizer = session.optimizer(own, model)
        place = session.worker, rank
        self.models[place], self.optimizers[place] = model, own
        for step, (x, y) in enumerate(session.loader(self._data, self._batch, epochs=self._epochs)):
            optimizer.zero_grad()
            loss = mse(model, x, y)
            loss.backward()
            self._each(session, rank, step)
            session.report(loss=loss)
            optimizer.step()

    def assert_same_bits(self) -> None:
        """The processes of each worker have the same parameters, and the same state of their optimizers."""
        for (worker, rank), model in self.models.items():
            first = self.models[worker, 0]
            for ours, theirs in zip(model.parameters(), first.parameters(), strict=True):
                assert torch.equal(ours, theirs), (worker, rank)
            ours, theirs = (self.optimizers[worker, r].state_dict()["state"] for r in (rank, 0))
            assert ours.keys() == theirs.keys()
            assert ours, "the optimizer has made no step"
            for number, entries in ours.items():
                for key, value in entries.items():
                    assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[number][key]))


def await_exchange(session: Session) -> None:
    """If an exchange is under way, block until it is over; it has not been taken over then."""
    local = runtime_of(session).local
    if local is not None and local.started is not None:
        local.started.future.wait()


@pytest.mark.parametrize(
    ("outer", "workers", "processes"),
    per_change(
        [
            ("average", 1, 2),
            ("diloco", 1, 2),
            ("diloco", 1, 3),
            ("diloco", 2, 2),
            ("delayed", 2, 2),
            ("downpour", 2, 2),
            ("easgd", 1, 2),
        ],
        keep=[("diloco", 1, 3), ("delayed", 2, 2)],
    ),
)
def test_a_learner_trains_as_one_process_does_with_the_whole_batch(
    tmp_path: Path, outer: str, workers: int, processes: int
) -> None:
    """The batches do not divide by three, and the last one has fewer records than that."""
    data = Numbers(162)
    learners = Learners(data)
    with running_job(
        tmp_path,
        consistency=local(3, outer),
        data={"shardRecords": 8},
        worker={"processes": processes, "replicas": 2},
        parameterServer={"replicas": 2, "bucketBytes": 1024},
    ) as job:
        for worker in range(workers):
            job.start_processes(worker, learners)
        job.join()
        commits, rule = job.commits(), job.spec.consistency
        check_histories(job, data)
    learners.assert_same_bits()
    each = [c for commit in commits for c in commit["contributions"]]
    assert max(len(c["records"]) for c in each) == 3, "three local steps are one exchange"
    assert sum(len(c["records"]) for c in each) == 41, "each batch is one range"
    assert len(learners.models) == workers * processes
    for model in learners.models.values():
        assert_equal_up_to_round_off(model, make_mlp(), lambda m: reference(commits, data, m, adamw, rule))


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": 2},
        {"overlap": 1, "outer": "downpour"},
        {"fragments": 2},
        {"fragments": 2, "outer": "easgd"},
        {"quorum": 1, "grace": "100ms"},
        {"fragments": 2, "overlap": 1, "quorum": 1, "grace": "100ms"},
        {"balance": "speed"},
    ],
    ids=lambda options: ", ".join(f"{key} {value}" for key, value in options.items()),
)
def test_other_ways_to_exchange(tmp_path: Path, options: dict[str, Any]) -> None:
    data = Numbers(200)
    learners = Learners(data, epochs=2)
    with running_job(
        tmp_path,
        consistency=local(4, **options),
        data={"shardRecords": 8},
        worker={"processes": 2, "replicas": 2},
        parameterServer={"bucketBytes": 1024},
    ) as job:
        for worker in range(2):
            job.start_processes(worker, learners)
        job.join()
        check_histories(job, data, epochs=2)
        assert_each_record_once(job.commits(), records=200, epochs=2)
    learners.assert_same_bits()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_version_counts_from_where_it_is_taken_over(tmp_path: Path, processes: int) -> None:
    """Scripts may go by `session.version` and `world_size`, so all processes have to see the same."""
    data, seen = Numbers(16 * BATCH), dict[int, list[tuple[int, int]]]()

    def look(session: Session, rank: int, step: int) -> None:
        await_exchange(session)
        seen.setdefault(rank, []).append((session.version, session.world_size))

    with running_job(
        tmp_path, consistency=local(4, overlap=2), worker={"processes": processes, "replicas": 3}
    ) as job:
        job.start_processes(0, Learners(data, each=look))
        job.join()
    assert seen == dict.fromkeys(range(processes), [(0, 3)] * 6 + [(1, 1)] * 4 + [(2, 1)] * 4 + [(3, 1)] * 2)


def test_fewer_steps_than_overlap_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameter server may give a slow worker so few: all processes exchange the same fragment still."""
    # By measured speeds it would be another share on each machine.
    monkeypatch.setattr(Balance, "weight", lambda balance, who: 1 / 3)
    data, seen = Numbers(160), dict[int, list[torch.Tensor]]()

    def look(session: Session, rank: int, step: int) -> None:
        await_exchange(session)
        parameters = learners.models[session.worker, rank].parameters()
        seen.setdefault(rank, []).append(torch.cat([each.detach().flatten() for each in parameters]))

    learners = Learners(data, each=look)
    rule = local(12, fragments=2, overlap=5, balance="speed")
    with running_job(
        tmp_path, consistency=rule, worker={"processes": 2}, parameterServer={"bucketBytes": 1024}
    ) as job:
        job.start_processes(0, learners)
        job.join()
        check_histories(job, data)
        samples = [c["samples"] for commit in job.commits() for c in commit["contributions"]]
    assert all(torch.equal(*each) for each in zip(*seen.values(), strict=True))
    assert samples[3:-1] == [4 * BATCH] * (len(samples) - 4), "each fragment once in four steps"


@pytest.mark.parametrize("codec", ["int8", "topk"])
def test_what_is_pushed_is_encoded_once(tmp_path: Path, codec: str) -> None:
    data, pushed = Numbers(80), dict[int, int]()
    for processes in (1, 2):
        learners = Learners(data)
        with running_job(
            tmp_path / str(processes),
            consistency=local(1),
            compression={"codec": codec},
            worker={"processes": processes},
        ) as job:
            job.start_processes(0, learners)
            job.join()
            check_histories(job, data)
            pushed[processes] = sum(member.traffic.pushed_bytes for member in job.status().members)
        learners.assert_same_bits()
    assert 0 < pushed[2] == pushed[1]


def test_a_gradient_that_some_slices_do_not_have(tmp_path: Path) -> None:
    """It counts as zero. If no process has one, the optimizer leaves the parameter as it is."""
    data, results = Numbers(40), dict[int, torch.nn.Module]()

    def loss_of(model: Any, x: torch.Tensor, used: bool) -> Any:
        return model[0](x).square().mean() + (model[1](x).square().mean() if used else 0)

    def make() -> torch.nn.Module:
        return torch.nn.ModuleList([make_mlp(), make_mlp(seed=1), make_mlp(seed=2)])

    def script(session: Session, rank: int) -> None:
        model = make()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1), model)
        for step, (x, _) in enumerate(session.loader(data, 10)):
            optimizer.zero_grad()
            loss_of(model, x, used=step == rank or step == 3).backward()
            optimizer.step()
        results[rank] = model

    rule = local(2, outerLearningRate=1, outerMomentum=0)
    with running_job(tmp_path, consistency=rule, worker={"processes": 2}, data={"shuffle": False}) as job:
        job.start_processes(0, script)
        job.join()
    expected = make()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(2):
            x = data.x[step * 10 + rank * 5 : step * 10 + rank * 5 + 5]
            (0.5 * loss_of(expected, x, used=step == rank or step == 3)).backward()
        optimizer.step()
    for result in results.values():
        for ours, theirs in zip(result.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("processes", [1, 3])
def test_an_optimizer_that_evaluates_the_loss_itself(tmp_path: Path, processes: int) -> None:
    """LBFGS searches along a line by the losses, so all processes must have the same."""
    data = Numbers(48)
    models, losses = dict[int, torch.nn.Module](), dict[int, list[float]]()

    def lbfgs(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    def step(model: torch.nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> float:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = mse(model, x, y)
            loss.backward()
            return loss

        return float(optimizer.step(closure).detach())

    def script(session: Session, rank: int) -> None:
        model = make_mlp()
        optimizer = session.optimizer(lbfgs(model), model)
        losses[rank] = [step(model, optimizer, x, y) for x, y in session.loader(data, 12)]
        models[rank] = model

    rule = local(2, outerLearningRate=1, outerMomentum=0)
    worker = {"processes": processes}
    with running_job(tmp_path, consistency=rule, worker=worker, data={"shuffle": False}) as job:
        job.start_processes(0, script)
        job.join()
    plain = make_mlp()
    optimizer = lbfgs(plain)
    expected = [step(plain, optimizer, data.x[i : i + 12], data.y[i : i + 12]) for i in range(0, 48, 12)]
    assert all(losses[rank] == losses[0] for rank in range(processes))
    assert losses[0] == pytest.approx(expected, rel=1e-3)
    for model in models.values():
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_statistics_of_normalisation_become_the_mean_over_the_processes(tmp_path: Path) -> None:
    """At an exchange; in between each process has those of its slices."""
    data, norms = Numbers(40), dict[int, Any]()

    def script(session: Session, rank: int) -> None:
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for x, y in session.loader(data, 5):
            mse(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        norms[rank] = model[0]

    rule, given = local(4, "average"), {"shuffle": False}
    with running_job(tmp_path, consistency=rule, worker={"processes": 2}, data=given) as job:
        job.start_processes(0, script)
        job.join()
    mean: Any = torch.zeros(6)
    for exchanged in data.x.split(20):
        means = [mean, mean]
        for batch in exchanged.split(5):
            parts = torch.tensor_split(batch, [3])
            means = [0.9 * own + 0.1 * part.mean(0) for own, part in zip(means, parts, strict=True)]
        mean = 0.6 * means[0] + 0.4 * means[1]
    for norm in norms.values():
        torch.testing.assert_close(norm.running_mean, mean)
        assert norm.num_batches_tracked == 8


@pytest.mark.parametrize("options", [{}, {"overlap": 2}, {"outer": "easgd"}], ids=str)
def test_it_joins_again_when_the_parameter_server_is_lost(tmp_path: Path, options: dict[str, Any]) -> None:
    data = Numbers(160)

    def lose(session: Session, rank: int, step: int) -> None:
        if (rank, step) == (1, 11):
            job.restart(0)

    learners = Learners(data, each=lose)
    with running_job(
        tmp_path,
        consistency=local(3, **options),
        worker={"processes": 2},
        parameterServer={"checkpoint": {"everyVersions": 1}},
        checkpoints=tmp_path / "checkpoints",
    ) as job:
        job.start_processes(0, learners)
        job.join()
        assert job.status().term > 1
        check_histories(job, data)
    learners.assert_same_bits()


@pytest.mark.parametrize("overlap", [None, 2])
def test_a_worker_that_is_asked_to_leave_exchanges_what_it_has(tmp_path: Path, overlap: int | None) -> None:
    """Asked in one of its processes; the records of its local steps count as its own."""
    data, left = Numbers(120), threading.Event()

    def leave(session: Session, rank: int, step: int) -> None:
        if session.worker == 0:
            eventually(left.is_set, "worker 1 has left")
        elif (rank, step) == (1, 6):
            session.drain()

    learners = Learners(data, each=leave)
    options = {} if overlap is None else {"overlap": overlap}
    rule = local(4, "downpour", **options)
    with running_job(
        tmp_path, consistency=rule, data={"shardRecords": 40}, worker={"processes": 2, "replicas": 2}
    ) as job:
        job.start_processes(1, learners)
        job.until(lambda: not any(thread.is_alive() for thread in job.threads), "worker 1 leaves")
        left.set()
        samples = [c["samples"] for commit in job.commits() for c in commit["contributions"]]
        assert samples == [4 * BATCH, 3 * BATCH]
        job.start_processes(0, learners)
        job.join()
        check_histories(job, data)
    learners.assert_same_bits()


def test_what_one_process_reports_is_part_of_the_mean(tmp_path: Path) -> None:
    data, seen = Numbers(40), list[float]()

    def script(session: Session, rank: int) -> None:
        model = make_mlp()
        optimizer = session.optimizer(adamw(model), model)
        for x, y in session.loader(data, 5):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            session.report(rank=rank)
            optimizer.step()
        seen.append(job.status().progress.metrics["rank"])

    with running_job(tmp_path, consistency=local(4), worker={"processes": 2}) as job:
        job.start_processes(0, script)
        job.join()
    assert seen == [pytest.approx(0.4)] * 2


def test_a_gradient_that_is_sparse_in_two_dimensions_is_refused(tmp_path: Path) -> None:
    def script(session: Session, rank: int) -> None:
        model = torch.nn.Embedding(4, 2)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for _ in session.loader(Numbers(8), 4):
            torch.gather(model.weight, 1, torch.tensor([[rank]]), sparse_grad=True).sum().backward()
            optimizer.step()

    with running_job(tmp_path, consistency=local(2), worker={"processes": 2}) as job:
        job.start_processes(0, script)
        with pytest.raises(InvalidModel, match=r"sparse in 2 dimensions.*leave out sparse_grad=True"):
            job.join()


@pytest.mark.parametrize("overlap", [None, 2])
def test_a_loop_that_one_process_leaves_is_named(tmp_path: Path, overlap: int | None) -> None:
    """It exchanges its local steps, while the others are about to make another one."""

    def script(session: Session, rank: int) -> None:
        model = make_mlp()
        optimizer = session.optimizer(adamw(model), model)
        loop: Any = iter(session.loader(Numbers(40), 4))
        for step, (x, y) in enumerate(loop):
            if rank == 1 and step == 6:
                break
            mse(model, x, y).backward()
            optimizer.step()
        loop.close()  # what is raised when Python itself closes it cannot be caught

    rule = local(5) if overlap is None else local(5, overlap=overlap)
    with running_job(tmp_path, consistency=rule, worker={"processes": 2}) as job:
        job.start_processes(0, script)
        where = "the exchange of local steps" if overlap is None else "the end of an exchange"
        with pytest.raises(UsageError, match=rf"0 is at optimizer.step\(\), process 1 at {where}"):
            job.join()


# --- real processes


@pytest.mark.nightly
def test_a_process_that_is_killed_ends_its_learner_whose_records_others_train(tmp_path: Path) -> None:
    hurry = tmp_path / "hurry"
    job = make_job(
        spec={
            "entrypoint": STEADY,
            "worker": {"replicas": 2, "processes": 2},
            "consistency": local(4, "average"),
        },
        records=1200,
        batch_size=4,
        seconds=0.4,
        hurry=str(hurry),
    )
    with Launcher(
        job, Options(forks=forks(), root=tmp_path / "state", history=tmp_path / "history")
    ) as launcher:
        launcher.start()
        first = wait_for_workers(launcher, lambda w: len(w) == 2, "both train")
        eventually(lambda: version_of(launcher) > 1, "two exchanges")
        children = sorted(psutil.Process(first[1]).children(), key=lambda child: child.create_time())
        assert len(children) == 2
        children[1].kill()
        wait_for_workers(launcher, lambda w: w.get(1) not in (None, first[1]), "it is replaced")
        assert gone(children[0].pid)
        assert wait_for_workers(launcher, lambda w: 0 in w, "the other one goes on")[0] == first[0]
        hurry.touch()
        wait_for_end(launcher)
        outcome = launcher.outcome()
    assert outcome.verdict.phase == "Succeeded", outcome.verdict
    histories.check_histories(tmp_path / "history", records=1200, epochs=1)
