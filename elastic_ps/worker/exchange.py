"""What a worker exchanges with the parameter server: gradients, and the versions that are made of them.

The training thread, in which backward runs, says here which buckets are ready, and when the step ends.
`Sending` has the threads that push them, `Receiving` those that receive the new version, and `Awaited` says
what is missing yet.

Buckets stay as they are until the new version is there, so that a round that starts again is pushed again
without computing anything again.

If the model's gradients are one bucket on one shard, the training thread itself pushes the step when it is
complete, and the new version is the answer to its last push: handing it to other threads would take longer.

With mode `accumulate`, and with a global batch size, a worker that has pushed a step asks what is next before
it pulls: it may have to compute another one on the same version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial

from elastic_ps.api.training import Consistency
from elastic_ps.codec import checksum
from elastic_ps.codec.plan import Plan
from elastic_ps.core.partition import Bucket, Rule
from elastic_ps.errors import ConnectionLost, Refused, UsageError
from elastic_ps.process.telemetry import History, Trace
from elastic_ps.worker.awaited import FINISH, Awaited, end_of
from elastic_ps.worker.client import Client
from elastic_ps.worker.dialogue import Ending, Step
from elastic_ps.worker.encoder import Encoder
from elastic_ps.worker.model import Flat
from elastic_ps.worker.receiving import Pull, Receiving
from elastic_ps.worker.sending import Sending
from elastic_ps.worker.strategy import Strategy
from elastic_ps.worker.values import Values

logger = logging.getLogger(__name__)

FETCHES = 10
"""How often buckets are fetched that are older than the rest, because new versions are made meanwhile."""


class Exchange(Strategy):
    """One worker's pushes and pulls. `ready`, `finish` and `fetch` belong to the main thread.

    Args:
        encoder: of the gradients.
        values: where those that are pulled are received.
        ahead: take drafts, where the mode allows it.
        consistency: the job's. Where rounds may be made without this worker, it asks before each step.

    Attributes:
        encoder, flat: as given.
        sending, receiving: the two ways.
    """

    def __init__(
        self,
        client: Client,
        flat: Flat,
        consistency: Consistency,
        encoder: Encoder,
        values: Values,
        *,
        ahead: bool = True,
        trace: Trace,
        history: History,
    ) -> None:
        super().__init__()
        self._client = client
        self.encoder, self.flat = encoder, flat
        self._history = history
        self._sends_ahead = ahead
        # With a single bucket of gradients nothing is there to be sent before backward ends.
        gradients = sum(bucket.rule is Rule.GRADIENT for bucket in flat.layout.pushed)
        self._small = client.shards == 1 and gradients == 1
        self._to_ask: dict[int, Pull] | None = None  # the rest, if some were asked when the step began
        self._stepped = [b for b in flat.layout.pull_order if b.rule is not Rule.CONSTANT]
        self._besides: Set[int] = frozenset()  # buckets that the step is not about
        self._held: dict[int, int] = {}  # of which version a bucket is, or was when it was pulled last
        self._awaited = Awaited()
        self.sending = Sending(client, flat, self._awaited, encoder, trace=trace, history=history)
        self.receiving = Receiving(
            client, flat, self._awaited, values, self.sending.answers, self.told, trace=trace
        )
        self._values = values
        self.adopt(consistency)

    def close(self) -> None:
        """See `Strategy`."""
        self._awaited.close()
        self.sending.close()
        self.receiving.close()

    def adopt(self, consistency: Consistency, codecs: Plan | None = None) -> None:
        """See `Strategy`."""
        if codecs is not None:
            self.encoder.adopt(codecs)
            self._values.adopt(codecs)
        self._may_be_stale = consistency.may_be_stale
        self._may_be_late = consistency.may_be_late
        self._holds_up = consistency.each_alone and consistency.reads_one_version
        self._accumulates = consistency.several_steps
        self._at_once = self._small and not (self._accumulates or self.encoder.tuner.active)
        self._may_ask_ahead = self._sends_ahead and consistency.waits_for_all and not self._at_once
        self.sending.adopt(consistency, at_once=self._at_once)

    def reset(self) -> None:
        """See `Strategy`."""
        with self._awaited.lock:
            self.sending.reset()
            self._awaited.reset()

    def give_up(self) -> None:
        """See `Strategy`."""
        self._awaited.fail(ConnectionLost("the script was interrupted"), self._awaited.generation)

    @property
    def under_way(self) -> Step | None:
        """The step whose pushes have begun."""
        return self._awaited.step

    # --- a step

    def begin(self, step: Step, settings: str = "", *, besides: Set[int] = frozenset()) -> None:
        """See `Strategy`. The settings are for drafts."""
        awaited = self._awaited
        with awaited.lock:
            awaited.begin(step)
            self._besides = besides
            self.encoder.begin(step.number, step.stay.term)
            self.receiving.ahead.forget()
            self._to_ask = None
            if self._accumulates:  # from now on, as the round may start again before the script ends the step
                awaited.expect({FINISH})
            self.sending.begin()
            if settings:
                pulls = self._expect_next(step)
                for shard in self._far:
                    sent = [b.index for b in self.flat.layout.pushed if b.shard == shard]
                    if buckets := [index for index in sent if index not in besides]:
                        early = pulls.pop(shard)._replace(buckets=buckets, ahead=settings)
                        self.receiving.ask_for({shard: early})
                self._to_ask = pulls

    @property
    def asks_ahead(self) -> bool:
        """Whether drafts are of use: a shard is on another host."""
        return self._may_ask_ahead and self.receiving.ahead.pays and bool(self._far)

    @property
    def _far(self) -> list[int]:
        """The shards on other hosts."""
        return [shard for shard in range(self._client.shards) if not self._client.is_near(shard)]

    def ready(self, bucket: Bucket, present: Sequence[bool]) -> None:
        """A bucket's contribution is complete; send it when those before it are sent. Does not block."""
        self.sending.ready(bucket, present)

    def finish(self, ending: Ending, *, publish: bool = True) -> bool:
        """See `Strategy`.

        Args:
            publish: give the values to the model; else they stay in flat memory, and this may run on another
                thread than the training thread.
        """
        awaited, step = self._awaited, self._awaited.step
        assert step is not None, "begin was called"
        if not self.sending.all_ready:
            raise UsageError("not all buckets are ready")
        if self._may_be_stale:
            version, awaited.attempt = self._client.begin(step)
            awaited.step = step = replace(step, version=version)
        elif self._may_be_late and self._at_once:
            self._client.begin(step)
        if self._accumulates and not self._push_alone(step, ending):
            awaited.step = None
            self.encoder.applied(in_sums=True)
            return False
        with awaited.lock:
            awaited.ending = ending
            awaited.changed.notify_all()
            awaited.versions.clear()
            self.flat.expect()
            pulls = self._expect_next(step) if self._to_ask is None else self._to_ask
            if not self._at_once:
                self.receiving.ask_for(pulls)
            if not self._accumulates:
                if not self._at_once:
                    awaited.missing.add(FINISH)
                self.sending.finish()
        if self._at_once:
            self.receiving.receive(0, pulls[0])
        self._wait()
        awaited.step = None
        self.encoder.applied()
        self._arrived_at(step.version + 1, self._besides, publish=publish)
        if self._history.enabled:
            self._history.record("applied", **step.applied(ending))
        self.computes_on(step.version + 1)
        return True

    def depart(self, ending: Ending) -> Callable[[], bool]:
        """See `Strategy`: `finish`, without giving the values to the model."""
        return partial(self.finish, ending, publish=False)

    def _push_alone(self, step: Step, ending: Ending) -> bool:
        """Push the rest, and block until the step is in a version. False: another one is to be computed."""
        awaited = self._awaited
        with awaited.lock:
            awaited.ending = ending
            self.sending.finish()
        while True:
            self._wait()
            with awaited.lock:
                attempt, generation = awaited.attempt, awaited.generation
            reply = self._client.await_version(step, attempt)
            kind = reply.WhichOneof("kind")
            if kind == "attempt":
                with awaited.lock:
                    awaited.missing.add(FINISH)
                    awaited.restart(reply.attempt, generation)
            elif kind != "pending":
                self.receiving.told.stopped = self.receiving.told.stopped or reply.stopped
                return reply.made

    def assign(self, step: Step, attempt: int) -> None:
        """See `Strategy`."""
        self.sending.assign(step, attempt)

    # --- versions

    def fetch(self, version: int, *, contributor: bool, besides: Set[int] = frozenset()) -> None:
        """See `Strategy`.

        A worker that takes part in the round gets all of one version. Otherwise new versions may be made
        meanwhile; what is older than the rest is then fetched again, some times: the script may look at it,
        though nothing is computed on it before the worker takes part.
        """
        awaited = self._awaited
        every = wanted = [b for b in self.flat.layout.pull_order if b.index not in besides]
        self.flat.check(thorough=True)
        self.reset()  # answers for what was given up, and what went wrong with it, mean nothing here
        awaited.versions.clear()
        for _ in range(FETCHES):
            with awaited.lock:
                self.flat.expect()
                self.receiving.ask_for(self._expect(version, wanted, contributor=contributor))
            self._wait()
            newest = max(awaited.versions.values(), default=version)
            wanted = [b for b in every if awaited.versions.get(b.index, newest) < newest]
            if contributor or not wanted:
                break
            version = newest
        if (standing := self.receiving.standing) is not None:
            self.encoder.settle(made=standing.steps, term=self._client.term, version=standing.version)
        self._arrived_at(version, besides)
        if contributor:
            self.computes_on(version)

    def _arrived_at(self, version: int, besides: Set[int], *, publish: bool = True) -> None:
        """The values of `version` are there, or newer ones: their version is the oldest bucket's.

        Those of the buckets `besides` were not pulled.
        """
        versions = self._awaited.versions
        arrived = [b for b in self._stepped if b.index not in besides]
        self._held |= {b.index: versions.get(b.index, version) for b in arrived}
        if self._history.enabled:
            values = [(b.index, self._held[b.index], checksum(self.flat.value_bytes(b))) for b in arrived]
            self._history.record("values", term=self._client.stay.term, values=values)
        if publish:
            self.flat.publish(besides=besides)
        self.version = max(version, min(versions.values(), default=version))

    def computes_on(self, version: int) -> None:
        """See `Strategy`.

        It has to know if they are newer, or if it makes no version before it knows that they are read.
        """
        if self._holds_up or (self._may_be_stale and self.version > version):
            try:
                self._client.heartbeat(computes_on=self.version)
            except Refused as refusal:
                logger.debug("%s", refusal)  # the next call is refused, too

    def _expect(
        self, version: int, wanted: Sequence[Bucket], *, contributor: bool, held: int | None = None
    ) -> dict[int, Pull]:
        """Nothing of `wanted` has arrived; returns what to ask which shard for. The lock is held."""
        missing = {bucket.index for bucket in wanted}
        pulls = {}
        for shard in range(self._client.shards):
            own = [b.index for b in wanted if b.shard == shard]
            if own or shard == 0:
                missing.add(end_of(shard))
                generation = self._awaited.generation
                pulls[shard] = Pull(self._client.stay, generation, version, contributor, own, held)
        self._awaited.expect(missing)
        return pulls

    def _expect_next(self, step: Step) -> dict[int, Pull]:
        """See `_expect`: of the version that the step is to be part of."""
        wanted = [b for b in self._stepped if b.index not in self._besides]
        held = min((self._held.get(b.index, self.version) for b in wanted), default=self.version)
        return self._expect(step.version + 1, wanted, contributor=True, held=min(held, self.version))

    def _wait(self) -> None:
        """Until nothing is missing any more, or something has gone wrong."""
        while not self._awaited.wait(5):
            if self._awaited.missing == {FINISH}:
                self._client.heartbeat()  # a version without this worker: it was declared gone; this raises
