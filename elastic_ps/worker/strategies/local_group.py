"""A worker of several processes makes one step: process 0 adds up their gradients, and pushes the sum.

Gradients lie in memory that the processes share (`LocalWorld.allocate`), and so do the values of trained
parameters. So nothing is copied from process to process: the others say which buckets are ready, process 0
adds them up, one bucket after the other, while backward goes on; and a version that process 0 has pulled is
there for all.

In mode `local` the processes make the same local steps (`MeanGradients`), which change the parameters in the
same way. Then process 0 pushes its own change, and adds up buffers only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from elastic_ps.codec import as_tensor, dtype_of
from elastic_ps.codec.optimizers import wide
from elastic_ps.codec.reductions import REDUCTIONS
from elastic_ps.codec.rows import Rows, RowSum
from elastic_ps.core.metrics import Metrics, reduce_all
from elastic_ps.core.partition import ITEM_SIZE, Bucket, Rule
from elastic_ps.core.weights import shares_of
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.memory import Allocate
from elastic_ps.worker.model.flat import Flat
from elastic_ps.worker.strategies.push_pull import PushPull
from elastic_ps.worker.strategies.strategy import Future, Queue, Strategy, VersionInfo
from elastic_ps.worker.wire.dialogue import Step
from elastic_ps.worker.wire.local_world import LocalWorld

_STEP = "optimizer.step()"
_EXCHANGE = "the exchange of local steps"  # these have met at optimizer.step(), see `MeanGradients`
_START = "the sending of an exchange"
_FETCH = "the reading of a version"
_RESULT = "the end of an exchange"

_NO_STEP = -1

_CANNOT_ASSIGN = (
    "session.assign does not work with worker.processes above 1, where the processes share the "
    "values: one of them would change those that others compute on. Use processes: 1"
)


class _Outcome(NamedTuple):
    """What process 0 tells the others after a step, or after values were fetched."""

    made: bool
    version: int
    info: VersionInfo


class GroupLeader(PushPull):
    """The strategy of process 0, which pushes the sum over the processes.

    Args:
        world: of several processes.
        weights: for each process, its share of the samples of the step that begins.
        same: all processes have the same gradients, so that process 0 pushes its own.
        given: what `PushPull` takes.

    Attributes:
        info: as all processes know it; an exchange under way may know more.
    """

    cannot_assign = _CANNOT_ASSIGN

    def __init__(
        self,
        world: LocalWorld,
        weights: Callable[[], Sequence[float]],
        client: Any,
        flat: Flat,
        *given: Any,
        same: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(client, flat, *given, **options)
        self.info = VersionInfo()
        self._world, self._weights = world, weights
        self._finish = _EXCHANGE if same else _STEP
        links = [link.gradients for link in world.links]
        self._sums = _Reducer(flat, links, self._summed, same=same)

    def close(self) -> None:
        super().close()
        self._sums.close()

    def reset(self) -> None:
        """See `Strategy`. Nothing of the step is added up any more."""
        self._sums.forget()
        super().reset()

    def begin(self, step: Step, settings: str = "", *, excluded: Set[int] = frozenset()) -> None:
        self._sums.begin(step, self._weights())
        super().begin(step, settings, excluded=excluded)

    def ready(self, bucket: Bucket, present: Sequence[bool]) -> None:
        """This process's part of a bucket is complete. Does not block."""
        self._sums.add(bucket, present)

    def _summed(self, bucket: Bucket, present: Sequence[bool], weight: float | None) -> None:
        """A bucket is the sum over the processes, which weighs what they said together."""
        step = self.under_way
        if step is not None and step.weight != weight:  # once: pushes of one step name the same one
            self.under_way = replace(step, weight=weight)
        super().ready(bucket, present)

    def finish(self, ending: pb.FinishRequest, *, publish: bool = True) -> bool:
        """See `Strategy`. All processes have to be here."""

        def finish(reported: list[Metrics]) -> _Outcome:
            self._sums.wait()
            merged = self._merged(ending, reported)
            return self._outcome(super(GroupLeader, self).finish(merged, publish=publish))

        return self._world.gather(self._finish, _reported(ending), finish).made

    def start(self, ending: pb.FinishRequest) -> Future:
        """See `Strategy`. All processes have to be here, and where its end is waited for."""
        merged = self._world.gather(
            _START, _reported(ending), lambda reported: [self._merged(ending, reported)]
        )

        def finish() -> bool:
            self._sums.wait()
            return super(GroupLeader, self).finish(merged[0], publish=False)

        def agree(wait: Callable[[], bool]) -> bool:
            return self._world.decide(_RESULT, lambda: self._outcome(wait())).made

        return Future(finish, give_up=self.give_up, agree=agree)

    def _merged(self, ending: pb.FinishRequest, reported: list[Metrics]) -> pb.FinishRequest:
        """The step's end, with what each of the processes has reported."""
        shares = zip(reported, self._sums.weights, strict=True)
        weighed = [each._replace(weight=share) for each, share in shares]
        merged = pb.FinishRequest()
        merged.CopyFrom(ending)
        merged.metrics.update(reduce_all(weighed))
        for each in reversed(reported):
            merged.reductions.update(each.reductions)
        return merged

    def fetch(self, version: int, *, contributor: bool, excluded: Set[int] = frozenset()) -> None:
        """See `Strategy`. All processes have to be here."""

        def fetch() -> _Outcome:
            super(GroupLeader, self).fetch(version, contributor=contributor, excluded=excluded)
            return self._outcome(True)

        self._world.decide(_FETCH, fetch)

    def _outcome(self, made: bool) -> _Outcome:
        self.info = replace(self._latest)
        return _Outcome(made, self.version, self.info)


