"""Asks for a worker's records, gives back those that it does not train, and learns of the end.

A worker takes part in rounds from when it is given records until it gives them back, or there are no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from elastic_ps.core.fingerprint import differing, other_records
from elastic_ps.core.ledger import Range
from elastic_ps.core.working import Event, State
from elastic_ps.data.states import LOOPS, PRESENCES, HandEvent, Loop, LoopEvent, Presence, PresenceEvent
from elastic_ps.errors import InvalidModel, Refused, UsageError
from elastic_ps.transport import calls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.convert import ranges_from_message, ranges_to_message
from elastic_ps.worker.runtime.membership import Membership
from elastic_ps.worker.wire.client import Client, expelled
from elastic_ps.worker.wire.local_world import Drained, LocalWorld


class DataSet(NamedTuple):
    """The records that a process trains, in batches; `data` identifies them (`core.fingerprint`).

    `order` says which blocks of them stay together; see `data.order.Order.to_text`.
    """

    records: int
    epochs: int
    batch: int
    data: str
    order: str = ""


def _check_same(processes: Sequence[DataSet]) -> None:
    """Raise InvalidModel if the processes of a worker do not have the same data set."""
    first = processes[0]
    for rank, other in enumerate(processes):
        if first[:3] != other[:3]:
            raise InvalidModel(
                f"process {rank} of this worker has a loader of {other.records} records for {other.epochs} "
                f"epochs in batches of {other.batch}; process 0 has {first.records} for {first.epochs} in "
                f"batches of {first.batch}. Every process must pass session.loader(...) the same"
            )
        if names := differing(first.data, other.data):
            raise InvalidModel(
                f"the records of process {rank} of this worker are not those of process 0: "
                f"{other_records(names)}"
            )


class Records:
    """Asks for records, and gives back those that are not trained. Belongs to the training thread.

    Args:
        close: lets this worker leave.

    Attributes:
        presence, loop: where this worker and its script are.
        loader: the loader that the script loops over, or has looped over last.
        chief: whether this worker is the one to evaluate and save, once all records are in the model.
    """

    def __init__(self, member: Membership, stopped: Stopping, close: Callable[[], object]) -> None:
        self.presence, self.loop = Presence.IDLE, Loop.BEFORE
        self.loader: object = None
        self.chief = False
        self._member, self._stopped, self._close = member, stopped, close
        self._client, self._world, self._batches = member.client, member.world, member.batches
        self._chief_of: dict[int, bool] = {}
        self._said: tuple[int, str] | None = None  # the data set as it was named, after so many drops
        self._left = False  # the script has left its loop over the loader, and comes to no further epoch

    @property
    def over(self) -> bool:
        """Whether all records are in the model, or the training was stopped."""
        return self.presence is Presence.OVER

    @property
    def computing(self) -> bool:
        """Whether this worker takes part in rounds, as far as is known."""
        return self.presence in (Presence.COMPUTING, Presence.LAST_STEP)

    def note(self, event: LoopEvent) -> None:
        """The script's loops have come to this."""
        self.loop = LOOPS.after(self.loop, event)

    def _note_presence(self, event: PresenceEvent) -> None:
        self.presence = PRESENCES.after(self.presence, event)

    def take(self, mine: DataSet, *, wait: bool, early: bool, epoch: int | None) -> tuple[Range, ...]:
        """Get records; with `wait`, () means that all of them are in the model.

        Args:
            mine: this process's.
            early, epoch: see `TakeRequest`.

        Raises:
            InvalidModel: the data set is not that of the job, or of this worker's other processes.
        """
        member = self._member
        if not member.entered:
            raise UsageError(
                "call session.optimizer(...) before iterating over session.loader(...). With Fabric or "
                "accelerate, pass the optimizer, with its model, to fabric.setup(...) or "
                "accelerator.prepare(...)"
            )

        def take(all_of_them: list[DataSet]) -> pb.TakeReply:
            _check_same(all_of_them)
            request = pb.TakeRequest(
                **all_of_them[0]._asdict(),
                wait=wait,
                abandoned=member.working.in_step,
                skipped=ranges_to_message(self._batches.skipped if wait else ()),
                early=early,
                epoch=epoch,
            )
            return self._client.take(request)

        while True:
            self.leave_if_asked()
            with member.rejoining():
                if wait:
                    if self.computing:
                        member.strategy.hand_over()
                    self._note_presence(PresenceEvent.ASK)
                    self._left = False
                said = member.drops, mine.data
                new = mine._replace(data="", order="") if self._said == said else mine
                granted = self._world.gather("the loader's request for records", new, take)
                self._said = said
                member.check_given = lambda: None  # from now on, the script may change the model
                self._stopped.heed()
                self._stopped.learn(granted.stopped)
                if granted.pending:
                    continue
                if wait:
                    member.working.note(Event.TELL)
                    self._batches.forget_skipped()
                    self._accept(granted)
                return ranges_from_message(granted.ranges)
            if not wait:
                return ()

    def leave_if_asked(self) -> None:
        """Between two batches: where a worker that was asked to leave does so. Raises Drained."""
        self._batches.note(HandEvent.LAY_DOWN)
        if not self._world.alone:  # others may have been asked to leave, or may have ended the training
            self._world.decide("the next batch", lambda: None)
            self._stopped.heed()
        if self._member.draining and not self._member.working.in_step:
            self._batches.drop_computed()
            self._member.exchange_steps()
            self._close()
            raise Drained

    def _accept(self, granted: pb.TakeReply) -> None:
        """Get the version to compute on, or the last one."""
        strategy = self._member.strategy
        behind = granted.version != strategy.version
        if granted.ranges:
            if behind:
                strategy.fetch(granted.version, contributor=True)
                self._member.schedule.take_over(self._member.in_force)
            else:
                strategy.computes_on(granted.version)
        elif granted.finished:
            if not granted.version and not self._stopped.reason:
                raise UsageError(
                    "no step was made, and all records were skipped: each batch had no backward(), or the "
                    "script skipped it. Check that the loss is finite, and depends on the parameters of the "
                    "model that was passed to session.optimizer(...)"
                )
            if not strategy.has(granted.version):
                strategy.fetch(granted.version, contributor=False)
            self._note_presence(PresenceEvent.FINISH)
            self.chief = granted.chief
            self._member.has_been_chief |= granted.chief

    def is_chief_of(self, epoch: int, *, passes: bool = False) -> bool:
        """Whether this worker is the one to evaluate and save in an epoch before the last one. Blocks.

        It asks each time: the job may have gone back to a checkpoint from before the chief was chosen. Of
        several processes one may ask again by itself, and gets the answer that all had until they join again.

        Args:
            passes: others have trained the epoch, so only the epoch's chief has to come to its end.
        """
        if epoch in self._chief_of and not (self._world.alone or passes):
            return self._chief_of[epoch]
        what = "the next epoch" if passes else "session.is_chief"

        def ask() -> bool:
            return self._client.ask(calls.CHIEF, pb.ChiefRequest(epoch=epoch, passes=passes)).chief

        while True:
            with self._member.rejoining():
                chief = self._world.decide(what, ask)
                self._member.has_been_chief |= chief
                if chief or not passes:
                    self._chief_of[epoch] = chief
                return chief

    def repeat(self) -> None:
        """Say again, after joining again, that the script has left the loop. Blocks. Raises Refused.

        The parameter server may choose another chief.
        """
        self._chief_of.clear()
        if self._left and not self.over:
            self._release()

    def pause(self, *, tells: bool = True) -> None:
        """Give back what this worker holds until it asks for the next batch, so that nobody waits for it.

        `tells`: the script notices by `session.generation`. Raises UsageError within a step or batch.
        """
        if not self._member.entered:
            raise UsageError("call session.optimizer(...) before session.pause()")
        in_step = self._member.working.state in (State.PUSHING, State.AWAITING)
        if in_step or self._batches.computed or self._batches.undecided:
            raise UsageError(
                "session.pause() was called in the middle of a step. Call it after optimizer.step(), or "
                "after optimizer.skip() if this batch makes no step, before the next batch is loaded"
            )
        if self.computing:
            self._member.drops += 1
            self._member.untold += not tells
            self.stop_computing()

    def stop_computing(self, *, leaves: bool = False) -> None:
        """Give back what was not computed on, after the step of what was; no round waits for this worker.

        Args:
            leaves: the script has left its loop over the loader, and comes to the end of no further epoch.
        """
        member = self._member
        self._batches.note(HandEvent.LAY_DOWN)
        self._left |= leaves
        if self._batches.computed:
            self._note_presence(PresenceEvent.LEAVE_IN_STEP)
        elif (self.computing or leaves) and member.entered and member.working.state is not State.LEFT:
            member.exchange_steps()
            self._note_presence(PresenceEvent.LEAVE)
            try:
                member.strategy.hand_over()
                self._release(abandoned=member.working.in_step)
                self._stopped.heed()
                member.working.note(Event.TELL)
                member.forget()
            except Refused as refusal:
                if not expelled(refusal):
                    raise

    def _release(self, *, abandoned: bool = False) -> None:
        skipped = ranges_to_message(self._batches.skipped)
        leaves = self._left and not self._stopped.reason
        request = pb.ReleaseRequest(abandoned=abandoned, skipped=skipped, leaves=leaves)
        self._world.decide(
            "the end of its loop over the loader", lambda: self._client.ask(calls.RELEASE, request)
        )


_STOP = "stop"
"""The proposal of a process that ends the training; see `LocalWorld`."""


class Stopping:
    """Tells whether training ended before all records are in the model. Belongs to the training thread.

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
        self._say()

    def heed(self) -> None:
        """Take over what a process of this worker has asked for, which all of them know now."""
        reason = self._world.agreed(_STOP)
        if not reason or self.reason:
            return
        self.reason = reason
        if self._world.leads:
            try:
                self._say()
            except Refused as refusal:
                if not expelled(refusal):
                    raise  # else the next call is refused, too, and it is said after joining again

    def repeat(self) -> None:
        """Say it again after joining again: it may not be on disk. Blocks. Raises Refused."""
        if self.reason:
            self._world.decide("session.stop(...)", self._say)

    def _say(self) -> None:
        self._client.ask(calls.STOP, pb.StopRequest(reason=self.reason))
