"""The records that a worker is given: it asks for them, gives back what it does not train, learns of the end.

A worker takes part in rounds from the moment it is given records until it asks for more and there are none,
or gives back those that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

from elastic_ps.core.fingerprint import differing, other_records
from elastic_ps.core.ledger import Range
from elastic_ps.core.working import Event, State, Working
from elastic_ps.data.batches import Batches
from elastic_ps.data.states import LOOPS, PARTS, Loop, LoopEvent, Part, PartEvent
from elastic_ps.errors import InvalidModel, Refused, UsageError
from elastic_ps.transport import calls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.convert import ranges_from_message, ranges_to_message
from elastic_ps.worker.client import Client, expelled
from elastic_ps.worker.local_world import LocalWorld
from elastic_ps.worker.strategy import Strategy


class Worker(Protocol):
    """What else a worker does, as far as its records depend on it: see `Engine`."""

    in_batch: bool
    working: Working

    @property
    def entered(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    @property
    def strategy(self) -> Strategy: ...
    def leave_if_asked(self) -> None: ...
    def come_back(self, refusal: Refused) -> None: ...
    def exchange_steps(self) -> None: ...
    def forget(self) -> None: ...
    def take_settings(self) -> None: ...


class DataSet(NamedTuple):
    """What a process trains: so many records, in batches; `data` identifies them (`core.fingerprint`)."""

    records: int
    epochs: int
    batch: int
    data: str


def _check_same(processes: Sequence[DataSet]) -> None:
    """Raise InvalidModel if the processes of a worker do not have the same data set."""
    first = processes[0]
    for rank, other in enumerate(processes):
        if first[:3] != other[:3]:
            raise InvalidModel(
                f"process {rank} of this worker has a loader of {other.records} records for {other.epochs} "
                f"epochs in batches of {other.batch}; process 0 has {first.records} for {first.epochs} in "
                f"batches of {first.batch}"
            )
        if names := differing(first.data, other.data):
            raise InvalidModel(
                f"the records of process {rank} of this worker are not those of process 0: "
                f"{other_records(names)}"
            )


class Records:
    """Asks for records, and gives back those that are not trained. Belongs to the training thread.

    Args:
        worker: whose records they are.
        batches: what the script has in hand for the next step.

    Attributes:
        part, loop: where this worker and its script are.
        loop_over: the loader that the script loops over, or has looped over last.
        chief: whether this worker is the one to evaluate and save, once all records are in the model.
        drops: how often all records in hand were dropped, as this worker had to join again, or pauses.
    """

    def __init__(
        self, worker: Worker, client: Client, world: LocalWorld, batches: Batches, stopped: Stopping
    ) -> None:
        self.part, self.loop = Part.IDLE, Loop.BEFORE
        self.loop_over: object = None
        self.chief = False
        self.drops = 0
        self._worker, self._client, self._world = worker, client, world
        self._batches, self._stopped = batches, stopped
        self._chief_of: dict[int, bool] = {}
        self._said: tuple[int, str] | None = None  # how many drops there were before, and of the data
        self._was_chief = False
        self._left = self._leaves = False  # see `stop_computing`; `_leaves`: the job was not told yet

    @property
    def over(self) -> bool:
        """Whether all records are in the model, or the training was stopped."""
        return self.part is Part.OVER

    @property
    def computing(self) -> bool:
        """Whether this worker takes part in rounds, as far as is known."""
        return self.part in (Part.COMPUTING, Part.LAST_STEP)

    def note(self, event: LoopEvent) -> None:
        """The script's loops have come to this."""
        self.loop = LOOPS.after(self.loop, event)

    def drop(self) -> None:
        """All records in hand are dropped, and those that were fetched ahead."""
        self.drops += 1

    def _plays(self, event: PartEvent) -> None:
        self.part = PARTS.after(self.part, event)

    def take(self, mine: DataSet, *, wait: bool, early: bool, epoch: int | None) -> tuple[Range, ...]:
        """Get records; with `wait`, () means that all of them are in the model.

        Args:
            mine: this process's.
            early, epoch: see `TakeRequest`.

        Raises:
            InvalidModel: the data set is not that of the job, or of this worker's other processes.
        """
        worker = self._worker
        if not worker.entered:
            raise UsageError("call session.optimizer(...) before iterating over session.loader(...)")
        while True:
            worker.leave_if_asked()
            try:
                if wait:
                    if self.computing:
                        self._worker.strategy.hand_over()
                    self._plays(PartEvent.ASK)
                    self._left = self._leaves = False
                said = self.drops, mine.data

                def take(all_of_them: list[DataSet]) -> pb.TakeReply:
                    _check_same(all_of_them)
                    request = pb.TakeRequest(
                        **all_of_them[0]._asdict(),
                        wait=wait,
                        abandoned=worker.working.in_step,
                        skipped=ranges_to_message(self._batches.skipped if wait else ()),
                        early=early,
                        epoch=epoch,
                    )
                    return self._client.take(request)

                new = mine._replace(data="") if self._said == said else mine
                granted = self._world.gather("the loader, where it gets records", new, take)
                self._said = said
                self._stopped.heed()
                self._stopped.learn(granted.stopped)
                if granted.pending:
                    continue
                if wait:
                    worker.working.note(Event.TELL)
                    self._batches.forget_skipped()
                    self._accept(granted)
                return ranges_from_message(granted.ranges)
            except Refused as refusal:
                if not expelled(refusal):
                    raise
                worker.come_back(refusal)
                if not wait:
                    return ()

    def _accept(self, granted: pb.TakeReply) -> None:
        """Get the version to compute on, or the last one."""
        strategy = self._worker.strategy
        behind = granted.version != strategy.version
        if granted.ranges:
            if behind:
                strategy.fetch(granted.version, contributor=True)
                self._worker.take_settings()
            else:
                strategy.computes_on(granted.version)
        elif granted.finished:
            if not granted.version and not self._stopped.reason:
                raise UsageError(
                    "no step was made: no backward() ran for any batch of this job, so all records were "
                    "skipped. Check that the loss depends on the parameters of the model that was passed to "
                    "session.optimizer(...)"
                )
            if not strategy.has(granted.version):
                strategy.fetch(granted.version, contributor=False)
            self._plays(PartEvent.FINISH)
            self.chief = granted.chief

    def is_chief_of(self, epoch: int) -> bool:
        """Whether this worker is the one to evaluate and save in an epoch before the last one. Blocks.

        It asks each time: the job may have gone back to a checkpoint from before the chief was chosen. Of
        several processes one may ask again by itself, and gets the answer that all had, as long as this
        worker has not joined again.
        """
        if self._world.alone or epoch not in self._chief_of:
            self._chief_of[epoch] = self._ask_chief("session.is_chief", epoch, passes=False)
        return self._chief_of[epoch]

    def comes_to(self, epoch: int) -> bool:
        """Whether this worker comes to the end of an epoch that others have trained: as its chief. Blocks.

        The chief stays while it lives, and its script may ask in some epochs only.
        """
        chief = self._ask_chief("the next epoch", epoch, passes=True)
        if chief:
            self._chief_of[epoch] = True
        return chief

    def _ask_chief(self, what: str, epoch: int, *, passes: bool) -> bool:
        while True:
            try:
                chief = self._world.decide(
                    what,
                    lambda: self._client.ask(calls.CHIEF, pb.ChiefRequest(epoch=epoch, passes=passes)).chief,
                )
            except Refused as refusal:
                if not expelled(refusal):
                    raise
                self._worker.come_back(refusal)
            else:
                self._was_chief |= chief
                return chief

    @property
    def has_been_chief(self) -> bool:
        """Whether this worker has been told that it is the chief, of any epoch or at the end."""
        return self.chief or self._was_chief

    def repeat(self) -> None:
        """This worker has joined again. Blocks. Raises Refused.

        The parameter server may have forgotten that its script has left the loop, and may choose another
        chief.
        """
        self._chief_of.clear()
        if self._left and not self.over:
            self._world.decide("the end of its loop over the loader", partial(self._release, leaves=True))
            self._leaves = False

    def pause(self) -> None:
        """Give back what this worker holds until it asks for the next batch, so that nobody waits for it.

        Raises:
            UsageError: in the middle of a step, or before the backward() of a batch.
        """
        if not self._worker.entered:
            raise UsageError("call session.optimizer(...) before session.pause()")
        in_step = self._worker.working.state in (State.PUSHING, State.AWAITING)
        if in_step or self._batches.computed or self._batches.undecided:
            raise UsageError(
                "session.pause() was called in the middle of a step. Call it after optimizer.step(), or "
                "after optimizer.skip() if this batch makes no step, before the next batch is loaded"
            )
        if self.computing:
            self.drop()
            self.stop_computing()

    def stop_computing(self, *, leaves: bool = False) -> None:
        """Give back what was not computed on, after the step of what was; no round waits for this worker.

        Args:
            leaves: the script has left its loop over the loader, and comes to the end of no further epoch.
        """
        worker = self._worker
        worker.in_batch = False
        self._left |= leaves
        self._leaves |= leaves
        if self._batches.computed:
            self._plays(PartEvent.LEAVE_IN_STEP)
        elif (self.computing or self._leaves) and worker.entered and not worker.closed:
            worker.exchange_steps()
            self._plays(PartEvent.LEAVE)
            try:
                abandoned = worker.working.in_step
                self._worker.strategy.hand_over()
                self._world.decide(
                    "the end of its loop over the loader",
                    partial(self._release, abandoned=abandoned, leaves=self._leaves),
                )
                self._stopped.heed()
                self._leaves = False
                worker.working.note(Event.TELL)
                worker.forget()
            except Refused as refusal:
                if not expelled(refusal):
                    raise

    def _release(self, *, leaves: bool, abandoned: bool = False) -> None:
        """See `stop_computing`. Blocks. Raises Refused."""
        skipped = ranges_to_message(self._batches.skipped)
        leaves = leaves and not self._stopped.reason
        self._client.ask(
            calls.RELEASE, pb.ReleaseRequest(abandoned=abandoned, skipped=skipped, leaves=leaves)
        )


