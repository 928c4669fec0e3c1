"""Steps with `strategy: all-reduce`: the workers add up gradients among themselves, and each makes the step.

The parameter server says which workers make a version of which records (`core.all_reduce`). A worker keeps
its gradients until the version is made. So if the group loses a member, the others repeat the round as
another group, and compute nothing again. A worker makes the step when shard 0 has said that the round is
made, so all make it or none does.

The answer to the end of a step says who makes the next version. If these are the same workers, they begin to
add up while backward goes on. If the round starts again, they add up again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Container, Sequence, Set
from typing import NamedTuple

import torch

from elastic_ps.codec import checksum
from elastic_ps.codec.finite import WHAT_TO_DO, require_finite
from elastic_ps.codec.limits import limited
from elastic_ps.codec.reductions import REDUCTIONS
from elastic_ps.collectives.groups import Broken, Group, Store
from elastic_ps.core.all_reduce import Barrier
from elastic_ps.core.partition import Bucket, Rule
from elastic_ps.core.settings import KEEP_ZEROS, LIMITS, Settings, clip_divisor
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.transport import calls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.worker.model.flat import Flat
from elastic_ps.worker.strategies.replica import Replica
from elastic_ps.worker.strategies.strategy import Strategy, VersionInfo
from elastic_ps.worker.wire.client import Client
from elastic_ps.worker.wire.dialogue import Step

logger = logging.getLogger(__name__)

OVERLAP_WITHIN = 5.0
"""A worker begins to add up during backward if all had computed so many seconds after its last one had begun.

