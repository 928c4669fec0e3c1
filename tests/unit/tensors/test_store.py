"""What a shard does with the tensors that scripts keep there, call by call; against a small model, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from elastic_ps.codec import as_tensor
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.tensors.limits import USUAL, TensorLimits
from elastic_ps.tensors.spread import PUSH_RULES, PushRule, spread
from elastic_ps.tensors.store import Sender, TensorStore
from elastic_ps.transport import messages_pb2 as pb
from tests.testing.shard import Body

BUCKET = 1024
A, B = (0, "a"), (1, "b")
NOTHING = Body(torch.empty(0))


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Place(NamedTuple):
    """Which tensor a call means."""

    name: str
    birth: pb.Birth
    life: int


def shard(index: int = 0, shards: int = 1, **options: Any) -> TensorStore:
    given: dict[str, Any] = {"bucket_bytes": BUCKET, "most_bytes": 1 << 20, "clock": Clock(), **options}
    return TensorStore(index, shards, **given)


def sent_by(who: Sender) -> dict[str, Any]:
    return {"caller": pb.Caller(worker=who[0]), "instance": who[1]}


def said(birth: pb.Birth | None, store: TensorStore, **more: bool) -> pb.DeclareTensorReply:
    return pb.DeclareTensorReply(birth=birth, life=store.life, **more)


def declare(
    store: TensorStore,
    who: Sender,
    name: str,
    shape: Sequence[int],
    dtype: str = "float32",
    birth: pb.Birth | None = None,
    **told: Any,
) -> pb.DeclareTensorReply:
    tensor = pb.Named(name=name, shape=shape, dtype=dtype, birth=birth)
    reply = store.declare(pb.DeclareTensorRequest(**sent_by(who), tensor=tensor, **told), NOTHING)
    assert isinstance(reply, pb.DeclareTensorReply)
    return reply


def bring(store: TensorStore, name: str, values: torch.Tensor, who: Sender = A) -> Place:
    """Initialise a tensor of float32 on a store that is alone."""
    told = declare(store, who, name, values.shape)
    assert told.bring
    for each in spread(name, values.shape, "float32", bucket_bytes=BUCKET, shards=1):
        part = values.view(-1)[each.start : each.start + each.length]
        put(store, who, name, values.shape, told.birth, each.start, part)
    return Place(name, told.birth, told.life)


def put(
    store: TensorStore, who: Sender, name: str, shape: Any, birth: pb.Birth, start: int, part: torch.Tensor
) -> bool:
    tensor = pb.Named(name=name, shape=shape, dtype="float32", birth=birth)
    reply = store.put(pb.PutTensorRequest(**sent_by(who), tensor=tensor, start=start), Body(part))
    assert isinstance(reply, pb.PutTensorReply)
    return not reply.later


def push(
    store: TensorStore,
    who: Sender,
    number: int,
    place: Place,
    *,
    start: int,
    rule: str,
    values: torch.Tensor | None = None,
) -> bool:
    """Whether that was new."""
    request = pb.PushTensorRequest(**sent_by(who), **place._asdict(), number=number, start=start, rule=rule)
    reply = store.push(request, NOTHING if values is None else Body(values))
    assert isinstance(reply, pb.Done)
    return not reply.duplicate


def free(store: TensorStore, name: str, birth: pb.Birth) -> bool:
    """Whether it was there."""
    reply = store.free(pb.FreeTensorRequest(name=name, birth=birth), NOTHING)
    assert isinstance(reply, pb.Done)
    return not reply.duplicate


def values_of(store: TensorStore, place: Place) -> list[float]:
    frames = store.pull(pb.PullTensorRequest(**place._asdict()), NOTHING)
    assert isinstance(frames, Iterator)
    return torch.cat([as_tensor(frame.body, torch.float32).clone() for frame in frames]).tolist()


def refusal(call: Callable[[], object]) -> tuple[RefusalCode, str]:
    with pytest.raises(Refused) as caught:
        call()
    return caught.value.code, str(caught.value)


def test_the_first_workers_values_are_those_of_the_tensor() -> None:
    store = shard()
    first = declare(store, A, "w", (2,))
    assert (first.bring, first.pending) == (True, False)
    assert declare(store, B, "w", (2,)) == said(first.birth, store, pending=True)
    assert declare(store, A, "w", (2,)) == first, "a call that comes twice"
    assert put(store, A, "w", (2,), first.birth, 0, torch.tensor([1.0, 2.0]))
    assert declare(store, B, "w", (2,)) == said(first.birth, store)
    place = Place("w", first.birth, store.life)
    assert put(store, A, "w", (2,), first.birth, 0, torch.tensor([7.0, 7.0])), "again, and too late"
    assert values_of(store, place) == [1.0, 2.0]


def test_what_is_read_and_given_is_a_copy() -> None:
    store, given = shard(), torch.zeros(2)
    place = bring(store, "w", given)
    given.fill_(9.0)
    frames = store.pull(pb.PullTensorRequest(**place._asdict()), NOTHING)
    assert isinstance(frames, Iterator)
    as_tensor(next(frames).body, torch.float32).fill_(9.0)
    assert values_of(store, place) == [0.0, 0.0]


def test_a_worker_that_brings_nothing_loses_its_turn() -> None:
    clock = Clock()
    store = shard(clock=clock)
    slow = declare(store, A, "w", (2,))
    clock.now = USUAL.bring.total_seconds()
    assert declare(store, B, "w", (2,)).pending
    clock.now += 1
    second = declare(store, B, "w", (2,))
    assert second.bring
    assert second.birth.number > slow.birth.number
    late = refusal(lambda: put(store, A, "w", (2,), slow.birth, 0, torch.ones(2)))
    assert late[0] is RefusalCode.GONE
    assert put(store, B, "w", (2,), second.birth, 0, torch.zeros(2))
    assert values_of(store, Place("w", second.birth, store.life)) == [0.0, 0.0]


def test_a_worker_that_still_brings_a_tensor_keeps_its_turn() -> None:
    clock = Clock()
    store = shard(clock=clock)
    first = declare(store, A, "w", (600,))
    for start in (0, 200):
        clock.now += USUAL.bring.total_seconds() - 1
        assert put(store, A, "w", (600,), first.birth, start, torch.zeros(200))
        assert declare(store, B, "w", (600,)).pending
    clock.now += USUAL.bring.total_seconds() - 1
    assert declare(store, A, "w", (600,)) == first, "it may be busy with other shards"
    clock.now += USUAL.bring.total_seconds() - 1
    assert declare(store, B, "w", (600,)).pending
    assert put(store, A, "w", (600,), first.birth, 400, torch.zeros(200))
    assert declare(store, B, "w", (600,)) == said(first.birth, store)


def test_another_shard_says_what_it_lacks() -> None:
    shape, birth, later = (600,), pb.Birth(number=3, origin=1), pb.Birth(number=4, origin=1)
    slices = spread("w", shape, "float32", bucket_bytes=BUCKET, shards=2)
    home = slices[0].shard
    store = shard(1 - home, 2)
    assert declare(store, B, "w", shape, birth=birth) == said(None, store, bring=True)
    for each in slices:
        if each.shard != home:
            assert put(store, A, "w", shape, birth, each.start, torch.zeros(each.length))
    assert declare(store, B, "w", shape, birth=birth) == said(birth, store)
    assert declare(store, B, "w", shape, birth=later) == said(birth, store, bring=True)
    start, length = next((each.start, each.length) for each in slices if each.shard != home)
    for number, origin in ((2, 1), (3, 2), (1, 9)):  # older, or of another life of the home
        other = pb.Birth(number=number, origin=origin)
        assert not put(store, A, "w", shape, other, start, torch.ones(length))
    assert declare(store, B, "w", shape, birth=birth) == said(birth, store)
    assert put(store, A, "w", shape, later, start, torch.ones(length)), "it takes the place of the one before"
    assert declare(store, B, "w", shape, birth=birth) == said(later, store, bring=True)
    code, _ = refusal(lambda: declare(shard(1 - home, 2), A, "w", (1,)))
    assert code is RefusalCode.MALFORMED, "its home is the other one"
    assert declare(store, B, "w", (1,), birth=birth) == said(birth, store), "it is at home"


def test_a_tensor_that_another_shard_has_lost_begins_anew() -> None:
    store = shard()
    place = bring(store, "w", torch.zeros(2))
    again = declare(store, B, "w", (2,), lost=place.birth)
    assert again.bring
    assert again.birth.number > place.birth.number
    assert declare(store, A, "w", (2,), lost=place.birth).pending, "told twice"
    code, text = refusal(lambda: push(store, A, 1, place, start=0, rule="zero"))
    assert (code, "'w'" in text) == (RefusalCode.GONE, True)


def test_a_birth_is_above_what_other_shards_have() -> None:
    store = shard()
    assert declare(store, A, "w", (2,)).birth == pb.Birth(number=1, origin=store.life)
    assert declare(store, A, "w", (2,), above=7).birth.number == 8
    assert declare(store, A, "w", (2,), above=7).birth.number == 8
    assert declare(store, A, "other", (2,)).birth.number == 9


def test_each_rule_changes_a_tensor_as_it_says() -> None:
    store = shard()
    place = bring(store, "w", torch.tensor([1.0, 2.0]))
    assert push(store, A, 1, place, start=0, rule="add", values=torch.tensor([10.0, 20.0]))
    assert values_of(store, place) == [11.0, 22.0]
    assert push(store, A, 2, place, start=0, rule="copy", values=torch.tensor([5.0, 6.0]))
    assert values_of(store, place) == [5.0, 6.0]
    assert push(store, B, 1, place, start=0, rule="zero")
    assert values_of(store, place) == [0.0, 0.0]


def test_a_push_that_comes_again_or_late_changes_nothing() -> None:
    store, one = shard(), torch.ones(1)
    place = bring(store, "w", torch.zeros(1))
    assert push(store, A, 5, place, start=0, rule="add", values=one)
    for late in (5, 4):
        assert not push(store, A, late, place, start=0, rule="add", values=one)
    assert push(store, B, 1, place, start=0, rule="add", values=one), "another process counts by itself"
    assert push(store, (0, "a2"), 1, place, start=0, rule="add", values=one), "and so does the next"
    assert values_of(store, place) == [3.0]


def test_the_slices_of_a_push_count_one_by_one() -> None:
    store = shard()
    place = bring(store, "w", torch.zeros(600))
    slices = spread("w", (600,), "float32", bucket_bytes=BUCKET, shards=1)
    assert len(slices) > 2
    for each in slices:
        for new in (True, False):
            values = torch.ones(each.length)
            assert push(store, A, 1, place, start=each.start, rule="add", values=values) is new
    assert set(values_of(store, place)) == {1.0}


def test_so_many_processes_are_remembered() -> None:
    store = shard(limits=TensorLimits(senders=2))
    place = bring(store, "w", torch.zeros(1))

    def pushed(who: str, number: int) -> bool:
        return push(store, (0, who), number, place, start=0, rule="zero")

    assert all(pushed(*each) for each in [("a", 1), ("b", 1), ("a", 2), ("c", 1)])
    assert not pushed("a", 2)
    assert not pushed("c", 1)
    assert pushed("b", 1), "it has pushed longest ago, and is forgotten"


def test_a_process_that_was_started_again_says_what_it_has_lost() -> None:
    place = bring(shard(), "w", torch.zeros(1))
    store = shard()
    bring(store, "w", torch.zeros(1))  # of the same name and birth
    for call in (
        lambda: push(store, A, 1, place, start=0, rule="zero"),
        lambda: values_of(store, place),
    ):
        code, text = refusal(call)
        assert code is RefusalCode.GONE
        assert "'w' is lost: parameter server 0" in text
        assert "started again" in text


def test_a_tensor_that_is_not_whole_is_not_used() -> None:
    store = shard()
    said = declare(store, A, "w", (600,))
    put(store, A, "w", (600,), said.birth, 0, torch.zeros(200))
    place = Place("w", said.birth, said.life)
    assert refusal(lambda: values_of(store, place))[0] is RefusalCode.GONE


def test_what_was_freed_is_gone_and_its_memory_is_there_again() -> None:
    store = shard(most_bytes=8)
    place = bring(store, "w", torch.zeros(2))
    assert store.nbytes == 8
    assert not free(store, "w", pb.Birth(number=place.birth.number, origin=1))
    assert free(store, "w", place.birth)
    assert not free(store, "w", place.birth)
    assert store.nbytes == 0
    code, text = refusal(lambda: push(store, A, 1, place, start=0, rule="zero"))
    assert code is RefusalCode.GONE
    assert "it was freed, or initialised again" in text
    again = bring(store, "w", torch.ones(2), B)
    assert not free(store, "w", place.birth), "an old call"
    assert values_of(store, again) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "text"),
    [
        ("", (1,), "float32", "1 to 200 printable characters"),
        ("x" * 201, (1,), "float32", "1 to 200 printable characters"),
        ("a\nb", (1,), "float32", "1 to 200 printable characters"),
        ("w", (1,), "complex64", "dtype complex64; expected one of float16, bfloat16"),
        ("w", (2, 0), "float32", "no elements"),
        ("w", (1,) * 65, "float32", "more than 64 dimensions"),
        ("w", (3,), "float32", "needs 12 bytes on parameter server 0, which has room for 8"),
        ("w", (1 << 62, 1 << 62), "float32", "parameterServer.tensorBytes: 8"),
    ],
)
def test_what_cannot_be_kept(name: str, shape: tuple[int, ...], dtype: str, text: str) -> None:
    store = shard(most_bytes=8)
    code, said = refusal(lambda: declare(store, A, name, shape, dtype))
    assert code is RefusalCode.INVALID
    assert text in said
    assert store.nbytes == 0


def test_another_shape_or_dtype_is_refused() -> None:
    store = shard()
    bring(store, "w", torch.zeros(2, 3))
    for shape, dtype in [((3, 2), "float32"), ((2, 3), "float64")]:
        code, text = refusal(partial(declare, store, B, "w", shape, dtype))
        assert code is RefusalCode.INVALID
        assert "initialised as float32[2, 3]" in text


def test_so_many_tensors_and_no_more() -> None:
    store = shard(limits=TensorLimits(tensors=2))
    place = bring(store, "a", torch.zeros(1))
    bring(store, "b", torch.zeros(1))
    assert "free some" in refusal(lambda: declare(store, A, "c", (1,)))[1]
    free(store, "a", place.birth)
    bring(store, "c", torch.zeros(1))


def test_what_nobody_brings_takes_no_memory_for_ever() -> None:
    clock = Clock()
    store = shard(clock=clock)
    declare(store, A, "w", (100,))
    assert store.nbytes == 400
    clock.now = USUAL.bring.total_seconds() + 1
    bring(store, "other", torch.zeros(1))
    assert store.nbytes == 4


NAMES = ["u", "v"]
LENGTHS = {"u": 3, "v": 600}
"""`v` has several slices."""


class Model(RuleBasedStateMachine):
    """Two processes; whatever was sent may come again, at any time."""

    sent = Bundle("sent")

    @initialize()
    def begin(self) -> None:
        self.store = shard()
        self.expected: dict[str, torch.Tensor] = {}
        self.places: dict[str, Place] = {}
        self.numbers = {A: 0, B: 0}

    @rule(name=st.sampled_from(NAMES), who=st.sampled_from([A, B]), value=st.integers(-3, 3))
    def init(self, name: str, who: Sender, value: int) -> None:
        values = torch.full((LENGTHS[name],), float(value))
        if name in self.expected:
            said = declare(self.store, who, name, values.shape)
            assert (said.bring, said.birth) == (False, self.places[name].birth)
            return
        self.expected[name], self.places[name] = values, bring(self.store, name, values, who)

    @rule(
        target=sent,
        name=st.sampled_from(NAMES),
        who=st.sampled_from([A, B]),
        how=st.sampled_from(PUSH_RULES),
        value=st.integers(-3, 3),
    )
    def push(self, name: str, who: Sender, how: PushRule, value: int) -> Sequence[Callable[[], bool]]:
        if name not in self.expected:
            return []
        self.numbers[who] += 1
        number, place = self.numbers[who], self.places[name]
        calls = [
            partial(
                push,
                self.store,
                who,
                number,
                place,
                start=each.start,
                rule=how,
                values=torch.full((each.length,), float(value)),
            )
            for each in spread(name, (LENGTHS[name],), "float32", bucket_bytes=BUCKET, shards=1)
        ]
        for call in calls:
            assert call()
            assert not call()
        before = self.expected[name]
        self.expected[name] = {
            "add": before + value,
            "copy": torch.full_like(before, value),
            "zero": torch.zeros_like(before),
        }[how]
        return calls

    @rule(calls=consumes(sent), which=st.integers(0, 9))
    def again(self, calls: Sequence[Callable[[], bool]], which: int) -> None:
        """A copy that the network has kept: its tensor has changed since, or is another one."""
        for call in calls[which % (len(calls) or 1) :]:
            assert not self.changes(call)

    def changes(self, call: Callable[[], bool]) -> bool:
        try:
            return call()
        except Refused as error:
            return error.code is not RefusalCode.GONE

    @rule(name=st.sampled_from(NAMES))
    def free(self, name: str) -> None:
        if name in self.expected:
            assert free(self.store, name, self.places.pop(name).birth)
            del self.expected[name]

    @rule()
    def start_again(self) -> None:
        self.store, before = shard(), self.places
        self.expected, self.places = {}, {}
        for place in before.values():
            assert refusal(partial(values_of, self.store, place))[0] is RefusalCode.GONE

    @invariant()
    def is_as_expected(self) -> None:
        for name, values in self.expected.items():
            assert values_of(self.store, self.places[name]) == values.tolist()
        assert self.store.nbytes == 4 * sum(map(len, self.expected.values()))


TestAgainstAModel = Model.TestCase
TestAgainstAModel.settings = settings(stateful_step_count=30)
