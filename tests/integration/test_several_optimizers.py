"""Several optimizers train the networks of a model, each with its own class, as plain torch does."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.checkpoint.plain import export, load_checkpoint
from elastic_ps.errors import InvalidModel, ModelMismatch, UsageError
from elastic_ps.worker.session import Session
from tests.testing import gan
from tests.testing.gan import (
    DATA,
    RECORDS,
    Networks,
    adam_and_sgd,
    make_networks,
    run,
    same_bits,
    trainer,
)
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.optimizers import Lion
from tests.testing.oracle import assert_each_record_once, mse
from tests.testing.polling import LIMIT
from tests.testing.trained import adam, await_standbys, sgd, training

FIXED: dict[str, Any] = {
    "consistency": {"deterministic": True},
    "worker": {"replicas": 2},
    "data": {"shardRecords": 8},
}


def server(shards: int, **fields: Any) -> dict[str, Any]:
    return {"replicas": shards, "bucketBytes": 1024, **fields}


@pytest.mark.parametrize("shards", [1, 2])
def test_two_classes_have_the_bits_of_plain_torch(tmp_path: Path, shards: int) -> None:
    """Gradients that a loss leaves in the other network count for nothing; a schedule is of one of them."""
    networks: Networks = {}
    with running_job(tmp_path, parameterServer=server(shards), **FIXED) as job:
        run(job, 2, trainer(networks, epochs=2))
        commits = job.commits()
        plain, _ = gan.alone(commits, job)
    assert_each_record_once(commits, records=RECORDS, epochs=2)
    assert any(len(commit["contributions"]) == 2 for commit in commits)
    assert same_bits(networks[0], plain)
    assert same_bits(networks[1], plain)
    first = make_networks()
    assert not any(same_bits(plain[name], first[name]) for name in ("generator", "critic"))


@pytest.mark.covering(1)
@pytest.mark.parametrize("durability", ["checkpoint", "standby"])
@pytest.mark.parametrize("version", [7, 14])
def test_a_lost_parameter_server_loses_neither_state(tmp_path: Path, durability: str, version: int) -> None:
    def finals(directory: Path, *, lose: bool) -> torch.nn.Module:
        networks, once = Networks(), threading.Lock()
        fields = server(2, durability=durability, checkpoint={"everyVersions": 3, "interval": "1h"})
        with running_job(directory, checkpoints=directory / "kept", parameterServer=fields, **FIXED) as job:

            def each(session: Session) -> None:
                if durability == "standby" and session.version == 3:
                    await_standbys(job)
                ready = session.version >= version and (durability == "checkpoint" or job.followed)
                if lose and ready and once.acquire(blocking=False):
                    job.restart(0)

            run(job, 2, trainer(networks, epochs=2, each=each))
            assert job.status().progress.records_applied == 2 * RECORDS
            assert (job.status().term > 1) == lose
        assert same_bits(networks[0], networks[1])
        return networks[0]

    assert same_bits(finals(tmp_path / "1", lose=True), finals(tmp_path / "2", lose=False))


def test_a_job_goes_on_from_a_checkpoint_with_both_states(tmp_path: Path) -> None:
    """Also on another number of shards, which cut the parameters in another way."""
    networks: Networks = {}
    kept = tmp_path / "kept"
    with running_job(tmp_path / "1", checkpoints=kept, parameterServer=server(1)) as job:
        run(job, 1, trainer(networks, epochs=2, until=13))
        commits = job.commits()
    assert len(commits) == 13
    fields = server(2)
    with running_job(tmp_path / "2", checkpoints=kept, resume="require", parameterServer=fields) as job:
        run(job, 1, trainer(networks, epochs=2))
        commits += job.commits()
        plain, _ = gan.alone(commits, job)
    assert_each_record_once(commits, records=RECORDS, epochs=2)
    assert same_bits(networks[0], plain)


def test_a_checkpoint_has_both_states(tmp_path: Path) -> None:
    """The script fetches them by their names, a checkpoint is loaded into torch's own optimizers."""
    networks, kept, found = Networks(), tmp_path / "kept", dict[str, Any]()

    def ended(session: Session, optimizers: Any) -> None:
        found.update(optimizers.state_dict())
        assert optimizers["critic"].state_dict()["param_groups"] == found["critic"]["param_groups"]

    with running_job(tmp_path, checkpoints=kept, parameterServer=server(2)) as job:
        run(job, 1, trainer(networks, ended=ended))
        plain, expected = gan.alone(job.commits(), job)
    for name, optimizer in expected.items():
        gan.assert_same_state(found[name], optimizer.state_dict())
    both = make_networks(seed=5)
    loaded = adam_and_sgd(both)
    load_checkpoint(kept, both, loaded)
    assert same_bits(both, plain)
    for name, optimizer in expected.items():
        # A checkpoint has the rates of its version's step, before the schedule goes on.
        gan.assert_same_state(loaded[name].state_dict(), optimizer.state_dict(), besides={"lr", "initial_lr"})
    assert export(kept, tmp_path / "both.pt")[1] == len(both.state_dict())
    other = make_networks(seed=5)
    other.load_state_dict(torch.load(tmp_path / "both.pt"))
    assert same_bits(other, plain)
    reversed_ones = dict(reversed(adam_and_sgd(both).items()))
    cases: list[tuple[Any, str]] = [
        (adam(both), "the optimizer is a Adam, but the checkpoint was made with Adam.SGD.SGD"),
        (reversed_ones, "the optimizers are SGD.SGD.Adam, but the checkpoint was made with Adam.SGD.SGD"),
    ]
    for wrong, match in cases:
        with pytest.raises(ModelMismatch, match=match):
            load_checkpoint(kept, both, wrong)


