"""The calls that a parameter server answers: protobuf headers in, `Coordinator` and `Node` out.

Every shard has a `Node`; shard 0 also has the `Coordinator`. Nothing is decided here; `permissions` says who
may call what. A process answers only what somebody has to ask it: shard 0 gives orders, so it takes none, and
no worker ever asks a standby.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from elastic_ps import codec
from elastic_ps.codec.auto import CANDIDATES
from elastic_ps.codec.optimizers import Entry
from elastic_ps.codec.plan import Plan
from elastic_ps.core import script_state
from elastic_ps.core.consistency import After, Contribution
from elastic_ps.core.reduced import Peer, Place
from elastic_ps.core.sequence import PushKey
from elastic_ps.core.sizing import Link
from elastic_ps.errors import CheckpointError, InvalidJob, Malformed, RefusalCode, Refused
from elastic_ps.server import permissions
from elastic_ps.server.coordinator import Coordinator, NotYet
from elastic_ps.server.copying import Part
from elastic_ps.server.decoder import Decoder
from elastic_ps.server.encoder import ValueEncoder
from elastic_ps.server.meeting import Meeting
from elastic_ps.server.node import Node
from elastic_ps.server.orders import (
    OrderId,
    advance_from_message,
    advance_to_message,
    configuration_from_message,
    report_to_message,
    settings_from_message,
)
from elastic_ps.server.pulls import Pulled, RestartedAs
from elastic_ps.server.shard import Shard
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Frame, Incoming
from elastic_ps.transport.convert import (
    layout_to_message,
    ranges_from_message,
    ranges_to_message,
    tensors_from_message,
)

M = TypeVar("M", bound=Message)

PROBE = 4 * 1024 * 1024
"""Bytes of the body of a Probe, at most."""

Calls = Mapping[str, Callable[[Incoming], Iterator[Frame]]]
"""What answers calls, by their names."""

HEADER = 2 * 1024 * 1024
"""Bytes of a header at most, unless it describes a model. Parsed, it takes up to forty times that."""


def parse(kind: type[M], header: bytes) -> M:
    """Raises Malformed if `header` is not such a message."""
    try:
        return kind.FromString(header)
    except DecodeError as error:
        raise Malformed(f"not a {kind.__name__}: {error}") from error


def _link(request: pb.JoinRequest) -> Link | None:
    """What the worker has found of its network, if it has. Raises Malformed."""
    if not request.HasField("link"):
        return None
    link = Link(request.link.rate, request.link.seconds)
    if not all(math.isfinite(each) and each >= 0 for each in link):
        raise Malformed(f"Join: no network is like {link}")
    return link


def require_job(named: str, job: str) -> None:
    """Raises Refused if a call names another job; who does not know the job's name is not told it."""
    if named != job:
        raise Refused(RefusalCode.WRONG_JOB, f"this is the parameter server of another job than {named!r}")


def require_permitted(problem: str | None) -> None:
    """Raises Refused (FORBIDDEN) if `permissions` has a problem with a call."""
    if problem is not None:
        raise Refused(RefusalCode.FORBIDDEN, problem)


def check_caller(caller: pb.Caller, incoming: Incoming, job: str) -> None:
    """Raises Refused if a worker that calls is not who it says, or of another job."""
    require_permitted(permissions.refuse_to_speak_for(incoming.peer, caller.worker))
    require_job(caller.job, job)


class _Coding(NamedTuple):
    """What gradients and values are on the wire with these codecs."""

    codecs: Plan
    decoder: Decoder
    encoder: ValueEncoder