_STOP = "stop"
"""What a process proposes that ends the training; see `LocalWorld`."""


class Stopping:
    """Whether the training is ended before all records are in the model. Belongs to the training thread.

    Attributes:
        reason: why, as far as this worker knows; "" if it is not.
    """

    def __init__(self, client: Client, world: LocalWorld) -> None:
        self.reason = ""
        self._client, self._world = client, world

    def learn(self, reason: str) -> None:
        """The parameter server says that it is, unless `reason` is ""."""
        self.reason = self.reason or reason

    def ask(self, reason: str) -> None:
        """End it on all workers. Blocks for the answer. Raises Refused."""
        if not self._world.alone:
            self._world.propose(_STOP, reason)  # the other processes may not know of it yet
            return
        self.learn(reason)
        self._client.stop(self.reason)

    def heed(self) -> None:
        """A process of this worker may have asked for it; all know now."""
        reason = self._world.agreed(_STOP)
        if not reason or self.reason:
            return
        self.reason = reason
        if self._world.leads:
            try:
                self._client.stop(reason)
            except Refused as refusal:
                if not expelled(refusal):
                    raise  # else the next call is refused, too, and it is said after joining again

    def repeat(self) -> None:
        """The parameter server may have been lost before it has kept it. Blocks. Raises Refused."""
        if self.reason:
            self._world.decide("session.stop(...)", lambda: self._client.stop(self.reason))
