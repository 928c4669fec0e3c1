"""What a shard does with the tensors that scripts keep there, call by call; against a small model, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.tensors.limits import USUAL, TensorLimits
from elastic_ps.tensors.spread import PUSH_RULES, PushRule, spread
from elastic_ps.tensors.store import UNBORN, Birth, Declared, Place, Sender, Tensors

BUCKET = 1024
A, B = Sender(0, "a"), Sender(1, "b")


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def shard(index: int = 0, shards: int = 1, **options: Any) -> Tensors:
    given: dict[str, Any] = {"bucket_bytes": BUCKET, "most_bytes": 1 << 20, "clock": Clock(), **options}
    return Tensors(index, shards, **given)


def bring(store: Tensors, name: str, values: torch.Tensor, who: Sender = A) -> Place:
    """Initialise a tensor of float32 on a store that is alone."""
    said = store.declare(who, name, values.shape, "float32")
    assert said.bring
    for each in spread(name, values.shape, "float32", bucket_bytes=BUCKET, shards=1):
        part = values.view(-1)[each.start : each.start + each.length]
        put(store, who, name, values.shape, said.birth, each.start, part)
    return Place(name, said.birth, said.life)


def put(
    store: Tensors, who: Sender, name: str, shape: Any, birth: Birth, start: int, part: torch.Tensor
) -> bool:
    if store.expect(who, name, shape, "float32", birth=birth, start=start) is None:
        return False
    store.put(who, name, birth=birth, start=start, values=part)
    return True


def values_of(store: Tensors, place: Place) -> list[float]:
    return torch.cat([part for _, part in store.pull(place)]).tolist()


def refusal(call: Callable[[], object]) -> tuple[RefusalCode, str]:
    with pytest.raises(Refused) as caught:
        call()
    return caught.value.code, str(caught.value)


def test_the_first_workers_values_are_those_of_the_tensor() -> None:
    store = shard()
    first = store.declare(A, "w", (2,), "float32")
    assert (first.bring, first.pending) == (True, False)
    assert store.declare(B, "w", (2,), "float32") == Declared(first.birth, store.life, pending=True)
    assert store.declare(A, "w", (2,), "float32") == first, "a call that comes twice"
    assert put(store, A, "w", (2,), first.birth, 0, torch.tensor([1.0, 2.0]))
    assert store.declare(B, "w", (2,), "float32") == Declared(first.birth, store.life)
    place = Place("w", first.birth, store.life)
    assert put(store, A, "w", (2,), first.birth, 0, torch.tensor([7.0, 7.0])), "again, and too late"
    assert values_of(store, place) == [1.0, 2.0]


def test_what_is_read_and_given_is_a_copy() -> None:
    store, given = shard(), torch.zeros(2)
    place = bring(store, "w", given)
    given.fill_(9.0)
    (_, read), *_ = store.pull(place)
    read.fill_(9.0)
    assert values_of(store, place) == [0.0, 0.0]


def test_a_worker_that_brings_nothing_loses_its_turn() -> None:
    clock = Clock()
    store = shard(clock=clock)
    slow = store.declare(A, "w", (2,), "float32")
    clock.now = USUAL.bring.total_seconds()
    assert store.declare(B, "w", (2,), "float32").pending
    clock.now += 1
    second = store.declare(B, "w", (2,), "float32")
    assert second.bring
    assert second.birth.number > slow.birth.number
    late = refusal(lambda: put(store, A, "w", (2,), slow.birth, 0, torch.ones(2)))
    assert late[0] is RefusalCode.GONE
    assert put(store, B, "w", (2,), second.birth, 0, torch.zeros(2))
    assert values_of(store, Place("w", second.birth, store.life)) == [0.0, 0.0]


def test_a_worker_that_still_brings_a_tensor_keeps_its_turn() -> None:
    clock = Clock()
    store = shard(clock=clock)
    first = store.declare(A, "w", (600,), "float32")
    for start in (0, 200):
        clock.now += USUAL.bring.total_seconds() - 1
        assert put(store, A, "w", (600,), first.birth, start, torch.zeros(200))
        assert store.declare(B, "w", (600,), "float32").pending
    clock.now += USUAL.bring.total_seconds() - 1
    assert store.declare(A, "w", (600,), "float32") == first, "it may be busy with other shards"
    clock.now += USUAL.bring.total_seconds() - 1
    assert store.declare(B, "w", (600,), "float32").pending
    assert put(store, A, "w", (600,), first.birth, 400, torch.zeros(200))
    assert store.declare(B, "w", (600,), "float32") == Declared(first.birth, store.life)


def test_another_shard_says_what_it_lacks() -> None:
    shape, birth, later = (600,), Birth(3, 1), Birth(4, 1)
    slices = spread("w", shape, "float32", bucket_bytes=BUCKET, shards=2)
    home = slices[0].shard
    store = shard(1 - home, 2)
    assert store.look("w", shape, "float32", birth=birth) == Declared(UNBORN, store.life, bring=True)
    for each in slices:
        if each.shard != home:
            assert put(store, A, "w", shape, birth, each.start, torch.zeros(each.length))
    assert store.look("w", shape, "float32", birth=birth) == Declared(birth, store.life)
    assert store.look("w", shape, "float32", birth=later) == Declared(birth, store.life, bring=True)
    start, length = next((each.start, each.length) for each in slices if each.shard != home)
    for other in (Birth(2, 1), Birth(3, 2), Birth(1, 9)):  # older, or of another life of the home
        assert not put(store, A, "w", shape, other, start, torch.ones(length))
    assert store.look("w", shape, "float32", birth=birth) == Declared(birth, store.life)
    assert put(store, A, "w", shape, later, start, torch.ones(length)), "it takes the place of the one before"
    assert store.look("w", shape, "float32", birth=birth) == Declared(later, store.life, bring=True)
    code, _ = refusal(lambda: shard(1 - home, 2).declare(A, "w", (1,), "float32"))
    assert code is RefusalCode.MALFORMED, "its home is the other one"
    assert store.look("w", (1,), "float32", birth=birth) == Declared(birth, store.life), "it is at home"


def test_a_tensor_that_another_shard_has_lost_begins_anew() -> None:
    store = shard()
    place = bring(store, "w", torch.zeros(2))
    again = store.declare(B, "w", (2,), "float32", lost=place.birth)
    assert again.bring
    assert again.birth.number > place.birth.number
    assert store.declare(A, "w", (2,), "float32", lost=place.birth).pending, "told twice"
    code, text = refusal(lambda: store.push(A, 1, place, start=0, rule="zero"))
    assert (code, "'w'" in text) == (RefusalCode.GONE, True)


def test_a_birth_is_above_what_other_shards_have() -> None:
    store = shard()
    assert store.declare(A, "w", (2,), "float32").birth == Birth(1, store.life)
    assert store.declare(A, "w", (2,), "float32", above=7).birth.number == 8
    assert store.declare(A, "w", (2,), "float32", above=7).birth.number == 8
    assert store.declare(A, "other", (2,), "float32").birth.number == 9


def test_the_rules() -> None:
    store = shard()
    place = bring(store, "w", torch.tensor([1.0, 2.0]))
    assert store.push(A, 1, place, start=0, rule="add", values=torch.tensor([10.0, 20.0]))
    assert values_of(store, place) == [11.0, 22.0]
    assert store.push(A, 2, place, start=0, rule="copy", values=torch.tensor([5.0, 6.0]))
    assert values_of(store, place) == [5.0, 6.0]
    assert store.push(B, 1, place, start=0, rule="zero")
    assert values_of(store, place) == [0.0, 0.0]


def test_a_push_that_comes_again_or_late_changes_nothing() -> None:
    store, one = shard(), torch.ones(1)
    place = bring(store, "w", torch.zeros(1))
    assert store.push(A, 5, place, start=0, rule="add", values=one)
    for late in (5, 4):
        assert not store.push(A, late, place, start=0, rule="add", values=one)
    assert store.push(B, 1, place, start=0, rule="add", values=one), "another process counts by itself"
    assert store.push(Sender(0, "a2"), 1, place, start=0, rule="add", values=one), "and so does the next"
    assert values_of(store, place) == [3.0]


def test_the_slices_of_a_push_count_one_by_one() -> None:
    store = shard()
    place = bring(store, "w", torch.zeros(600))
    starts = [each.start for each in spread("w", (600,), "float32", bucket_bytes=BUCKET, shards=1)]
    assert len(starts) > 2
    for start in starts:
        found, dtype = store.find(place, start)
        assert dtype == "float32"
        for new in (True, False):
            values = torch.ones(found.length)
            assert store.push(A, 1, place, start=start, rule="add", values=values) is new
    assert set(values_of(store, place)) == {1.0}


def test_so_many_processes_are_remembered() -> None:
    store = shard(limits=TensorLimits(senders=2))
    place = bring(store, "w", torch.zeros(1))

    def push(who: str, number: int) -> bool:
        return store.push(Sender(0, who), number, place, start=0, rule="zero")

    assert all(push(*each) for each in [("a", 1), ("b", 1), ("a", 2), ("c", 1)])
    assert not push("a", 2)
    assert not push("c", 1)
    assert push("b", 1), "it has pushed longest ago, and is forgotten"


def test_a_process_that_was_started_again_says_what_it_has_lost() -> None:
    place = bring(shard(), "w", torch.zeros(1))
    store = shard()
    bring(store, "w", torch.zeros(1))  # of the same name and birth
    for call in (
        lambda: store.push(A, 1, place, start=0, rule="zero"),
        lambda: list(store.pull(place)),
        lambda: store.find(place, 0),
    ):
        code, text = refusal(call)
        assert code is RefusalCode.GONE
        assert "'w' is lost: parameter server 0" in text
        assert "started again" in text


def test_a_tensor_that_is_not_whole_is_not_used() -> None:
    store = shard()
    said = store.declare(A, "w", (600,), "float32")
    put(store, A, "w", (600,), said.birth, 0, torch.zeros(200))
    place = Place("w", said.birth, said.life)
    assert refusal(lambda: list(store.pull(place)))[0] is RefusalCode.GONE


def test_what_was_freed_is_gone_and_its_memory_is_there_again() -> None:
    store = shard(most_bytes=8)
    place = bring(store, "w", torch.zeros(2))
    assert store.nbytes == 8
    assert not store.free("w", birth=place.birth._replace(origin=1))
    assert store.free("w", birth=place.birth)
    assert not store.free("w", birth=place.birth)
    assert store.nbytes == 0
    code, text = refusal(lambda: store.push(A, 1, place, start=0, rule="zero"))
    assert code is RefusalCode.GONE
    assert "it was freed, or initialised anew" in text
    again = bring(store, "w", torch.ones(2), B)
    assert not store.free("w", birth=place.birth), "an old call"
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
    code, said = refusal(lambda: store.declare(A, name, shape, dtype))
    assert code is RefusalCode.INVALID
    assert text in said
    assert store.nbytes == 0


def test_another_shape_or_dtype_is_refused() -> None:
    store = shard()
    bring(store, "w", torch.zeros(2, 3))
    for shape, dtype in [((3, 2), "float32"), ((2, 3), "float64")]:
        code, text = refusal(partial(store.declare, B, "w", shape, dtype))
        assert code is RefusalCode.INVALID
        assert "initialised as float32[2, 3]" in text


def test_so_many_tensors_and_no_more() -> None:
    store = shard(limits=TensorLimits(tensors=2))
    place = bring(store, "a", torch.zeros(1))
    bring(store, "b", torch.zeros(1))
    assert "free some" in refusal(lambda: store.declare(A, "c", (1,), "float32"))[1]
    store.free("a", birth=place.birth)
    bring(store, "c", torch.zeros(1))


def test_what_nobody_brings_takes_no_memory_for_ever() -> None:
    clock = Clock()
    store = shard(clock=clock)
    store.declare(A, "w", (100,), "float32")
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
            said = self.store.declare(who, name, values.shape, "float32")
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
                self.store.push,
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
            assert self.store.free(name, birth=self.places.pop(name).birth)
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