An operation of the group fails after some more seconds without the others.
"""


class _Group(NamedTuple):
    """A process group, and its last round.

    Attributes:
        version, attempt: of that round.
        members: each as (worker, incarnation).
        made: the last version that it has made.
    """

    version: int
    attempt: int
    members: Sequence[tuple[int, int]]
    group: Group
    made: int = -1


class AllReduce(Strategy):
    """Steps that the workers make together, without the parameter server. `make_step` steps `optimizer`."""

    cannot_assign = (
        "session.assign does not work with strategy all-reduce, where all workers would have to assign "
        "the values at the same version. Set strategy: parameter-server"
    )

    def __init__(
        self,
        client: Client,
        flat: Flat,
        replica: Replica,
        optimizer: torch.optim.Optimizer,
        make_step: Callable[[], object],
        *,
        store: Store,
    ) -> None:
        super().__init__()
        self._client, self._flat, self._replica = client, flat, replica
        self._optimizer, self._make_step = optimizer, make_step
        self._store, self._trace, self._history = store, client.trace, client.history
        self._sums = _Reducer(flat)
        specs = zip(flat.tensors, flat.layout.tensors, strict=True)
        self._trained = {id(tensor) for tensor, spec in specs if spec.rule is Rule.GRADIENT}
        self._present: dict[int, Sequence[bool]] = {}
        self._replica_of: tuple[int, int] | None = None  # the term and version of which this replica is
        self._settled: tuple[int, int] | None = None  # the version and attempt whose group has the version
        self._group: _Group | None = None
        self._left: list[Group] = []  # groups in which an operation is still under way
        self._open: pb.MeetReply | None = None  # the open round, as it was when this worker had its version
        self._overlap: Group | None = None  # what adds up the step under way while backward goes on
        self._adding = False  # the group has begun to add up in its round
        self._broken: Broken | None = None  # why it cannot come to a sum
        self._problem: Refused | None = None  # why the step under way cannot be part of one
        self._began = 0.0
        self._lasted = math.inf  # from the first gradient of the last step until all had computed theirs

    def begin(self, step: Step, settings: str = "", *, excluded: Set[int] = frozenset()) -> None:  # noqa: ARG002
        self.under_way, self._problem, self._overlap = step, None, None
        self._present.clear()
        self._began = time.monotonic()
        assert not self._adding, "a step that is not made is forgotten with its group"
        if self._lasted < OVERLAP_WITHIN:
            met, self._open = self._open, None
            # Those of the version that this worker has, if they make the next one as well.
            self._overlap = self._same_group(met) if met and met.version == step.version else None
        if self._overlap is not None:
            self._adding = True
            self._sums.begin(step.weighs)

    def ready(self, bucket: Bucket, present: Sequence[bool]) -> None:
        self._present[bucket.index] = present
        try:
            # What a device is still copying comes with the next bucket, so that backward waits for nothing.
            while self._overlap and (due := self._sums.due(self._present)) and self._flat.is_here(due):
                self._require_finite(due)
                self._sums.add(due, self._present[due.index], self._overlap)
        except Refused as problem:
            self._problem, self._overlap = problem, None
        except Broken as problem:
            self._broken, self._overlap = problem, None

    def _require_finite(self, bucket: Bucket) -> None:
        """Raise Refused (NOT_FINITE) if this worker's gradients or buffers would spoil those of all."""
        step = self.under_way
        assert step is not None, "begin was called"
        usual = self._flat.value_of(bucket) if bucket.rule in (Rule.MEAN, Rule.BROADCAST) else None
        who = f"worker {step.member_id.worker}, step {step.number}, bucket {bucket.index}"
        require_finite(self._flat.contribution_of(bucket), who, usual=usual, advice=WHAT_TO_DO)

    def reset(self) -> None:
        """Forget the step under way, and the group."""
        self.under_way = self._settled = None
        self._drop_group()

    def close(self) -> None:
        """Free the group. Other workers may still need the store, until this process ends."""
        self._drop_group()

    def computes_on(self, version: int) -> None:
        """This worker takes part in the round on `version`."""
        if not self.has(version):
            self._enter(version)

    def fetch(self, version: int, *, contributor: bool, excluded: Set[int] = frozenset()) -> None:  # noqa: ARG002
        """See `Strategy`. A worker that takes no part gets the version if the parameter server has it."""
        if contributor:
            self._enter(version)
            return
        met = self._client.meet(self._client.member_id, version, None, holds=self.has(version))
        self._learn(met)
        if met.values_are_here and met.version == version and not self.has(version):
            self._take_over(version)
        self.version = version

    def finish(self, ending: pb.FinishRequest) -> bool:
        """See `Strategy`: add the gradients up with those of the others, and make the step."""
        step = self.under_way
        assert step is not None, "begin was called"
        if self._problem is not None:
            raise self._problem
        for bucket in self._flat.layout.pushed[self._sums.begun if self._adding else 0 :]:
            self._require_finite(bucket)
        while True:
            version, attempt = self._settled or (None, None)
            if version != step.version:
                attempt = None
            met = self._client.meet(
                step.member_id, step.version, attempt, barrier=Barrier.GRADIENTS, holds=True
            )
            if met.version != step.version:
                raise Refused(RefusalCode.LATE, f"version {met.version} is made without this worker's step")
            if met.together:
                self._lasted = time.monotonic() - self._began
                try:
                    self._reduce(step, met)
                except Broken as problem:
                    met = self._tell_broken(met, problem)
                else:
                    ended = (step, ending)
                    met = self._client.meet(step.member_id, step.version, met.attempt, ended=ended)
            if met.version > step.version:
                break
            self._settle(met)
        self._apply(step, met, ending)
        self._settle(met)
        return True

    def hand_over(self) -> None:
        if self._replica_of is None:
            return
        term, version = self._replica_of
        if term != self._client.term:
            return
        if self._client.ask(calls.MEET, pb.MeetRequest(version=version, parts=True)).send:
            self._replica.send(version)

    def has(self, version: int) -> bool:
        """Whether this replica is of that version, as it is in this term."""
        return self._replica_of == (self._client.term, version)

    # --- meeting the others

    def _enter(self, version: int) -> None:
        """Get the version that this worker is to make a step on with the others."""
        met = self._client.meet(self._client.member_id, version, None)
        self._settle(met)
        if met.version != version or not self.has(version):
            text = f"this worker was to make a round on version {version}, but the job is at {met.version}"
            raise Refused(RefusalCode.STALE_INCARNATION, text)
        self.version = version

    def _settle(self, met: pb.MeetReply) -> None:
        """Take over the open round. Blocks until all of its workers have its version."""
        while True:
            version = met.version
            self._learn(met)
            if met.send and self.has(version):
                self._replica.send(version)
            self._open = None if met.lacking else met
            if not met.lacking or self._settled == (version, met.attempt):
                self._settled = version, met.attempt
                return
            member_id, holds = self._client.member_id, self.has(version)
            met = self._client.meet(member_id, version, met.attempt, barrier=Barrier.STATE, holds=holds)
            if met.version != version:
                return
            if met.together:
                try:
                    self._share(met)
                except Broken as problem:
                    met = self._tell_broken(met, problem)
                else:
                    self._settled = (version, met.attempt)
                    if holds or not self.has(version):
                        return
                    # If its source ends now, nobody but this worker has the version.
                    met = self._client.meet(
                        member_id, version, met.attempt, barrier=Barrier.STATE, holds=True
                    )
                    if met.version != version:
                        return

    def _share(self, met: pb.MeetReply) -> None:
        """Give the version to the workers that lack it. Raises Broken."""
        if met.all_hold:
            return
        if not met.HasField("source"):
            if not self.has(met.version):
                self._take_over(met.version)
            return
        group, started = self._group_for(met), time.monotonic_ns()
        source = [peer.worker for peer in met.group].index(met.source)
        lacks = not self.has(met.version)
        if lacks:
            self._replica_of = None
        self._replica.share(group, source, lambda: self._look(met))
        self._trace.complete("state", started, time.monotonic_ns(), version=met.version)
        if lacks:
            self._hold(met.version, self._client.term)

    def _take_over(self, version: int) -> None:
        """Get the version from the parameter server."""
        self._replica_of = None
        if self._replica.fetch(version):
            self._hold(version, self._client.term)

    def _group_for(self, met: pb.MeetReply) -> Group:
        """The process group of the round's workers, a new one or the last one. Raises Broken."""
        if (same := self._same_group(met)) is not None:
            return same
        members, me = _members(met), self._client.member_id
        self._drop_group()
        started = time.monotonic_ns()
        name = f"{me.term}/{met.version}/{met.attempt}"
        rank = members.index((me.worker, me.incarnation))
        made = Group(name, [peer.address for peer in met.group], rank, self._store.host)
        self._trace.complete("group", started, time.monotonic_ns(), members=len(members))
        logger.info("a group of %d workers makes version %d", len(members), met.version + 1)
        self._group = _Group(met.version, met.attempt, members, made)
        return made

    def _same_group(self, met: pb.MeetReply) -> Group | None:
        """The last round's process group, if it makes this one, and all of it know that."""
        last = self._group
        if last is None or list(last.members) != _members(met):
            return None
        # If it has made the version, all of them know that; else some may be of a newer group.
        next_round = met.attempt == 0 and last.made == met.version
        if not next_round and (last.version, last.attempt) != (met.version, met.attempt):
            return None
        self._group = last._replace(version=met.version, attempt=met.attempt)
        return last.group

    def _drop_group(self) -> None:
        self._overlap = self._broken = None
        self._adding = False
        if self._group is not None:
            if not self._group.group.at_rest:
                self._left.append(self._group.group)
                self._sums = _Reducer(self._flat)  # the operation may still write to the old ones
            self._group = None
        self._left = [group for group in self._left if not group.at_rest]

    def _look(self, met: pb.MeetReply) -> None:
        """Raises Broken if this is not the open round any more."""
        now = self._client.meet(self._client.member_id, met.version, None)
        if (now.version, now.attempt) != (met.version, met.attempt):
            raise Broken("the round is made by other workers")

    def _tell_broken(self, met: pb.MeetReply, problem: Broken) -> pb.MeetReply:
        """Report a group that has lost its connections. Blocks for the next attempt, and returns it."""
        logger.info("the group of version %d is broken: %s", met.version + 1, problem)
        self._drop_group()
        deadline = time.monotonic() + self._client.limits.recovery.total_seconds()
        while True:
            broken = time.monotonic() > deadline
            attempt = met.attempt if broken else None
            now = self._client.meet(self._client.member_id, met.version, attempt, broken=broken)
            if (now.version, now.attempt) != (met.version, met.attempt):
                return now
            time.sleep(0.01)

    def _learn(self, met: pb.MeetReply) -> None:
        self.info = VersionInfo(met.settings, self.info.stopped or met.stopped)

    # --- the step

    def _reduce(self, step: Step, met: pb.MeetReply) -> None:
        """Make the sums, or what is left to do of them. Raises Broken."""
        for bucket in self._flat.layout.pushed:
            self._history.record("push", **step.pushed(bucket.index, met.attempt))
        group, started = self._group_for(met), time.monotonic_ns()
        if self._broken is not None:
            raise self._broken
        if not self._adding:
            self._adding = True
            self._sums.begin(step.weighs)
        while (due := self._sums.due(self._present)) is not None:
            self._sums.add(due, self._present[due.index], group)
        assert self._sums.begun == len(self._flat.layout.pushed), "all buckets are complete"
        group.all_reduce(self._sums.counts)
        group.wait(lambda: self._look(met))
        self._trace.complete("reduce", started, time.monotonic_ns(), step=step.number, attempt=met.attempt)

    def _apply(self, step: Step, met: pb.MeetReply, ending: pb.FinishRequest) -> None:
        """The round is made: make the step."""
        self._learn(met)
        settings = Settings.from_json(met.settings)
        for group, values in zip(self._optimizer.param_groups, settings.groups, strict=True):
            group.update({k: tuple(v) if isinstance(group.get(k), tuple) else v for k, v in values.items()})
        self._replica_of = self._overlap = None
        self._adding = False
        self._sums.publish(settings.max_grad_norm)
        limits = [
            {**group, "params": [each for each in group["params"] if id(each) in self._trained]}
            for group in self._optimizer.param_groups
            if any(group.get(key) for key in (*LIMITS, KEEP_ZEROS))
        ]
        with limited(limits):
            self._make_step()
        self.under_way, self.version = None, step.version + 1
        if self._group is not None:
            self._group = self._group._replace(made=self.version)
        self._history.record("applied", **step.applied(ending))
        self._hold(self.version, step.member_id.term)

    def _hold(self, version: int, term: int) -> None:
        """This replica has the version now."""
        self._replica_of = (term, version)
        if self._history.enabled:
            self._flat.gather()
            values = [
                (bucket.index, version, checksum(self._flat.value_bytes(bucket)))
                for bucket in self._flat.layout.pushed
            ]
            self._history.record("values", term=self._client.member_id.term, values=values)