class GroupFollower(Strategy):
    """The strategy of another process: it says what is ready, and learns what became of the step.

    Args:
        world, same: see `GroupLeader`.
    """

    cannot_assign = _CANNOT_ASSIGN

    def __init__(self, world: LocalWorld, flat: Flat, *, same: bool = False) -> None:
        super().__init__()
        self._excluded: Set[int] = frozenset()
        self._world, self._flat = world, flat
        self._finish = _EXCHANGE if same else _STEP

    def begin(self, step: Step, settings: str = "", *, excluded: Set[int] = frozenset()) -> None:  # noqa: ARG002
        self.under_way, self._excluded = step, excluded

    def ready(self, bucket: Bucket, present: Sequence[bool]) -> None:
        """This process's part of a bucket is complete."""
        assert self.under_way is not None, "begin was called"
        rows, sent = self._flat.rows_of(bucket), None
        if rows is not None:
            sent = rows.to_bytes(bucket.elements // self._flat.layout.width(bucket))
        told = _Told(list(present), self.under_way.weight, sent)
        try:
            self._world.links[0].gradients.send((self.under_way.number, bucket.index, told))
        except OSError:
            self._world.raise_ended(0, "backward()")

    def finish(self, ending: pb.FinishRequest) -> bool:
        outcome: _Outcome = self._world.ask(self._finish, _reported(ending))
        return self._learn(outcome, self._excluded)

    def start(self, ending: pb.FinishRequest) -> Future:
        """See `GroupLeader`. Nothing goes on in this process meanwhile."""
        self._world.ask(_START, _reported(ending))

        def agree(_: Callable[[], bool]) -> bool:
            return self._learn(self._world.ask(_RESULT, None))

        return Future(lambda: True, agree=agree)

    def fetch(self, version: int, *, contributor: bool, excluded: Set[int] = frozenset()) -> None:  # noqa: ARG002
        self._flat.check_memory()  # not the values: process 0 may be receiving the next ones already
        outcome: _Outcome = self._world.ask(_FETCH, None)
        self._learn(outcome, excluded)

    def _learn(self, outcome: _Outcome, excluded: Set[int] | None = None) -> bool:
        """Take over what process 0 was told. Returns whether the version was made.

        Args:
            excluded: the buckets that the model gets no values of; None: all, for now.
        """
        self.version, self.info, self.under_way = outcome.version, outcome.info, None
        if outcome.made and excluded is not None:
            self._flat.publish(excluded=excluded)
        return outcome.made


def _reported(ending: pb.FinishRequest) -> Metrics:
    """What this process has reported with the step; process 0 knows what it weighs."""
    return Metrics(dict(ending.metrics), dict(ending.reductions), 0.0)


class _Told(NamedTuple):
    """Which gradients of a bucket another process has, and what it says that its part of the step weighs.

    `rows`: the gradients themselves, if they are rows of a table; see `Rows.packed`.
    """

    present: list[bool]
    weight: float | None
    rows: bytearray | None

    def rows_of(self, bucket: Bucket, width: int, dtype: torch.dtype) -> Rows | None:
        """`rows`, of a bucket with rows of this width."""
        if self.rows is None:
            return None
        return Rows.unpacked(memoryview(self.rows), rows=bucket.elements // width, width=width, dtype=dtype)


class _Part(NamedTuple):
    """Process 0's part of a bucket, which is complete."""

    step: int
    bucket: Bucket
    present: Sequence[bool]


class _Reducer:
    """A thread that adds up buckets, in the order in which process 0 has them.

    Args:
        links: to the other processes, which say what they have.
        done: called with a bucket whose sum lies in process 0's contribution, and what the step weighs.
        same: see `GroupLeader`.

    Attributes:
        weights: the processes' shares of the records of the step under way.
    """

    def __init__(
        self,
        flat: Flat,
        links: Sequence[Connection],
        done: Callable[[Bucket, Sequence[bool], float | None], None],
        *,
        same: bool,
    ) -> None:
        self.weights: Sequence[float] = ()
        self._weight: float | None = None
        self._flat, self._done, self._same = flat, done, same
        self._told: list[dict[tuple[int, int], _Told]] = [{} for _ in links]
        self._ended: dict[int, Exception] = {}  # why a process says nothing any more
        self._changed = threading.Condition()
        self._step, self._missing = _NO_STEP, 0
        self._error: BaseException | None = None
        self._parts = Queue("sums", self._take)
        for number, link in enumerate(links):  # so that no process waits until it can say what it has
            threading.Thread(
                target=self._read, args=(number, link), name=f"told-{number}", daemon=True
            ).start()

    def begin(self, step: Step, weights: Sequence[float]) -> None:
        """A step begins. Nothing of an older one is added up any more."""
        with self._changed:
            self._step, self.weights, self._missing = step.number, weights, len(self._flat.layout.pushed)
            self._weight, self._error = step.weight, None

    def forget(self) -> None:
        """The step under way is given up, or has ended. Blocks while a bucket is added up."""
        with self._changed:
            self._step = _NO_STEP

    def add(self, bucket: Bucket, present: Sequence[bool]) -> None:
        """Process 0's part of a bucket is complete. Does not block."""
        self._parts.put(_Part(self._step, bucket, present))

    def wait(self) -> None:
        """Until all buckets of the step are added up."""
        with self._changed:
            self._changed.wait_for(lambda: not self._missing or self._error is not None)
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """End the thread. The sockets must be closed before: it may wait for another process."""
        self._parts.close()

    def _take(self, part: _Part) -> None:
        try:
            others = [self._await(number, part) for number in range(len(self._told))]
            with self._changed:
                there = [other for other in others if other is not None]
                if part.step == self._step and len(there) == len(others):
                    self._add_up(part, there)
                    self._missing -= 1
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001 (raised in the thread that waits)
            with self._changed:
                self._error = error if part.step == self._step else self._error
                self._changed.notify_all()

    def _await(self, number: int, part: _Part) -> _Told | None:
        """What another process has of a bucket; None if it has gone on to a later step. Blocks."""
        told, key = self._told[number], (part.step, part.bucket.index)
        with self._changed:
            for old in [each for each in told if each[0] < part.step]:
                del told[old]
            self._changed.wait_for(
                lambda: key in told or any(step > part.step for step, _ in told) or number in self._ended
            )
            if key not in told and number in self._ended:
                raise self._ended[number]
            return told.pop(key, None)

    def _read(self, number: int, link: Connection) -> None:
        """Take what another process says, until it ends."""
        try:
            while True:
                step, bucket, told = link.recv()
                with self._changed:
                    self._told[number][step, bucket] = told
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001 (raised where it is waited for)
            with self._changed:
                self._ended[number] = error
                self._changed.notify_all()

    def _add_up(self, part: _Part, told: Sequence[_Told]) -> None:
        gradients, weight, weights = part.bucket.rule is Rule.GRADIENT, self._weight, self.weights
        present = [part.present, *(each.present for each in told)]
        if not self._same:
            weight, weights = shares_of([weight, *(each.weight for each in told)], self.weights)
        # A process without weight has computed on process 0's slice.
        if gradients and self._same:
            pass
        elif self._flat.layout.width(part.bucket):
            self._add_up_table(part.bucket, weights, present, told)
        else:
            own, *others = self._flat.contributions_of(part.bucket)
            of_others = zip(others, weights[1:], present[1:], strict=True)
            counted = [(each, share) for each, share, has in of_others if any(has) or not gradients]
            REDUCTIONS[part.bucket.rule].join(own, weights[0], counted)
            self._flat.written(part.bucket)
        self._done(part.bucket, [any(each) for each in zip(*present, strict=True)], weight)

    def _add_up_table(
        self,
        bucket: Bucket,
        weights: Sequence[float],
        present: Sequence[Sequence[bool]],
        told: Sequence[_Told],
    ) -> None:
        """Let process 0's contribution be the sum of the rows that the processes have."""
        width, dtype = self._flat.layout.width(bucket), dtype_of(bucket.dtype)
        parts, total = self._flat.contributions_of(bucket), RowSum(width, wide(dtype))
        rows = [self._flat.rows_of(bucket), *(each.rows_of(bucket, width, dtype) for each in told)]
        for own, part, has, share in zip(rows, parts, present, weights, strict=True):
            if share:  # else rows with zeros would seem to have a gradient
                whole = Rows.of(part.view(-1, width)) if own is None and any(has) else own
                total.add(whole, share)
        mean = total.mean()
        self._flat.set_rows(bucket, Rows(mean.numbers, mean.values.to(dtype)))


class _Mine(NamedTuple):
    """The part of a step that one process has, or all have together.

    Attributes:
        present: which parameters have a gradient.
        loss: the loss, or the mean; None if it is no number.
        weight: what the script said that it weighs, or the sum; None: nothing.
        rows: the sparse gradients, by the numbers of the parameters; see `Rows.to_bytes`.
    """

    present: Sequence[bool]
    loss: float | None
    weight: float | None
    rows: dict[int, bytearray]


class _Gradients:
    """One process's gradients.

    Attributes:
        flat: those of one dtype, one after the other.
        views: by the numbers of the parameters, in their shapes.
    """

    def __init__(self, allocate: Allocate, parameters: Sequence[torch.Tensor], dtypes: Sequence[str]) -> None:
        sizes = _sizes(parameters, dtypes)
        self.flat = {dtype: as_tensor(allocate(nbytes), dtype_of(dtype)) for dtype, nbytes in sizes.items()}
        self.views: list[torch.Tensor] = []
        used = dict.fromkeys(sizes, 0)
        for parameter, dtype in zip(parameters, dtypes, strict=True):
            start = used[dtype]
            used[dtype] += parameter.numel()
            self.views.append(self.flat[dtype][start : used[dtype]].view(parameter.shape))


class MeanGradients:
    """With several processes in a worker, each local step is one step of all of them. All make it together.

    Before the script's optimizer makes a step, every process gets the mean of their gradients, weighted by
    the records of their slices, or by what the script says (`Session.weigh`). All processes get the same
    bytes. So optimizers that begin with the same values and the same state have the same afterwards, and
    nothing else has to be sent from process to process until the next exchange. Belongs to the training
    thread.

    Gradients are added up in shared memory of their own. The memory that exchanges are pushed from may be
    under way while the next local steps are made.

    Args:
        flat: of the model; every parameter that is trained is in it.
        world: of several processes.
        parts: gives what this process's part of the local step that is to be made weighs, if the script has
            said that, else 0; and for each process its share of the records.

    Attributes:
        weight: what the last step weighs, of all processes together; None if the script has not said that.

    Raises:
        UsageError: the system has no shared memory for the gradients.
    """

    def __init__(
        self, flat: Flat, world: LocalWorld, parts: Callable[[], tuple[float | None, Sequence[float]]]
    ) -> None:
        self._world, self._shares = world, parts
        self.weight: float | None = None
        specs = flat.layout.tensors
        trained = [i for i, spec in enumerate(specs) if spec.rule is Rule.GRADIENT and spec.elements]
        self._parameters = [flat.tensors[index] for index in trained]
        dtypes = [specs[index].dtype for index in trained]
        sizes = list(_sizes(self._parameters, dtypes).values())
        self._parts = [
            _Gradients(self._world.allocate(sizes), self._parameters, dtypes) for _ in range(self._world.size)
        ]

    def of(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure of an optimizer that evaluates the loss itself, so that all processes evaluate it.

        Gradients are the mean, and so is the loss that it returns: all processes come to the same decisions.
        """

        def averaged() -> Any:
            loss = closure()
            number = _number(loss)
            mean = self.take(number)
            if mean is None:
                return loss
            return torch.full_like(loss.detach(), mean) if isinstance(loss, torch.Tensor) else mean

        return averaged

    @torch.no_grad()
    def take(self, loss: float | None = None) -> float | None:
        """Replace the gradients by their mean over the processes. Blocks until all processes are here.

        A gradient that a process does not have counts as zero, unless no process has it. A process whose
        slice has no records does not count.

        Args:
            loss: of this process's slice, as a number.

        Returns the mean of the losses; None if a process has none.

        Raises:
            UsageError: the step has no batch; or the processes are at different places of the script.
        """
        weight, weights = self._shares()
        grads = [parameter.grad for parameter in self._parameters]
        rows = {i: Rows.of(g).to_bytes(len(g)) for i, g in enumerate(grads) if g is not None and g.is_sparse}
        mine = _Mine([gradient is not None for gradient in grads], loss, weight, rows)
        if not self._world.leads:
            self._put()
        mean = self._world.gather(_STEP, mine, lambda every: self._add_up(every, weights))
        every = zip(self._parameters, mean.present, self._parts[0].views, strict=True)
        for index, (parameter, there, view) in enumerate(every):
            if not there:
                parameter.grad = None
            elif index in mean.rows:
                found = Rows.of_bytes(mean.rows[index], parameter).gradient(len(parameter))
                parameter.grad = found.to(parameter.device)
            elif parameter.grad is None:
                parameter.grad = torch.empty_like(parameter).copy_(view)
            else:
                parameter.grad.copy_(view)
        self.weight = mean.weight
        return mean.loss

    def _put(self) -> None:
        """Copy this process's gradients into its part."""
        views = self._parts[self._world.rank].views
        for parameter, view in zip(self._parameters, views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif not parameter.grad.is_sparse:
                view.copy_(parameter.grad)

    def _add_up(self, every: Sequence[_Mine], records: Sequence[float]) -> _Mine:
        """In process 0, when all are here: so nobody reads the last step's mean any more, which lies here."""
        self._put()
        weight, weights = shares_of([mine.weight for mine in every], records)
        tables = {index for mine in every for index in mine.rows}
        rows = {index: self._mean_rows(index, every, weights) for index in tables}
        dense = [index for index in range(len(self._parameters)) if index not in rows]
        flats = ([part.flat[name] for part in self._parts] for name in self._parts[0].flat)
        views = ([part.views[index] for part in self._parts] for index in dense)
        for total, *others in views if rows else flats:
            REDUCTIONS[Rule.GRADIENT].join(total, weights[0], [*zip(others, weights[1:], strict=True)])
        counted = [mine.present for mine, share in zip(every, weights, strict=True) if share]
        present = [any(each) for each in zip(*counted, strict=True)]
        return _Mine(present, _mean_of(every, weights), weight, rows)

    def _mean_rows(self, index: int, every: Sequence[_Mine], weights: Sequence[float]) -> bytearray:
        weight = self._parameters[index]
        total = RowSum(weight.shape[1:].numel(), weight.dtype)
        for part, mine, share in zip(self._parts, every, weights, strict=True):
            if share and (body := mine.rows.get(index)) is not None:
                total.add(Rows.of_bytes(body, weight), share)
            elif share:
                total.add(Rows.of(part.views[index]) if mine.present[index] else None, share)
        return total.mean().to_bytes(len(weight))


def _sizes(parameters: Sequence[torch.Tensor], dtypes: Sequence[str]) -> dict[str, int]:
    """How many bytes the gradients of each dtype have."""
    sizes: dict[str, int] = {}
    for parameter, dtype in zip(parameters, dtypes, strict=True):
        sizes[dtype] = sizes.get(dtype, 0) + parameter.numel() * ITEM_SIZE[dtype]
    return sizes


def _mean_of(every: Sequence[_Mine], weights: Sequence[float]) -> float | None:
    """The mean of the losses that have a weight."""
    total = 0.0
    for mine, share in zip(every, weights, strict=True):
        if mine.loss is None:
            return None
        if share:
            total += mine.loss * share
    return total


def _number(loss: object) -> float | None:
    """A loss as a number; None if it is none. Waits for the device that computes it."""
    if isinstance(loss, torch.Tensor):
        return float(loss.detach()) if loss.numel() == 1 else None
    return float(loss) if isinstance(loss, int | float) else None
