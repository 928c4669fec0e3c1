"""Shard 0's coordinator with shards that only take notes, and what workers ask of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from elastic_ps.api.job import Times, TrainingJobSpec
from elastic_ps.core.consistency import Contribution
from elastic_ps.core.membership import Stay
from elastic_ps.core.partition import Rule, TensorSpec
from elastic_ps.core.settings import Settings
from elastic_ps.process.telemetry import History
from elastic_ps.server.checkpointer import Checkpointer
from elastic_ps.server.coordinator import Coordinator, Joined, NotYet
from elastic_ps.server.lead import Lead
from elastic_ps.server.limits import USUAL, ServerLimits
from elastic_ps.server.orders import Advance, Configuration, Report
from elastic_ps.server.state import Taken

TENSORS = (TensorSpec("w", (4,), "float32", Rule.GRADIENT, 0),)
SETTINGS = Settings(({"lr": 0.1},))

SOON = ServerLimits(answer=timedelta(milliseconds=50))
"""A call that is to be asked again says so soon."""


class Notes:
    """A `ShardControl` that does what it is told by noting it down, unless `refuse` raises."""

    def __init__(self) -> None:
        self.orders: list[Advance] = []
        self.refuse: Callable[[Advance], None] = lambda _: None

    def configure(self, configuration: Configuration) -> None:
        pass

    def advance(self, advance: Advance) -> Report:
        self.orders.append(advance)
        self.refuse(advance)
        return Report()

    @property
    def applied(self) -> list[int]:
        return [order.version for order in self.orders if order.apply is not None and not order.prepare]


def unwritten(term: int = 1) -> Checkpointer:
    """Of a job that writes no checkpoints."""
    return Checkpointer(None, job="job", term=term, shards=1, times=Times())


@contextmanager
def running(shards: Sequence[Notes], *, limits: ServerLimits = USUAL, **fields: Any) -> Iterator[Coordinator]:
    spec = TrainingJobSpec.model_validate({"entrypoint": "train:main", **fields})
    nothing = History(None, "")
    lead = Lead("job", spec, 1, shards, checkpoints=unwritten(), history=nothing, limits=limits)
    lead.start(None)
    try:
        yield lead.coordinator
    finally:
        for shard in shards:
            shard.refuse = lambda _: None
        lead.close(keep=False)


def join(
    coordinator: Coordinator,
    worker: int,
    *,
    again: bool = False,
    instance: str = "",
    call: int = 0,
    settings: Settings = SETTINGS,
) -> Joined | NotYet:
    return coordinator.join(
        worker,
        pid=worker,
        host="here",
        tensors=TENSORS,
        optimizer="SGD",
        settings=settings,
        again=again,
        instance=instance,
        call=call,
    )


def start(
    coordinator: Coordinator,
    worker: int = 0,
    *,
    instance: str = "",
    call: int = 0,
    settings: Settings = SETTINGS,
) -> Stay:
    """A worker joins, and brings the model if there is none."""
    joined = join(coordinator, worker, instance=instance, call=call, settings=settings)
    assert isinstance(joined, Joined)
    if joined.initialise:
        coordinator.initialised(worker, joined.stay.incarnation)
    return joined.stay


def take(coordinator: Coordinator, stay: Stay, *, call: int, wait: bool = True, **more: Any) -> Taken:
    return coordinator.take(
        stay.worker, stay.incarnation, call=call, records=100, epochs=1, batch=10, wait=wait, **more
    )


def finish(
    coordinator: Coordinator, stay: Stay, taken: Taken, *, step: int = 0, settings: Settings = SETTINGS
) -> bool:
    contribution = Contribution(
        worker=stay.worker,
        incarnation=stay.incarnation,
        step=step,
        samples=10,
        records=tuple(taken.ranges),
        settings=settings.to_json(),
    )
    attempt = coordinator.job.state.rounds.attempt
    return coordinator.finish(contribution, version=taken.version, attempt=attempt)