class _Reducer:
    """Adds up a round, and gives the result to the model. Contributions stay as they are until `publish`.

    Attributes:
        begun: how many buckets are being added up.
        counts: the total weight, and, for each gradient, how many have it.
    """

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        self._gradients = [i for i, spec in enumerate(flat.layout.tensors) if spec.rule is Rule.GRADIENT]
        self._place = {tensor: 1 + place for place, tensor in enumerate(self._gradients)}
        self.counts = torch.zeros(1 + len(self._gradients), dtype=torch.float64, device="cpu")
        self._totals: dict[int, torch.Tensor] = {}
        self._weight, self.begun = 0.0, 0

    def begin(self, weight: float) -> None:
        """A step of this weight begins. All of a group begin with the same bucket."""
        self.counts.zero_()
        self.counts[0] = weight
        self._weight, self.begun = weight, 0

    def due(self, complete: Container[int]) -> Bucket | None:
        """The bucket that comes next, in the layout's order, if it is among the complete ones."""
        pushed = self._flat.layout.pushed
        bucket = pushed[self.begun] if self.begun < len(pushed) else None
        return bucket if bucket is not None and bucket.index in complete else None

    @torch.no_grad()
    def add(self, bucket: Bucket, present: Sequence[bool], group: Group) -> None:
        """Begin to add up the bucket that is due. Blocks until its contribution has arrived.

        Args:
            present: which of its pieces have a gradient.

        Raises:
            Broken: the operation cannot begin.
        """
        self.begun += 1
        own, reduction = self._flat.contribution_of(bucket), REDUCTIONS[bucket.rule]
        if (total := self._totals.get(bucket.index)) is None:
            total = self._totals[bucket.index] = torch.empty_like(own, dtype=reduction.dtype(own.dtype))
        total.copy_(own)
        if bucket.rule is Rule.GRADIENT:
            for piece, has in zip(bucket.pieces, present, strict=True):
                self.counts[self._place[piece.tensor]] = int(has)
        if reduction.name == "mean":
            total.mul_(self._weight)
        if reduction.name == "first":
            group.broadcast(total, 0)
        else:
            group.all_reduce(total, maximum=reduction.name == "max")

    @torch.no_grad()
    def publish(self, norm: float | None) -> None:
        """Give the model's parameters the mean gradients, and its buffers the values that the version has.

        Args:
            norm: the 2-norm that the mean gradient has at most.
        """
        flat, weight = self._flat, float(self.counts[0])
        divisor = weight * self._clipped(norm, weight)
        for bucket in flat.layout.pushed:
            total = self._totals[bucket.index]
            if REDUCTIONS[bucket.rule].name == "mean":
                total.div_(divisor if bucket.rule is Rule.GRADIENT else weight)
            flat.contribution_of(bucket).copy_(total)
            flat.written(bucket)
        made: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, spec in enumerate(flat.layout.tensors):
            tensor = flat.tensors[index]
            if spec.rule is Rule.GRADIENT:
                if not int(self.counts[self._place[index]]):
                    tensor.grad = None
                    continue
                if tensor.grad is None or tensor.grad.is_sparse:
                    tensor.grad = torch.empty_like(tensor)
                made.append((tensor.grad, flat.writable_contribution(index)))
            elif spec.rule is Rule.SUM:
                made.append((tensor, flat.value(index).add_(flat.writable_contribution(index))))
            elif spec.rule is not Rule.CONSTANT:
                made.append((tensor, flat.writable_contribution(index)))
                flat.value(index).copy_(flat.writable_contribution(index))
        flat.give(made)

    def _clipped(self, norm: float | None, weight: float) -> float:
        """By what the mean is divided."""
        if norm is None:
            return 1.0
        gradients = [b.index for b in self._flat.layout.pushed if b.rule is Rule.GRADIENT]
        norms = [float(torch.linalg.vector_norm(self._totals[i], dtype=torch.float64)) for i in gradients]
        return clip_divisor(math.hypot(*norms) / weight, norm)


def _members(met: pb.MeetReply) -> list[tuple[int, int]]:
    """The members of a round, by rank, as (worker, incarnation)."""
    return [(peer.worker, peer.incarnation) for peer in met.group]