def test_a_job_begins_with_the_states_of_both(tmp_path: Path) -> None:
    """The first half is plain torch."""
    networks: Networks = {}
    with running_job(tmp_path / "1") as job:
        run(job, 1, trainer(networks))
        plain, optimizers = gan.alone(job.commits(), job)
    states = {name: copy.deepcopy(optimizer.state_dict()) for name, optimizer in optimizers.items()}
    values = copy.deepcopy(plain.state_dict())
    noise, real = (torch.stack(column) for column in zip(*(DATA[i] for i in range(4)), strict=True))
    for name in ("critic", "generator"):
        plain.zero_grad()
        gan.loss(plain, name, noise, real).backward()
        optimizers[name].step()

    def script(session: Session) -> None:
        both = networks[0] = make_networks()
        both.load_state_dict(values)
        own = adam_and_sgd(both)
        with pytest.raises(InvalidModel, match=r"the state_dict\(\) of each of them by its name"):
            session.optimizer(adam_and_sgd(both), both, state=states["critic"])
        elastic = session.optimizer(own, both, state=states)
        assert not any(optimizer.state for optimizer in own.values()), "it is on the parameter server now"
        for _, name in zip(session.loader(DATA, 4), ("critic", "generator"), strict=False):
            elastic.zero_grad()
            gan.loss(both, name, noise, real).backward()
            elastic[name].step()
        session.stop("enough")

    with running_job(tmp_path / "2", parameterServer=server(2)) as job:
        run(job, 1, script)
    assert same_bits(networks[0], plain)