class Service:
    """A `transport.base.Handler` for one parameter server.

    Args:
        meeting: of the workers, with `strategy: all-reduce`.
        beside: other calls that it answers, by their names.

    Attributes:
        methods: what answers calls, by their names.
    """

    def __init__(
        self,
        job: str,
        node: Node,
        coordinator: Coordinator | None,
        *,
        standby: bool = False,
        meeting: Meeting | None = None,
        beside: Calls | None = None,
    ) -> None:
        self._job, self._meeting = job, meeting
        self._node = node
        self._coding: _Coding | None = None
        self._coordinator, self._standby = coordinator, standby
        self._join_header, self._model_known = 0, False
        self._waste = bytearray()  # what a Probe brings goes here, also of several at the same time
        self.methods: dict[str, Callable[[Incoming], Iterator[Frame]]] = {**(beside or {})}
        if coordinator is None:
            self.methods |= {"Configure": self._configure, "Advance": self._advance}
        if standby:
            self.methods |= {"State": self._state, "Sum": self._sum, "Held": self._held}
        else:
            self.methods |= {
                "Init": self._init,
                "InitState": self._init_state,
                "Push": self._push,
                "Pull": self._pull,
                "OptimizerState": self._optimizer_state,
            }
        if coordinator is not None:
            self.methods |= {
                "Join": self._join,
                "Probe": self._probe,
                "InitDone": self._init_done,
                "Take": self._take,
                "Release": self._release,
                "Stop": self._stop,
                "Chief": self._chief,
                "ReadState": self._read_state,
                "WriteState": self._write_state,
                "Begin": self._begin,
                "Await": self._await,
                "Assign": self._assign,
                "Finish": self._finish,
                "Meet": self._meet,
                "Heartbeat": self._heartbeat,
                "Leave": self._leave,
                "Report": self._report,
                "Gone": self._gone,
            }

    def __call__(self, method: str, incoming: Incoming) -> Iterator[Frame]:
        require_permitted(
            permissions.refuse(incoming.peer, method, shard=self._node.index, standby=self._standby)
        )
        handler = self.methods.get(method)
        if handler is None:
            raise Refused(RefusalCode.UNKNOWN_METHOD, f"shard {self._node.index} has no method {method}")
        self._check_header(method, len(incoming.header))
        return handler(incoming)

    def _check_header(self, method: str, size: int) -> None:
        """Raise Malformed for one that is longer than any of ours, before it is parsed."""
        describes = method == "Configure" or (method == "Join" and not self._model_known)
        limit = max(HEADER, 2 * self._join_header if method == "Join" else 0)
        if size > limit and not describes:
            raise Malformed(f"{method}: a header of {size} bytes; the limit is {limit}")

    @property
    def _members(self) -> Coordinator:
        assert self._coordinator is not None
        return self._coordinator

    @property
    def _together(self) -> Meeting:
        if self._meeting is None:
            raise Refused(RefusalCode.INVALID, "workers meet only in a job with strategy all-reduce")
        return self._meeting

    def _coding_of(self, shard: Shard) -> _Coding:
        """What a shard's gradients and values are on the wire; it may be something else in another term."""
        coding = self._coding
        if coding is None or coding.codecs is not shard.codecs:
            codecs = shard.codecs
            self._coding = coding = _Coding(codecs, Decoder(codecs), ValueEncoder(codecs))
        return coding

    def _check(self, caller: pb.Caller, incoming: Incoming, *, joined: bool = True) -> pb.Caller:
        """The worker that calls. Raises Refused if it is not who it says, or no member (any more)."""
        check_caller(caller, incoming, self._job)
        if not joined:
            return caller
        term = self._coordinator.job.term if self._coordinator is not None else self._node.term
        if caller.term != term:
            text = f"message of term {caller.term}; this is term {term}"
            raise Refused(RefusalCode.STALE_TERM if term else RefusalCode.NOT_READY, text)
        if not self._node.configured:
            self._require_member(caller)
        return caller

    def _require_member(self, caller: pb.Caller) -> None:
        """Raise Refused if shard 0 knows that the caller is no member.

        To be asked also where a message is too early. Terms are counted anew if the checkpoints are lost, so
        a worker of before may name this one, and versions that are far away.
        """
        if self._coordinator is not None:
            self._coordinator.heartbeat(caller.worker, caller.incarnation)

    # --- what every shard answers to workers

    def _init(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.InitRequest, incoming.header)
        caller = self._check(request.caller, incoming)
        version = request.version if request.HasField("version") else None
        who = caller.worker, caller.incarnation
        if version is not None:
            self._members.heartbeat(*who)
        self._node.shard.initialise(request.bucket, *who, incoming, version=version)
        yield _done()

    def _init_state(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.InitStateRequest, incoming.header)
        caller = self._check(request.caller, incoming)
        self._node.shard.initialise_state(
            request.bucket,
            request.piece,
            [Entry(entry.key, entry.dtype, entry.scalar) for entry in request.entries],
            caller.worker,
            caller.incarnation,
            incoming,
            version=request.version if request.HasField("version") else None,
        )
        yield _done()

    def _push(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.PushRequest, incoming.header)
        caller = self._check(request.caller, incoming)
        key = PushKey(
            term=caller.term,
            worker=caller.worker,
            incarnation=caller.incarnation,
            step=request.step,
            bucket=request.bucket,
            version=request.version,
            attempt=request.attempt,
        )
        try:
            added = self._added(key, request, incoming)
        except Refused as refusal:
            if refusal.code is RefusalCode.WRONG_VERSION:
                self._require_member(caller)
            if refusal.code is not RefusalCode.STALE_ATTEMPT or not self._is_applied(request):
                raise
            added = False
        else:
            if request.HasField("finish") and self._coordinator is not None:
                added = self._finished(request.finish, incoming) or added
        if request.HasField("pull"):
            yield from self._pulled(request.pull, caller)
        else:
            yield _done(duplicate=not added)

    def _added(self, key: PushKey, request: pb.PushRequest, incoming: Incoming) -> bool:
        """Whether the gradient was not in the round's sum before."""
        shard = self._node.shard
        if shard.term != key.term:  # a new term may have begun, in which gradients look different
            raise Refused(RefusalCode.STALE_TERM, f"push of term {key.term}; this is term {shard.term}")
        with self._coding_of(shard).decoder.open(
            request, shard.layout, shard.bucket(key.bucket), incoming
        ) as body:
            return shard.push(key, request.samples, request.present, body)

    def _is_applied(self, request: pb.PushRequest) -> bool:
        """Whether a push that ends a step is repeated because its answer was lost; the version is there."""
        if not request.HasField("finish") or self._coordinator is None:
            return False
        caller = request.caller
        return self._coordinator.is_applied(caller.worker, caller.incarnation, request.step)

    def _pull(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.PullRequest, incoming.header)
        return self._pulled(request, self._check(request.caller, incoming))

    def _pulled(self, request: pb.PullRequest, caller: pb.Caller) -> Iterator[Frame]:
        attempt = None
        if request.contributor and self._coordinator is not None:
            # Who was declared gone would wait in vain, and could not join again meanwhile.
            self._require_member(caller)
            attempt = request.attempt
        version, shard = request.version, self._node.shard
        encoder = self._coding_of(shard).encoder
        for item in self._items(shard, request, caller, attempt):
            if item is None:
                self._require_member(caller)
                yield _frame(pb.PullReply(pending=True))
                return
            if isinstance(item, RestartedAs):
                yield _frame(pb.PullReply(attempt=item.attempt))
                return
            assert isinstance(item, Pulled)
            version = item.version
            sent = encoder.encode(shard, item)
            reply = pb.PullReply(
                bucket=item.bucket,
                version=item.version,
                unchanged=item.unchanged,
                encoded=sent.run,
                delta=sent.delta,
                draft=item.draft,
                stands=item.stands,
                last=request.brief and item.last,
            )
            if reply.last:
                self._end_pull(reply, request, caller)
            yield Frame(reply.SerializeToString(), sent.body, last=reply.last)
            if reply.last:
                return
        end = pb.PullReply(done=True, version=version)
        self._end_pull(end, request, caller)
        yield _frame(end)

    def _end_pull(self, reply: pb.PullReply, request: pb.PullRequest, caller: pb.Caller) -> None:
        """What shard 0 says of the job with the last answer to a pull.

        Raises:
            Refused: the caller was declared gone while it waited, so its step may not be in the version.
        """
        if self._coordinator is not None:
            if request.contributor:
                self._require_member(caller)
            job, worker = self._coordinator.job, caller.worker
            reply.settings, reply.stopped, reply.steps = job.said_to(worker)
            if not request.HasField("held"):  # else its step is in the version
                reply.standing.version, reply.standing.steps = job.standing(worker, reply.version)

    def _items(
        self, shard: Shard, request: pb.PullRequest, caller: pb.Caller, attempt: int | None
    ) -> Iterator[Pulled | RestartedAs | None]:
        who = caller.worker, caller.incarnation
        held = request.held if request.HasField("held") else None
        if request.ahead and request.contributor:
            return shard.pull_ahead(
                request.buckets,
                request.version,
                term=caller.term,
                attempt=attempt,
                contributor=who,
                held=held,
                drafts=request.drafts,
                groups=settings_from_message(request.ahead).groups,
            )
        return shard.pull(
            request.buckets,
            request.version,
            term=caller.term,
            attempt=attempt,
            contributor=who if request.contributor else None,
            held=held,
        )

    def _optimizer_state(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.OptimizerStateRequest, incoming.header)
        self._check(request.caller, incoming, joined=False)
        for entry in self._node.shard.state():
            header = pb.OptimizerStateReply(
                tensor=entry.tensor,
                start=entry.start,
                key=entry.key,
                dtype=codec.name_of(entry.value.dtype),
                scalar=entry.scalar,
            )
            yield Frame(header.SerializeToString(), codec.as_bytes(entry.value))
        yield _frame(pb.OptimizerStateReply(done=True))

    # --- what other shards and standbys answer to shard 0

    def _configure(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.ConfigureRequest, incoming.header)
        require_job(request.job, self._job)
        order = OrderId(request.source, request.number)
        try:
            self._node.configure(configuration_from_message(request), order)
        except InvalidJob as error:
            raise Refused(RefusalCode.INVALID, str(error)) from error
        except CheckpointError as error:  # shard 0 has verified it, so what is wrong here may pass
            raise Refused(RefusalCode.NOT_READY, str(error)) from error
        yield _done()

    def _advance(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.AdvanceRequest, incoming.header)
        require_job(request.job, self._job)
        order = OrderId(request.source, request.number)
        yield _frame(report_to_message(self._node.advance(advance_from_message(request), order)))

    # --- what a standby answers

    def _state(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.StateRequest, incoming.header)
        require_job(request.job, self._job)
        part = Part(
            bucket=request.bucket,
            tensor=request.tensor,
            start=request.start,
            key=request.key,
            dtype=request.dtype,
            scalar=request.scalar,
            last=request.last,
        )
        order = OrderId(request.source, request.number)
        self._node.take_state(request.term, part, incoming, order)
        yield _done()

    def _sum(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.SumRequest, incoming.header)
        require_job(request.job, self._job)
        place = (request.term, request.bucket, request.version, request.attempt)
        self._node.take_sum(*place, request.present, incoming)
        yield _done()

    def _held(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.HeldRequest, incoming.header)
        require_job(request.job, self._job)
        orders = self._node.held(request.term)
        yield _frame(pb.HeldReply(orders=[advance_to_message(self._job, order) for order in orders]))

    # --- what shard 0 answers

    def _join(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.JoinRequest, incoming.header)
        caller = self._check(request.caller, incoming, joined=False)
        link = _link(request)
        joined = self._members.join(
            caller.worker,
            pid=request.pid,
            host=request.host,
            tensors=tensors_from_message(request.tensors),
            optimizer=request.optimizer.name,
            settings=settings_from_message(request.optimizer.groups),
            again=request.again,
            instance=request.instance,
            transport=incoming.transport,
            call=caller.call,
            follows=caller.incarnation,
            peer=Peer(request.address, request.torch),
            measures=request.measures,
            link=link,
        )
        if isinstance(joined, NotYet):
            yield _frame(pb.JoinReply(pending=True, measure=joined is NotYet.MEASURE))
            return
        self._join_header = max(self._join_header, len(incoming.header))
        self._model_known |= not joined.initialise
        yield _frame(
            pb.JoinReply(
                term=joined.term,
                incarnation=joined.stay.incarnation,
                version=joined.version,
                layout=layout_to_message(joined.layout),
                initialise=joined.initialise,
                lease_ms=round(self._members.job.lease.total_seconds() * 1000),
                settings=joined.settings.to_json(),
                tuning=joined.tuning.to_json(),
                codecs=joined.codecs,
            )
        )

    def _probe(self, incoming: Incoming) -> Iterator[Frame]:
        self._check(parse(pb.ProbeRequest, incoming.header).caller, incoming, joined=False)
        if incoming.size > PROBE:
            raise Malformed(f"Probe: a body of {incoming.size} bytes; the limit is {PROBE}")
        if incoming.size:
            self._waste = self._waste or bytearray(PROBE)
            incoming.read_into(memoryview(self._waste)[: incoming.size])
        yield _done()

    def _init_done(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.InitDoneRequest, incoming.header)
        caller = self._check(request.caller, incoming)
        if request.HasField("version"):
            self._node.shard.require_values(request.version)
            self._together.sent(caller.worker, caller.incarnation, version=request.version)
        else:
            self._members.initialised(caller.worker, caller.incarnation)
        self._model_known = True
        yield _done()

    def _take(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.TakeRequest, incoming.header)
        caller = self._check(request.caller, incoming)
        if not (request.records and request.epochs and request.batch):
            raise Refused(RefusalCode.MALFORMED, "records, epochs and batch must be at least 1")
        taken = self._members.take(
            caller.worker,
            caller.incarnation,
            call=caller.call,
            records=request.records,
            epochs=request.epochs,
            batch=request.batch,
            wait=request.wait,
            abandoned=request.abandoned,
            skipped=ranges_from_message(request.skipped),
            early=request.early,
            data=request.data,
            epoch=request.epoch if request.HasField("epoch") else None,
        )
        yield _frame(
            pb.TakeReply(
                ranges=ranges_to_message(taken.ranges),
                version=taken.version,
                finished=taken.finished,
                chief=taken.chief,
                pending=taken.pending,
                stopped=self._members.job.stopped,
            )
        )

    def _release(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.ReleaseRequest, incoming.header)
        caller = self._check(request.caller, incoming)
        self._members.release(
            caller.worker,
            caller.incarnation,
            call=caller.call,
            abandoned=request.abandoned,
            skipped=ranges_from_message(request.skipped),
            leaves=request.leaves,
        )
        yield _done()

    def _stop(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.StopRequest, incoming.header)
        caller = self._check(request.caller, incoming)
        if not request.reason:
            raise Refused(RefusalCode.MALFORMED, "the reason for stopping the job must not be empty")
        self._members.stop(caller.worker, caller.incarnation, request.reason)
        yield _done()

    def _chief(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.ChiefRequest, incoming.header)
        caller = self._check(request.caller, incoming)
        chief = self._members.is_chief(
            caller.worker, caller.incarnation, epoch=request.epoch, passes=request.passes
        )
        yield _frame(pb.ChiefReply(chief=chief))

    def _read_state(self, incoming: Incoming) -> Iterator[Frame]:
        self._check(parse(pb.ReadStateRequest, incoming.header).caller, incoming, joined=False)
        yield _frame(pb.ReadStateReply(text=self._members.read_state()))

    def _write_state(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.WriteStateRequest, incoming.header)
        caller = self._check(request.caller, incoming)
        try:
            script_state.from_text(request.text)
        except ValueError as error:
            raise Malformed(f"WriteState: {error}") from error
        self._members.write_state(
            caller.worker, caller.incarnation, request.text, call=caller.call, again=request.again
        )
        yield _done()

    def _begin(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.BeginRequest, incoming.header)
        caller = self._check(request.caller, incoming)
        begun = self._members.begin(
            caller.worker, caller.incarnation, version=request.version, step=request.step
        )
        if begun is None:
            yield _frame(pb.BeginReply(pending=True))
        else:
            yield _frame(pb.BeginReply(version=begun.version, attempt=begun.attempt))

    def _await(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.AwaitRequest, incoming.header)
        caller = self._check(request.caller, incoming)
        answer = self._members.await_version(
            caller.worker, caller.incarnation, attempt=request.attempt, step=request.step
        )
        if answer is None:
            yield _frame(pb.AwaitReply(pending=True))
            return
        after, attempt = answer
        if after is After.PULL:
            yield _frame(pb.AwaitReply(made=True))
        elif after is After.COMPUTE:
            yield _frame(pb.AwaitReply(compute=True, stopped=self._members.job.stopped))
        else:
            yield _frame(pb.AwaitReply(attempt=attempt))

    def _assign(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.AssignRequest, incoming.header)
        caller = self._check(request.caller, incoming)
        answer = self._members.assign(caller.worker, caller.incarnation, version=request.version)
        if answer is None:
            yield _frame(pb.AssignReply(pending=True))
            return
        yield _frame(
            pb.AssignReply(
                version=answer.version,
                attempt=answer.attempt,
                done=answer.done,
                takes_part=answer.takes_part,
            )
        )

    def _finish(self, incoming: Incoming) -> Iterator[Frame]:
        yield _done(duplicate=not self._finished(parse(pb.FinishRequest, incoming.header), incoming))

    def _finished(self, request: pb.FinishRequest, incoming: Incoming) -> bool:
        caller = self._check(request.caller, incoming)
        if request.settings:
            settings_from_message(request.settings)
        contribution = Contribution(
            worker=caller.worker,
            incarnation=caller.incarnation,
            step=request.step,
            samples=request.samples,
            records=ranges_from_message(request.ranges),
            settings=request.settings,
            metrics=dict(request.metrics),
            reductions=dict(request.reductions),
            skipped=ranges_from_message(request.skipped),
            assigns=request.assigns,
        )
        told = request.traffic.ListFields()
        traffic: dict[str, Any] = {
            field.name: value for field, value in told if isinstance(value, str) or math.isfinite(value)
        }
        if traffic.get("codec", "") not in CANDIDATES:
            traffic.pop("codec", None)
        return self._members.finish(
            contribution, version=request.version, attempt=request.attempt, traffic=traffic
        )

    def _meet(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.MeetRequest, incoming.header)
        caller = self._check(request.caller, incoming)
        who = caller.worker, caller.incarnation
        if request.parts:
            yield _frame(pb.MeetReply(send=self._together.parts(*who, version=request.version)))
            return
        if request.HasField("finish"):
            try:
                self._finished(request.finish, incoming)
            except Refused as refusal:
                if refusal.code is not RefusalCode.STALE_ATTEMPT:  # the answer says which is open
                    raise
        try:
            place = Place(request.place) if request.HasField("place") else None
        except ValueError as error:
            raise Malformed(str(error)) from error
        met = self._together.meet(
            *who,
            version=request.version,
            attempt=request.attempt if request.HasField("attempt") else None,
            place=place,
            holds=request.holds,
            broken=request.broken,
        )
        if met is None:
            yield _frame(pb.MeetReply(pending=True))
            return
        yield _frame(
            pb.MeetReply(
                version=met.version,
                attempt=met.attempt,
                together=met.together,
                lacking=met.lacking,
                group=[
                    pb.Peer(worker=worker, incarnation=incarnation, address=peer.address)
                    for worker, incarnation, peer in met.group
                ],
                all_hold=met.all_hold,
                source=met.source,
                values_are_here=met.values_are_here,
                send=met.send,
                settings=self._members.job.settings,
                stopped=self._members.job.stopped,
            )
        )

    def _heartbeat(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.HeartbeatRequest, incoming.header)
        caller = self._check(request.caller, incoming)
        self._members.heartbeat(caller.worker, caller.incarnation)
        if request.HasField("version"):
            self._members.computes_on(caller.worker, caller.incarnation, version=request.version)
        yield _done()

    def _leave(self, incoming: Incoming) -> Iterator[Frame]:
        caller = self._check(parse(pb.LeaveRequest, incoming.header).caller, incoming)
        self._members.leave(caller.worker, caller.incarnation, call=caller.call)
        yield _done()

    def _report(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.ReportRequest, incoming.header)
        caller = self._check(request.caller, incoming, joined=bool(request.caller.incarnation))
        self._members.report(caller.worker, caller.incarnation, request.metrics)
        yield _done()

    def _gone(self, incoming: Incoming) -> Iterator[Frame]:
        request = parse(pb.GoneRequest, incoming.header)
        require_permitted(permissions.refuse_to_end(incoming.peer, request.worker))
        require_job(request.job, self._job)
        self._members.gone(request.worker, request.instance)
        yield _done()


def _frame(message: Message) -> Frame:
    """The last answer to a call."""
    return Frame(message.SerializeToString(), last=True)


def _done(*, duplicate: bool = False) -> Frame:
    return _frame(pb.Done(duplicate=duplicate))
