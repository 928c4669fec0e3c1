"""A job that begins with the state of an optimizer, as plain torch would go on with it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.codec.state import Stored
from elastic_ps.core.partition import Bucket
from elastic_ps.errors import InvalidModel, RefusalCode, Refused
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.inside import runtime_of
from tests.testing.oracle import mse
from tests.testing.trained import adam, alone, failing, sgd

RECORDS, BATCH = 40, 4
HALF = RECORDS // BATCH // 2
SHARDS = {"replicas": 2, "bucketBytes": 1024}
Make = Callable[[torch.nn.Module], torch.optim.Optimizer]


def plain_steps(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int, data: Numbers
) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        rows = slice(step * BATCH, (step + 1) * BATCH)
        mse(model, data.x[rows], data.y[rows]).backward()
        optimizer.step()


def nadam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.NAdam(model.parameters(), lr=0.01)


@pytest.mark.parametrize("make", [sgd, adam, nadam])
def test_it_goes_on_as_plain_torch_does(tmp_path: Path, make: Make) -> None:
    """The first half is plain torch, the second a job on two shards, whose tensors are cut into pieces."""
    data = Numbers(RECORDS)
    alone = make_mlp((6, 40, 1))
    optimizer = make(alone)
    plain_steps(alone, optimizer, 0, HALF, data)
    model = make_mlp((6, 40, 1))
    model.load_state_dict(alone.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] *= 0.5
    optimizer.param_groups[0]["lr"] *= 0.5
    plain_steps(alone, optimizer, HALF, 2 * HALF, data)
    seen: dict[str, Any] = {}

    def script(session: Session) -> None:
        own = make(model)
        elastic = session.optimizer(own, model, state=saved)
        assert not own.state, "it is on the parameter server now"
        rest = torch.utils.data.Subset(data, range(HALF * BATCH, RECORDS))
        for x, y in session.loader(rest, BATCH):
            elastic.zero_grad()
            mse(model, x, y).backward()
            elastic.step()
        seen.update(elastic.state_dict())

    with running_job(tmp_path, parameterServer=SHARDS, data={"shuffle": False}) as job:
        job.start(0, script)
        job.join()
    for one, other in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    expected = optimizer.state_dict()["state"]
    for number, entries in expected.items():
        for key, value in entries.items():
            torch.testing.assert_close(
                seen["state"][number][key], torch.as_tensor(value), rtol=1e-4, atol=1e-7, check_dtype=False
            )


@pytest.mark.parametrize("several", [False, True])
def test_the_state_of_a_model_in_half_precision_is_not_rounded(tmp_path: Path, several: bool) -> None:
    """Float16 has no 1e-8, and Adam would make far too large steps with the zero in its place."""
    model = make_mlp()
    optimizer = adam(model)
    plain_steps(model, optimizer, 0, 1, Numbers(RECORDS))
    saved = optimizer.state_dict()
    for entries in saved["state"].values():
        entries["exp_avg_sq"].fill_(1e-8)

    def script(session: Session) -> None:
        half = make_mlp().half()
        if several:
            elastic = session.optimizer({"all": adam(half)}, half, state={"all": saved})
        else:
            elastic = session.optimizer(adam(half), half, state=saved)
        state = elastic.state_dict()["all"] if several else elastic.state_dict()
        for number, entries in saved["state"].items():
            torch.testing.assert_close(state["state"][number], entries, rtol=0, atol=0)

    alone(tmp_path, script)


def test_limits_that_the_state_does_not_know_stay(tmp_path: Path) -> None:
    """The state is one of plain torch. What is given beside it counts."""
    saved = sgd(make_mlp()).state_dict()
    saved["param_groups"][0] |= {"lr": 0.25, "max_grad_norm": 7.0}
    found: dict[str, Any] = {}

    def script(session: Session) -> None:
        model = make_mlp()
        own = torch.optim.SGD([{"params": model.parameters(), "keep_zeros": True}], lr=0.1, momentum=0.9)
        session.optimizer(own, model, clamp=(-1.0, 1.0), max_grad_norm=0.5, state=saved)
        found.update(runtime_of(session).schedule.current().groups[0])

    with running_job(tmp_path) as job:
        job.start(0, script)
        job.join()
    limits = {"clamp": [-1.0, 1.0], "max_grad_norm": 0.5, "keep_zeros": True}
    assert {key: found[key] for key in ("lr", *limits)} == {"lr": 0.25, **limits}


def test_limits_are_those_that_are_given(tmp_path: Path) -> None:
    """The state of a job with limits has them in its groups."""
    saved = sgd(make_mlp()).state_dict()
    saved["param_groups"][0] |= {"clamp": (-1.0, 1.0), "max_grad_norm": 7.0, "max_norm": 2.0}
    saved["param_groups"][0] |= {"keep_zeros": True}
    found: dict[str, Any] = {}

    def script(session: Session) -> None:
        model = make_mlp()
        session.optimizer(sgd(model), model, state=saved)
        found.update(runtime_of(session).schedule.current().groups[0])

    with running_job(tmp_path) as job:
        job.start(0, script)
        job.join()
    assert found["lr"] == 0.02
    assert not found.keys() & {"clamp", "max_grad_norm", "max_norm", "keep_zeros"}


def test_a_worker_that_joins_later_gets_the_jobs_state(tmp_path: Path) -> None:
    """And a parameter server that is lost before the first step has it on disk."""
    model = make_mlp()
    optimizer = adam(model)
    plain_steps(model, optimizer, 0, 3, Numbers(RECORDS))
    saved = optimizer.state_dict()

    with running_job(tmp_path, checkpoints=tmp_path / "checkpoints") as job:

        def script(session: Session) -> None:
            elastic = session.optimizer(adam(model), model, state=saved)
            job.restart(0)
            for x, y in session.loader(Numbers(4), 4):
                elastic.zero_grad()
                mse(model, x, y).backward()
                elastic.step()
            steps = {float(entries["step"]) for entries in elastic.state_dict()["state"].values()}
            assert steps == {4.0}

        job.start(0, script)
        job.join()


def test_a_state_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    small, large = adam(make_mlp((6, 3, 1))), make_mlp((6, 4, 1))
    for group in small.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    small.step()

    def script(state: dict[str, Any]) -> Callable[[Session], Any]:
        return lambda session: session.optimizer(adam(large), large, state=state)

    failing(tmp_path / "a", script(small.state_dict()), InvalidModel, r"state has no 'exp_avg' of the shape")
    other = sgd(make_mlp((6, 4, 4, 1))).state_dict()
    failing(tmp_path / "b", script(other), InvalidModel, r"is not what state_dict\(\) of this Adam gives")
    failing(tmp_path / "c", script({}), InvalidModel, r"is not what state_dict\(\) of this Adam gives")
    other = sgd(make_mlp((6, 4, 1))).state_dict()
    failing(
        tmp_path / "d", script(other), InvalidModel, "its param_groups have no betas. Pass the state_dict"
    )


@pytest.mark.parametrize(
    "state",
    [
        [],
        [Stored(0, 0, "exp_avg", torch.zeros(16))],
        [Stored(0, 0, key, torch.zeros(1), scalar=True) for key in ("step", "evil")],
    ],
    ids=["nothing", "one", "another"],
)
def test_a_parameter_server_takes_only_what_its_optimizer_keeps(tmp_path: Path, state: list[Stored]) -> None:
    def script(session: Session) -> None:
        model = make_mlp((4, 4, 1))
        client = runtime_of(session).client
        initialise = client.initialise

        def spoil(bucket: Bucket, values: memoryview, *, version: int | None = None) -> None:
            initialise(bucket, values, version=version)
            with pytest.raises(Refused) as caught:
                client.initialise_state(bucket, 0, state)
            assert caught.value.code is RefusalCode.MALFORMED

        client.initialise = spoil  # type: ignore[method-assign]
        session.optimizer(adam(model), model)

    with running_job(tmp_path) as job:
        job.start(0, script)
        job.join()
