"""`session.optimizer(..., max_grad_norm=...)`: the parameter server clips the mean gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.errors import InvalidModel, UsageError
from elastic_ps.worker.session import Session
from tests.testing.harness import Job, Numbers, make_mlp, running_job
from tests.testing.inside import runtime_of
from tests.testing.oracle import assert_equal_up_to_round_off, mse, replay
from tests.testing.tiers import per_change
from tests.testing.transports import BY_NAME

LIMIT = 0.8


class Clipped(torch.optim.SGD):
    """What plain torch does: clip the gradient of the whole batch, then step."""

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, LIMIT)))
        return super().step(closure)


norms: list[float] = []


@pytest.mark.parametrize(
    ("transport", "servers"),
    per_change(
        [*((each, 1) for each in BY_NAME), ("inproc", 3), ("grpc", 2)], keep=[("tcp", 1), ("inproc", 3)]
    ),
)
def test_it_is_the_norm_of_the_gradient_of_the_whole_batch(
    tmp_path: Path, transport: str, servers: int
) -> None:
    """Also when each parameter server has only a part of the gradient."""
    data, models = Numbers(240), {}

    def script(session: Session) -> None:
        model = make_mlp()
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer = session.optimizer(sgd, model, max_grad_norm=LIMIT)
        models[session.worker] = model
        for x, y in session.loader(data, 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    place = {"bucketBytes": 1024, "replicas": servers}
    with running_job(tmp_path, transport=transport, parameterServer=place) as job:
        job.run(script, workers=2)
        norms.clear()
        assert_equal_up_to_round_off(
            models[0],
            make_mlp(),
            lambda model: replay(
                job.commits(), data, model, lambda m: Clipped(m.parameters(), lr=0.05, momentum=0.9), job.spec
            ),
        )
    assert min(norms) < LIMIT < max(norms), "some gradients are clipped, others are not"


def test_a_norm_that_is_too_large_for_any_number_makes_no_step_as_in_torch(tmp_path: Path) -> None:
    models = {}

    def script(session: Session) -> None:
        model = models[0] = make_mlp().double()
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = session.optimizer(sgd, model, max_grad_norm=LIMIT)
        for x, y in session.loader(Numbers(4), 4):
            optimizer.zero_grad()
            (mse(model, x.double(), y.double()) * 1e200).backward()
            optimizer.step()

    with running_job(tmp_path) as job:
        job.start(0, script)
        job.join()
        assert job.version == 1
    for ours, before in zip(models[0].parameters(), make_mlp().double().parameters(), strict=True):
        assert torch.equal(ours, before)


@pytest.mark.parametrize(("server", "limit"), [({"replicas": 2}, LIMIT), ({"durability": "standby"}, None)])
def test_a_job_that_goes_on_clips_as_before_but_not_with_a_standby(
    tmp_path: Path, server: dict[str, Any], limit: float | None
) -> None:
    """With a standby the script has to leave the limit out."""
    limits = []

    def script(epochs: int, **given: Any) -> Callable[[Session], None]:
        def train(session: Session) -> None:
            model = make_mlp()
            sgd = torch.optim.SGD(model.parameters(), lr=0.05)
            optimizer = session.optimizer(sgd, model, **given)
            limits.append(runtime_of(session).schedule.current().max_grad_norm)
            for x, y in session.loader(Numbers(8), 4, epochs=epochs):
                optimizer.zero_grad()
                mse(model, x, y).backward()
                optimizer.step()

        return train

    for epochs, place, given in [(1, {}, {"max_grad_norm": LIMIT}), (2, {}, {}), (3, server, {})]:
        checkpoints = tmp_path / "checkpoints"
        with running_job(
            tmp_path / str(epochs), checkpoints=checkpoints, resume="auto", parameterServer=place
        ) as job:
            job.start(0, script(epochs, **given))
            job.join()
    assert limits == [LIMIT, LIMIT, limit]


def begin(job: Job, **given: Any) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, **given)

    job.start(0, script)
    job.join()


def test_what_cannot_be_clipped_is_refused(tmp_path: Path) -> None:
    with (
        running_job(tmp_path / "0", parameterServer={"durability": "standby"}) as job,
        pytest.raises(UsageError, match=r"Set parameterServer\.durability: checkpoint"),
    ):
        begin(job, max_grad_norm=1.0)
    with (
        running_job(tmp_path / "1", consistency={"mode": "local", "steps": 2}) as job,
        pytest.raises(UsageError, match=r"call torch\.nn\.utils\.clip_grad_norm_ before"),
    ):
        begin(job, max_grad_norm=1.0)
    saved = torch.optim.SGD(make_mlp().parameters(), lr=0.1).state_dict()
    saved["param_groups"][0]["max_grad_norm"] = 1.0  # of a job that has clipped; this one does not
    with running_job(tmp_path / "2", parameterServer={"durability": "standby"}) as job:
        begin(job, state=saved)
    for wrong in (0.0, -1.0, float("nan"), "1"):
        with running_job(tmp_path / f"{wrong}") as job, pytest.raises(InvalidModel, match="a number above 0"):
            begin(job, max_grad_norm=wrong)
