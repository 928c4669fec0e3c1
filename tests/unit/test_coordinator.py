"""Shard 0's coordinator with shards that only take notes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from elastic_ps.core.consistency import Contribution
from elastic_ps.core.partition import Rule, TensorSpec
from elastic_ps.core.settings import Settings
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.job import TrainingJobSpec
from elastic_ps.server.coordinator import Coordinator, Joined
from elastic_ps.server.orders import Advance, Configuration, Report
from elastic_ps.telemetry import History

TENSORS = (TensorSpec("w", (4,), "float32", Rule.GRADIENT, 0),)
SETTINGS = Settings(({"lr": 0.1},))


class Notes:
    """A `ShardControl` that does what it is told by noting it down."""

    def __init__(self) -> None:
        self.orders: list[Advance] = []

    def configure(self, configuration: Configuration) -> None:
        pass

    def advance(self, advance: Advance) -> Report:
        self.orders.append(advance)
        return Report()


@pytest.fixture
def shard() -> Notes:
    return Notes()


@pytest.fixture
def coordinator(shard: Notes) -> Iterator[Coordinator]:
    spec = TrainingJobSpec.model_validate({"entrypoint": "train:main"})
    coordinator = Coordinator("job", spec, 1, [shard], keeper=None, history=History(None, ""))
    coordinator.start(None)
    yield coordinator
    coordinator.close()


def join(coordinator: Coordinator, worker: int) -> Joined | None:
    return coordinator.join(
        worker, pid=worker, host="here", tensors=TENSORS, optimizer="SGD", settings=SETTINGS
    )


def test_one_worker_initialises_the_model_also_when_two_come_at_once(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the second one's values overwrite the first one's when training has begun."""
    joined: dict[int, Joined | None] = {}
    configured, second_has_joined = threading.Event(), threading.Event()
    configure = coordinator._configure

    def slowly(*arguments: Any) -> None:
        configure(*arguments)
        configured.set()
        assert second_has_joined.wait(10)

    monkeypatch.setattr(coordinator, "_configure", slowly)
    first = threading.Thread(target=lambda: joined.update({0: join(coordinator, 0)}))
    first.start()
    assert configured.wait(10)
    joined[1] = join(coordinator, 1)
    second_has_joined.set()
    first.join(20)
    assert sorted(answer is not None and answer.initialise for answer in joined.values()) == [False, True]
    assert joined[0] is None, "to ask again"


@pytest.mark.parametrize(
    "groups", [(), ({"lr": None},), ({"lr": float("nan")},), ({"lr": 0.1, "params": []},)]
)
def test_settings_that_no_optimizer_can_step_with_are_refused_before_the_round_is_decided(
    coordinator: Coordinator, shard: Notes, groups: tuple[dict[str, Any], ...]
) -> None:
    """A shard would fail in the middle of the optimizer's step, and every worker with it."""
    joined = join(coordinator, 0)
    assert joined is not None
    incarnation = joined.stay.incarnation
    coordinator.initialised(0, incarnation)
    taken = coordinator.take(0, incarnation, call=1, records=100, epochs=1, batch=10, wait=True)

    def finish(settings: Settings) -> bool:
        contribution = Contribution(
            worker=0,
            incarnation=incarnation,
            step=0,
            samples=10,
            records=tuple(taken.ranges),
            settings=settings.to_json(),
        )
        return coordinator.finish(contribution, version=0, attempt=0)

    with pytest.raises(Refused, match=r"parameter groups|lr|params") as refused:
        finish(Settings(groups))
    assert refused.value.code is RefusalCode.INVALID
    assert all(order.apply is None for order in shard.orders)
    assert finish(Settings(({"lr": 0.05},)))
    assert [order.version for order in shard.orders if order.apply is not None] == [1]
