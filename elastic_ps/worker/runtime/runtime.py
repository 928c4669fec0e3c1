"""Drives a worker through the job: batches, steps and versions.

What a script does arrives here as one of a few events: a batch is handed to it, a step's first gradient is
there, a bucket is complete, the step ends. `Records` asks for records, a `Strategy` makes versions of steps,
`Membership` joins the job, and `Schedule` has the hyperparameters.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.core import damping
from elastic_ps.core.ledger import Range
from elastic_ps.core.partition import Bucket
from elastic_ps.core.settings import NOTHING, Made, Settings, read_settings
from elastic_ps.core.working import Event, State
from elastic_ps.data.batches import checked
from elastic_ps.data.states import Hand, HandEvent, Loop, Presence
from elastic_ps.embedding.ahead import no_rows
from elastic_ps.errors import ElasticPSError, RefusalCode, Refused, UsageError
from elastic_ps.transport import calls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.convert import ranges_to_message
from elastic_ps.worker.runtime.membership import Membership
from elastic_ps.worker.runtime.records import Records, Stopping
from elastic_ps.worker.runtime.state import ScriptState
from elastic_ps.worker.wire.client import Client, expelled
from elastic_ps.worker.wire.dialogue import Step
from elastic_ps.worker.wire.measuring import Phases

logger = logging.getLogger(__name__)

_SKIPPED = (
    "%d records are skipped, and no worker trains them: their batch had no backward() before the next batch "
    "was loaded, or no step() followed. The job's report counts them. To make one step of several batches, "
    "run a backward() for each of them, or load larger batches. To load a batch ahead, do so between "
    "backward() and step(), because backward() is for the batch that was loaded last"
)

_LEFT = (
    "the script ends without a step for the last %d records that it has computed on; others may train them. "
    "When a step is made of several batches, call optimizer.step() for the last ones after the loop"
)

_COUNTED = (
    "this step has no batch: the last batch of session.loader(...) has had its step, or was skipped. Each "
    "batch allows one step only. Load another, or compute all gradients of a batch and make one step with "
    'them: see "One model, one or several optimizers" in docs/guides/scripts.md. If the batch came from '
    "elsewhere, pass its data set to session.loader(...)"
)

_FROM_ELSEWHERE = (
    "this step's batch did not come from session.loader(...), or the loop over it has ended, so its records "
    "cannot be counted. Iterate over session.loader(...), and pass it your data set or DataLoader. Make the "
    "step of a batch before you load the next one; DataLoader(..., num_workers=N) fetches ahead"
)

_WEIGHED_LATE = "session.weigh was called after backward(), which sends gradients. Call it before backward()"


class Runtime(Membership):
    """Drives one worker. Belongs to the training thread, except `begin_step` and `ready`.

    Those two are called by gradient hooks, one at a time, while the training thread waits in backward.

    Args:
        client: `close` closes it, with its trace and its history.
        given: the other arguments of `Membership`.

    Attributes:
        at_close: called when this worker leaves.
    """

    def __init__(self, spec: TrainingJobSpec, client: Client, **given: Any) -> None:
        super().__init__(spec, client, **given)
        self.at_close: list[Callable[[], object]] = []
        self._stopped = Stopping(client, self.world)
        self.records = Records(self, self._stopped, self.close)
        self.state = ScriptState(self)
        self.repeats += [self._stopped.repeat, self.state.repeat, self.records.repeat]
        self.phases = Phases(client.trace)
        self._warned = False
        self.untrained = False  # the batch in hand counts nowhere, see `ElasticLoader.untrained`
        self.send_rows: Callable[[pb.Caller, int, float], None] = lambda *_: None
        self.prefetch_rows: Callable[[Any, Callable[[], int]], object] = no_rows

    @property
    def closed(self) -> bool:
        """Whether this worker has left for good."""
        return self.working.state is State.LEFT

    @property
    def came_late(self) -> bool:
        """Whether the training was over before this worker made a step, and another one is the chief."""
        return self.records.over and not (self.steps or self.has_been_chief)

    @property
    def stopped(self) -> str:
        """Why a script has ended the training, as far as this worker knows; "" if none has."""
        return self._stopped.reason

    @property
    def made(self) -> Made:
        """How many workers and samples the version that this worker has was made of."""
        if self.local is not None and self.local.started is not None:
            return self.local.started.made
        text = self._strategy.info.settings if self._strategy else ""
        return read_settings(text).made if text else NOTHING

    # --- coming and going

    def close(self, *, failed: bool = False) -> None:
        """Leave the job and free everything. Other workers get this worker's records. Idempotent.

        Args:
            failed: the script has failed, so there is no warning of a step that it has not made. Its
                replacement is the chief, if this one was.
        """
        if self.closed:
            return
        in_step = self.working.in_step or self.working.state is State.IN_FLIGHT
        self.working.note(Event.LEAVE)
        over = failed or self.records.loop is Loop.RUNS or self.stopped or self.draining
        if self.batches.computed and not over:
            logger.warning(_LEFT, self.batches.samples)
        for call in self.at_close:
            call()
        strategy = self._strategy
        if strategy is not None:
            self.client.hasten()
            try:
                strategy.hand_over()
            except ElasticPSError as error:
                logger.info("this worker's last changes could not be sent to the parameter server: %s", error)
        self.leave(in_step=in_step, failed=failed)
        if strategy is not None:
            strategy.close()
        if self.local is not None:
            self.local.cancel()
        self.client.history.record("left", version=self.version)
        self.client.trace.close()
        self.client.history.close()

    def report(self, metrics: Mapping[str, Any], *, reduce: str = "mean") -> None:
        """Tell the job about values: with the step that is to be made, or at once.

        Raises:
            UsageError: a name or a value is not valid, or there is no step whose values could be reduced.
        """
        values = checked(metrics, reduce)
        if self.untrained:
            return
        if self.batches:
            self.batches.report(values, reduce)
        elif reduce != "mean":
            if not self.batches.lost:  # else its records are trained, and reported, by others
                raise UsageError(
                    f"session.metric(..., reduce={reduce!r}) was called outside of a step, where other "
                    "workers report nothing. Call it between a batch of the loader and its "
                    "optimizer.step(), or leave reduce out"
                )
        elif self.world.leads:
            said = pb.ReportRequest(metrics={name: float(value) for name, value in values.items()})
            try:
                self.client.ask(calls.REPORT, said)
            except Refused as refusal:
                if not expelled(refusal):
                    raise
                said.caller.term = said.caller.incarnation = 0  # no member until its next call, which joins
                self.client.ask(calls.REPORT, said)

    def weigh(self, weight: float) -> None:
        """The script says what this process's part of the batch weighs; see `Session.weigh`."""
        if self.working.state is State.PUSHING:
            raise UsageError(_WEIGHED_LATE)
        none = all(map(self.slices.has_none, self.batches.in_hand))
        self.batches.weigh(0.0 if none else weight)

    # --- steps

    def begin_step(self) -> None:
        """The first gradient of a step is there. Raises UsageError if it belongs to no batch."""
        self.require_batch()
        self.begin(self.batches.samples, self.batches.weight)

    @property
    def has_no_step(self) -> bool:
        """Whether the script has made no gradients of its batches, which are skipped if it makes none later.

        A script without any backward() may train buffers, such as new estimates of those of BatchNorm.
        False if the worker has several processes: another one may have made some. Or if it is too late.
        """
        may_have_made = self.batches.computed or self.batches.left_out or not self.world.alone
        return self.batches.undecided and not (may_have_made or self.gradients.may_make_a_step)

    def require_batch(self) -> None:
        """Raise UsageError if the step that is to be made belongs to no batch, or to too many."""
        self._settle_by_hand()
        if self.batches.undecided and not self.batches.computed:
            self.batches.compute_all()  # a step about buffers, or with gradients that it had before
        if not self.batches.computed and self.batches.hand is Hand.GIVEN_BACK:
            raise UsageError(
                "this step has no batch: the script left the loop over the loader before backward(), so "
                "the batch went back to the job. Run backward() inside the loop. If it calls "
                "next(iter(loader)), keep the iterator in a variable"
            )
        if not self.batches.computed:
            raise UsageError(_COUNTED if self.batches.in_batch else _FROM_ELSEWHERE)
        size = self.spec.consistency.global_batch_size
        if size is not None and (self.batches.several or self.batches.left_out):
            raise UsageError(
                "this script makes a step of several batches, or loads a batch before the step of the one "
                f"before, but consistency.globalBatchSize says already that a version is made of {size} "
                "records, however small the batches are. Call optimizer.step() after each backward(), before "
                "the next batch is loaded"
            )
        self.schedule.check()

    def begin(self, samples: int, weight: float | None, excluded: Set[int] = frozenset()) -> None:
        """Begin a step of so many records and this weight; see `Strategy.begin`."""
        self.phases.backward()
        strategy = self.strategy
        current, expected = self.schedule.current() if strategy.takes_drafts else None, ""
        if current is not None and current.max_grad_norm is None:  # else no drafts: the norm is not known yet
            expected = damping.warmed(current, self.spec.consistency, strategy.version).to_json()
        strategy.begin(self.new_step(strategy.version, samples, weight), expected, excluded=excluded)
        self.working.note(Event.BEGIN)

    def new_step(self, base: int, samples: int = 1, weight: float | None = None) -> Step:
        """The step that this worker makes next, on version `base`."""
        me, number = self.client.member_id, self.steps
        return Step(member_id=me, number=number, base=base, version=base, samples=samples, weight=weight)

    def ready(self, bucket: Bucket, present: Sequence[bool]) -> None:
        """A bucket's contribution is complete. Does not block."""
        self.phases.gradient()
        self.strategy.ready(bucket, present)

    def backward_ended(self) -> None:
        """The script calls `optimizer.step`."""
        self.phases.backward_ended()
        self.strategy.backward_ended()

    def finish_step(self) -> bool:
        """End the step that has begun, and wait for the version that it is part of. Blocks.

        Returns whether the step counts. In mode `accumulate` it does not wait if the version needs more steps
        than are under way. Records of a step that came too late, or was lost by joining again, go to others.

        Raises:
            UsageError: several batches were computed on with the gradients of one, or the parameter server
                refuses what the script has said of the step.
            InvalidModel: the optimizer has got a second momentum.
            Refused, ConnectionLost: the parameter server did not take the step.
        """
        step, ending, settings = self.ending()

        def finish() -> bool:
            self.send_rows(step.member_id.caller(), step.number, step.weighs)
            return self.strategy.finish(ending)

        if counts := self.await_version(finish, settings, step.number):
            self.batches.step_made()
        if self.records.presence is Presence.LAST_STEP:
            self.records.stop_computing()
        return counts

    def ending(self) -> tuple[Step, pb.FinishRequest, Settings]:
        """The step under way, the request that ends it, and its settings. Raises UsageError, InvalidModel."""
        step, batches = self.strategy.under_way, self.batches
        assert step is not None
        if self.local is None and step.samples != batches.samples:
            raise UsageError("backward() ran for two batches before optimizer.step(); call step() in between")
        self.log_skipped(batches.decide(keep_new=True))
        settings = self.schedule.current()
        self.check(settings)
        ending = pb.FinishRequest(
            ranges=ranges_to_message(batches.computed),
            settings=settings.to_json(),
            metrics=batches.metrics(),
            reductions=batches.reductions,
            skipped=ranges_to_message(batches.skipped),
        )
        return step, ending, settings

    def await_version(self, finish: Callable[[], bool], settings: Settings, number: int) -> bool:
        """Wait for a step's version with `finish`. Returns whether the step counts. See `finish_step`."""
        self.working.note(Event.END)
        try:
            with self.client.trace.span("wait", step=number):
                made = finish()
        except Refused as refusal:
            late = refusal.code is RefusalCode.LATE
            if late and not self.spec.consistency.waits_for_all:
                self.drop_all()
            elif late or self._is_left_out(refusal):
                # Some of the version may have arrived: pull what there is.
                logger.info("the step is dropped: the round is made without this worker")
                self.give_up_step()
                with self.rejoining(in_step=True):
                    self.strategy.fetch(self.version, contributor=False)
                    self.schedule.take_over(self.in_force)
            elif expelled(refusal):
                self.join_again(refusal)
            else:
                if refusal.code is RefusalCode.NOT_FINITE:
                    if self.world.leads:
                        with contextlib.suppress(ElasticPSError):  # it would spoil those of others: say why
                            self.client.ask(calls.REPORT, pb.ReportRequest(metrics={"loss": math.nan}))
                    self.skip()  # the script may go on
                if refusal.code is RefusalCode.INVALID:
                    raise UsageError(str(refusal)) from refusal
                raise
        except ElasticPSError:
            raise
        except BaseException:
            self.give_up_step()
            raise
        else:
            self.steps += 1
            self.working.note(Event.GET)
            self._stopped.learn(self.strategy.info.stopped)
            self._stopped.heed()
            if made:
                self.schedule.step_made(settings, self.in_force)
            return True
        return False

    def give_up_step(self) -> None:
        """Forget the step under way, and tell the parameter server at the next occasion.

        For a script that was interrupted while it waited, as by Ctrl-C in a notebook. This worker does not
        know whether the step is in the model. If it is not, its records go to others.
        """
        self.drop_all()
        self.working.note(Event.GIVE_UP)

    def _is_left_out(self, refusal: Refused) -> bool:
        """Whether this worker takes no part in the round any more, though it is a member: see `assign`."""
        if refusal.code is not RefusalCode.STALE_INCARNATION:
            return False
        try:
            self.world.decide("the end of a step", self.client.heartbeat)
        except Refused as gone:
            if not expelled(gone):
                raise
            return False
        return True

    def skip(self) -> None:
        """Make no step with the batches in hand. Nobody trains their records."""
        self.log_skipped(self.batches.skip())
        if self.working.in_step:  # some may be in the sums: this worker leaves the round, and comes again
            self.working.note(Event.GIVE_UP)
            self.drops, self.steps = self.drops + 1, self.steps + 1
            self.strategy.reset()
            if self.local is not None:
                self.local.void()
        self.gradients.void()
        if self.records.presence is Presence.LAST_STEP:
            self.records.stop_computing()

    def skip_dropped(self) -> None:
        """Skip the step under way if the script has dropped its gradients, and asks for the next batch."""
        if self.working.state is State.PUSHING and not self.gradients.may_make_a_step:
            self.world.decide("a batch whose gradients it has dropped", lambda: None)
            self.skip()

    def _settle_by_hand(self) -> None:
        if self.batches.undecided and self.gradients.note_by_hand():
            self.batches.compute()

    def settle(self) -> bool:
        """The loop is over: skip batches that no backward() has run for. Blocks for the other processes.

        Returns False if the script has still to make a step with what it has computed.
        """
        self._settle_by_hand()
        self.log_skipped(self.batches.decide())
        if self.batches.computed and not self.working.in_step:
            what = "the end of the loop over the loader"
            mine = self.gradients.may_make_a_step, self.gradients.finite()
            # A step may follow if some process has gradients, and all of them are finite.
            if not self.world.gather(what, mine, lambda of: any(t for t, _ in of) and all(f for _, f in of)):
                self.skip()
        return not self.batches.computed

    def log_skipped(self, records: int) -> None:
        """Log that so many records are skipped: the script may not know."""
        if records:
            logger.log(logging.DEBUG if self._warned else logging.WARNING, _SKIPPED, records)
            self._warned = True

    # --- records

    def stop(self, reason: str) -> None:
        """End the training on all workers; records that no step is made with are not trained.

        Blocks for the answer.
        """
        if not self.entered:
            raise UsageError("call session.optimizer(...) before session.stop(...)")
        with self.rejoining():
            self._stopped.ask(reason)

    def rows_refused(self, refusal: Refused) -> bool:
        """Rows of a table were refused. Returns whether they do not matter; else it has joined again.

        In a batch it cannot join again: values that backward() needs would change. That step is refused, too.
        """
        if expelled(refusal) and self.batches.may_step:
            return True
        if not (expelled(refusal) and self.world.alone):
            raise refusal
        self.join_again(refusal)
        self.gradients.void()
        return False

    def begin_batch(self, ranges: Sequence[Range]) -> None:
        """A batch of these records is handed to the script."""
        self._settle_by_hand()
        if self.batches.lost:
            self.gradients.void()
        if self.batches.mixes_lost:  # its gradients would mix with those of lost batches
            self.records.pause(tells=False)  # the script has begun a step: it would begin another each time
            self.batches.note(HandEvent.HAND_OUT_LOST)
        else:
            self.batches.add(ranges)
        self.phases.forward()