def test_all_optimizers_step_at_once(tmp_path: Path) -> None:
    """Each with the gradients of its own loss, computed on the same version."""
    ended: Networks = {}

    def losses(both: torch.nn.ModuleDict, noise: torch.Tensor, real: torch.Tensor) -> None:
        for name in ("critic", "generator"):
            gan.loss(both, name, noise, real).backward(inputs=list(both[name].parameters()))

    def script(session: Session) -> None:
        both = ended[session.worker] = make_networks()
        optimizers = session.optimizer(adam_and_sgd(both), both)
        for noise, real in session.loader(DATA, 4):
            optimizers.zero_grad()
            losses(both, noise, real)
            optimizers.step()

    with running_job(tmp_path, data={"shuffle": False}) as job:
        run(job, 1, script)
        assert len(job.commits()) == RECORDS // 4
    plain = make_networks()
    own = adam_and_sgd(plain)
    for start in range(0, RECORDS, 4):
        plain.zero_grad()
        losses(plain, DATA.noise[start : start + 4], DATA.real[start : start + 4])
        for optimizer in own.values():
            optimizer.step()
    assert same_bits(ended[0], plain)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"strategy": "all-reduce"}, id="all-reduce"),
        pytest.param(
            {"consistency": {"mode": "local", "steps": 1, "outerLearningRate": 1, "outerMomentum": 0}},
            id="local",
        ),
    ],
)
def test_the_steps_are_made_on_the_workers(tmp_path: Path, fields: dict[str, Any]) -> None:
    networks, kept = Networks(), tmp_path / "kept"
    with running_job(tmp_path, checkpoints=kept, **fields) as job:
        run(job, 1, trainer(networks, epochs=2))
        commits = job.commits()
        plain, _ = gan.alone(commits, job)
    assert_each_record_once(commits, records=RECORDS, epochs=2)
    for ours, theirs in zip(networks[0].parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


def test_replicas_of_both_states_are_the_same_on_all_workers(tmp_path: Path) -> None:
    """With strategy all-reduce, also when a worker joins later."""
    networks, states, joined = Networks(), dict[int, Any](), threading.Event()

    def each(session: Session) -> None:
        if session.worker == 0 and session.version == 9:
            joined.set()
            job.until(lambda: training(job, 1), "worker 1 takes part")

    def ended(session: Session, optimizers: Any) -> None:
        states[session.worker] = optimizers.state_dict()

    kept = tmp_path / "kept"
    with running_job(tmp_path, strategy="all-reduce", checkpoints=kept) as job:
        script = trainer(networks, epochs=3, each=each, ended=ended)
        job.start(0, script)
        assert joined.wait(LIMIT)
        job.start(1, script)
        job.join()
        assert any(len(commit["contributions"]) == 2 for commit in job.commits())
        plain, _ = gan.alone(job.commits(), job)
    assert same_bits(networks[0], networks[1])
    for name in ("generator", "critic"):
        # The rate is of the next step on the worker that has made the last one, of that on another.
        gan.assert_same_state(states[0][name], states[1][name], besides={"lr"})
    for ours, theirs in zip(networks[0].parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "consistency",
    [
        pytest.param({}, id="sync"),
        pytest.param({"mode": "local", "steps": 1, "outerLearningRate": 1, "outerMomentum": 0}, id="local"),
    ],
)
def test_all_processes_of_a_worker_step_the_same_network(tmp_path: Path, consistency: dict[str, Any]) -> None:
    networks: Networks = {}
    script = trainer(networks, epochs=2)
    with running_job(tmp_path, consistency=consistency, worker={"processes": 2}) as job:
        job.start_processes(0, lambda session, rank: script(session))
        job.join()
        plain, _ = gan.alone(job.commits(), job)
    for ours, theirs in zip(networks[0].parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_the_norm_of_the_network_that_steps_is_limited(tmp_path: Path) -> None:
    """Gradients that are sent may be changed before the step, too, and made by several backward passes."""
    ends: Networks = {}

    def script(session: Session) -> None:
        both = ends[session.worker] = make_networks()
        optimizers = session.optimizer(adam_and_sgd(both), both, max_grad_norm=0.01)
        for noise, real in session.loader(DATA, 4):
            name = gan.turn(session.version)
            optimizers.zero_grad()
            for half in (slice(0, 2), slice(2, 4)):
                gan.loss(both, name, noise[half], real[half]).backward()
            torch.nn.utils.clip_grad_value_(both.parameters(), 0.1)
            optimizers[name].step()

    with running_job(tmp_path, data={"shuffle": False}, parameterServer=server(2)) as job:
        run(job, 1, script)
    plain = make_networks()
    own = adam_and_sgd(plain)
    for version, start in enumerate(range(0, RECORDS, 4)):
        name = gan.turn(version)
        plain.zero_grad()
        for half in (slice(start, start + 2), slice(start + 2, start + 4)):
            gan.loss(plain, name, DATA.noise[half], DATA.real[half]).backward()
        torch.nn.utils.clip_grad_value_(plain.parameters(), 0.1)
        torch.nn.utils.clip_grad_norm_(plain[name].parameters(), 0.01)
        own[name].step()
    for ours, theirs in zip(ends[0].parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_one_of_them_is_a_class_of_the_users(tmp_path: Path) -> None:
    def make(both: torch.nn.ModuleDict) -> dict[str, torch.optim.Optimizer]:
        return {**adam_and_sgd(both), "generator": Lion(both["generator"].parameters(), lr=0.001)}

    networks: Networks = {}
    fields = server(2, optimizers=["tests.testing.optimizers:Lion"])
    with running_job(tmp_path, parameterServer=fields) as job:
        run(job, 1, trainer(networks, make))
        plain, _ = gan.alone(job.commits(), job, make)
    assert same_bits(networks[0], plain)


def test_one_of_them_knows_the_names_of_its_parameters(tmp_path: Path) -> None:
    def make(both: torch.nn.ModuleDict) -> dict[str, torch.optim.Optimizer]:
        named = torch.optim.Adam(both["generator"].named_parameters(), lr=0.01, fused=True)
        return {**adam_and_sgd(both), "generator": named}

    networks, found = Networks(), dict[str, Any]()

    def ended(session: Session, optimizers: Any) -> None:
        found.update(optimizers.state_dict())

    with running_job(tmp_path) as job:
        run(job, 1, trainer(networks, make, ended=ended))
        plain, expected = gan.alone(job.commits(), job, make)
    assert same_bits(networks[0], plain)
    for name, optimizer in expected.items():
        gan.assert_same_state(found[name], optimizer.state_dict())


@pytest.mark.parametrize(
    ("fields", "choose"),
    [
        ({}, r"by session\.version"),
        ({"consistency": {"mode": "local", "steps": 2}}, "by the number of the batch"),
    ],
    ids=["sync", "local"],
)
def test_each_batch_is_for_one_step(tmp_path: Path, fields: dict[str, Any], choose: str) -> None:
    def script(session: Session) -> None:
        both = make_networks()
        optimizers = session.optimizer(adam_and_sgd(both), both)
        for noise, real in session.loader(DATA, 4):
            for name in ("critic", "generator"):
                optimizers[name].zero_grad()
                gan.loss(both, name, noise, real).backward()
                optimizers[name].step()

    with (
        running_job(tmp_path, **fields) as job,
        pytest.raises(UsageError, match=rf"a second step is made with the same batch.*Choose {choose}"),
    ):
        run(job, 1, script)


def test_what_a_script_cannot_pass_is_refused(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        both = make_networks()
        for optimizers, match in [
            ({}, r"no optimizer; expected one or several"),
            ({"critic": both}, r"'critic': ModuleDict; expected names and torch optimizers"),
            (
                {"a": sgd(both), "b": adam(both["critic"])},
                r"critic\.0\.weight is in the optimizers 'a' and 'b'",
            ),
            (
                {"a": sgd(both["critic"]), "b": torch.optim.LBFGS(both["generator"].parameters())},
                "LBFGS cannot",
            ),
            ({"a": sgd(both["critic"]), "b": adam(make_mlp())}, "not parameters of the model"),
            (
                {
                    "a": sgd(both["critic"]),
                    "b": torch.optim.Adam(both["generator"].parameters(), differentiable=True),
                },
                r"param_groups\[1\] has differentiable=True",
            ),
        ]:
            with pytest.raises(InvalidModel, match=match):
                session.optimizer(optimizers, both)  # type: ignore[arg-type]
        wrapped = adam_and_sgd(both)
        optimizers = session.optimizer(wrapped, both)
        with pytest.raises(UsageError, match=r"no optimizer 'discriminator'.*'generator', 'critic'"):
            optimizers["discriminator"]
        for noise, real in session.loader(DATA, 4):
            gan.loss(both, "critic", noise, real).backward()
            with pytest.raises(UsageError, match="on the torch optimizer that was passed"):
                wrapped["critic"].step()
            with pytest.raises(UsageError, match="cannot be added"):
                optimizers["critic"].add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
            with pytest.raises(UsageError, match="cannot load the optimizer's state"):
                optimizers["critic"].load_state_dict(wrapped["critic"].state_dict())
            optimizers["critic"].step()

    with running_job(tmp_path) as job:
        run(job, 1, script)


def test_another_worker_has_other_classes(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        both = make_networks()
        optimizers = adam_and_sgd(both)
        if session.worker == 1:
            optimizers["critic"] = sgd(both["critic"])
        session.optimizer(optimizers, both)

    with running_job(tmp_path) as job, pytest.raises(ModelMismatch, match=r"Adam\+SGD, .* Adam\+SGD\+SGD"):
        run(job, 2, script)


def test_one_optimizer_has_no_names(tmp_path: Path) -> None:
    """With a name it is still the optimizer that a job has always had."""
    ends: dict[str, torch.nn.Module] = {}

    def script(session: Session) -> None:
        model = ends["one"] = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        with pytest.raises(UsageError, match="was given one optimizer without a name"):
            optimizer["all"]

    def named(session: Session) -> None:
        model = ends["named"] = make_mlp()
        optimizers = session.optimizer({"all": sgd(model)}, model)
        for x, y in session.loader(Numbers(20), 4):
            optimizers["all"].zero_grad()
            mse(model, x, y).backward()
            optimizers["all"].step()

    with running_job(tmp_path / "1") as job:
        run(job, 1, script)
    kept = tmp_path / "kept"
    with running_job(tmp_path / "2", checkpoints=kept) as job:
        run(job, 1, named)
    model = make_mlp()
    load_checkpoint(kept, model, sgd(model))
    assert same_bits(model, ends["named"])
