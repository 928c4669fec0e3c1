"""A shard under several threads: what enters the sums, what the optimizer makes of them, who gets what."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

from elastic_ps.codec import as_bytes, dtype_of
from elastic_ps.core.partition import Bucket, Layout, Piece, Rule, TensorSpec, partition
from elastic_ps.core.sequence import PushKey
from elastic_ps.core.settings import ALLOWED, Settings, plain_group
from elastic_ps.errors import ConnectionLost, InvalidModel, RefusalCode, Refused
from elastic_ps.server import shard as shard_module
from elastic_ps.server.orders import Application
from elastic_ps.server.shard import Pulled, RestartedAs, Shard
from elastic_ps.server.values import BucketValues
from elastic_ps.telemetry import Trace

EPOCH = 3
LR = Settings(groups=({"lr": 1.0},))


class Body:
    """A frame's body. With `gate`, half of it arrives, then the rest when the gate opens."""

    header = b""

    def __init__(
        self, values: torch.Tensor, *, gate: threading.Event | None = None, cut_off: bool = False
    ) -> None:
        self._data = as_bytes(values.clone())
        self.size = len(self._data)
        self.started = threading.Event()
        self._gate, self._cut_off = gate, cut_off

    def read_into(self, target: memoryview) -> None:
        half = self.size // 2
        target[:half] = self._data[:half]
        self.started.set()
        if self._gate is not None:
            assert self._gate.wait(10)
        if self._cut_off:
            raise ConnectionLost("cut off")
        target[half:] = self._data[half:]


def tensor(name: str, *shape: int, dtype: str = "float32", rule: Rule = Rule.GRADIENT) -> TensorSpec:
    """A tensor; trained ones are in group 0."""
    return TensorSpec(name, shape, dtype, rule, 0 if rule is Rule.GRADIENT else -1)


def one_bucket(*tensors: TensorSpec) -> Layout:
    """All tensors, of one rule and dtype, in one bucket."""
    pieces = tuple(Piece(i, 0, t.elements) for i, t in enumerate(tensors))
    return Layout(tensors, (Bucket(0, 0, tensors[0].dtype, tensors[0].rule, pieces),), 1)


class Rig:
    """A shard that is told what a coordinator would tell it."""

    def __init__(
        self,
        layout: Layout,
        *,
        index: int = 0,
        optimizer: str = "SGD",
        settings: Settings = LR,
        workers: Sequence[int] = (0, 1, 2),
        deterministic: bool = False,
    ) -> None:
        self.layout = layout
        self.shard = Shard(
            layout, index, EPOCH, (optimizer, settings), deterministic=deterministic, trace=Trace(None, "")
        )
        self.settings = settings
        self.workers = {worker: 10 + worker for worker in workers}
        self.version = self.attempt = 0
        self.shard.advance(0, 0, self.workers, None)
        self.buckets = layout.of_shard(index)

    def fill(self, bucket: int, values: torch.Tensor) -> None:
        first, incarnation = next(iter(self.workers.items()))
        self.shard.initialise(bucket, first, incarnation, Body(values))

    def key(self, worker: int, bucket: int = 0, **change: int) -> PushKey:
        """The push of `worker`'s step, whose incarnation is 10 + worker and number the version."""
        values = {"incarnation": 10 + worker, "step": self.version, "version": self.version}
        values |= {"epoch": EPOCH, "attempt": self.attempt}
        return PushKey(worker=worker, bucket=bucket, **{**values, **change})

    def push(
        self,
        worker: int,
        values: torch.Tensor | Body,
        *,
        bucket: int = 0,
        samples: int = 1,
        present: Sequence[bool] = (),
        **change: int,
    ) -> bool:
        body = values if isinstance(values, Body) else Body(values)
        return self.shard.push(self.key(worker, bucket, **change), samples, present, body)

    def application(self, *workers: int, samples: int) -> Application:
        contributors = [(w, 10 + w, self.version) for w in workers]
        return Application(self.attempt, contributors, samples, self.settings)

    def commit(self, *workers: int, samples: int) -> None:
        application = self.application(*workers, samples=samples)
        self.shard.advance(self.version + 1, 0, self.workers, application)
        self.version, self.attempt = self.version + 1, 0

    def restart(self, *workers: int) -> None:
        self.attempt += 1
        self.workers = {worker: 10 + worker for worker in workers}
        self.shard.advance(self.version, self.attempt, self.workers, None)

    def values(self, bucket: int = 0) -> torch.Tensor:
        return next(values for b, values in self.shard.values() if b.index == bucket).clone()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(12) as pool:
        yield pool


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocked calls give up soon."""
    monkeypatch.setattr(shard_module, "WAIT", timedelta(milliseconds=100))


def ones(count: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((count,), value)


def refusal(future: Future[Any]) -> RefusalCode:
    error = future.exception(10)
    assert isinstance(error, Refused), error
    return error.code


# --- sums


def test_a_round_is_the_mean_weighted_by_samples() -> None:
    rig = Rig(one_bucket(tensor("w", 4)))
    rig.fill(0, ones(4, 10.0))
    for worker, (gradient, samples) in enumerate([(1.0, 6), (4.0, 3), (-2.0, 1)]):
        assert rig.push(worker, ones(4, gradient), samples=samples)
    rig.commit(0, 1, 2, samples=10)
    assert torch.equal(rig.values(), ones(4, 10.0 - (6 + 12 - 2) / 10))


def test_a_round_does_not_begin_with_what_the_last_one_left() -> None:
    rig = Rig(one_bucket(tensor("w", 4)))
    for gradient in (1.0, 2.0):
        rig.push(0, ones(4, gradient))
        rig.commit(0, samples=1)
    assert torch.equal(rig.values(), ones(4, -3.0))


def test_pushes_of_many_threads_are_all_added(threads: ThreadPoolExecutor) -> None:
    workers = range(10)
    rig = Rig(one_bucket(tensor("w", 1000)), workers=workers)
    for _ in range(5):
        before = rig.values()
        added = [threads.submit(rig.push, w, ones(1000, float(w)), samples=w + 1) for w in workers]
        again = [threads.submit(rig.push, w, ones(1000, float(w)), samples=w + 1) for w in workers]
        assert sum(f.result(10) for f in [*added, *again]) == len(workers), "each is added once"
        rig.commit(*workers, samples=55)
        assert torch.equal(rig.values(), before - sum(w * (w + 1) for w in workers) / 55)


def test_counters_take_the_maximum_and_running_statistics_the_mean() -> None:
    tensors = (
        tensor("count", 2, dtype="int64", rule=Rule.MAXIMUM),
        tensor("mean", 2, rule=Rule.MEAN),
        tensor("frozen", 2, rule=Rule.CONSTANT),
        tensor("flag", 2, dtype="bool", rule=Rule.MAXIMUM),
    )
    layout = partition(tensors, bucket_bytes=1024, shards=1)
    rig = Rig(layout, workers=(0, 1))
    number = {bucket.pieces[0].tensor: bucket.index for bucket in layout.buckets}
    rig.fill(number[2], ones(2, 7.0))
    rig.fill(number[0], torch.tensor([99, 99]))
    for worker in (0, 1):
        rig.push(worker, torch.tensor([3 + worker, 2**40 - worker]), bucket=number[0], samples=5)
        rig.push(worker, ones(2, float(worker)), bucket=number[1], samples=1 + 2 * worker)
        rig.push(worker, torch.tensor([worker == 1, False]), bucket=number[3])
    with pytest.raises(Refused, match="CONSTANT"):
        rig.push(0, ones(2), bucket=number[2])
    rig.commit(0, 1, samples=4)
    assert rig.values(number[0]).tolist() == [4, 2**40]
    assert rig.values(number[1]).tolist() == [0.75, 0.75]
    assert rig.values(number[2]).tolist() == [7.0, 7.0]
    assert rig.values(number[3]).tolist() == [True, False]


def test_a_parameter_without_any_gradient_is_left_alone() -> None:
    """As torch does with grad None: no weight decay, no momentum, no state."""
    settings = Settings(({"lr": 1.0, "momentum": 0.9, "weight_decay": 0.5},))
    rig = Rig(one_bucket(tensor("a", 2), tensor("b", 2)), settings=settings, workers=(0, 1))
    rig.fill(0, ones(4, 8.0))
    for worker in (0, 1):
        rig.push(worker, torch.tensor([1.0, 1.0, 0.0, 0.0]), present=[True, False])
    rig.commit(0, 1, samples=2)
    assert rig.values().tolist() == [3.0, 3.0, 8.0, 8.0]
    assert {entry.tensor for entry in rig.shard.state()} == {0}
    rig.push(0, torch.tensor([0.0, 0.0, 0.0, 0.0]), present=[False, False])
    rig.push(1, torch.tensor([0.0, 0.0, 2.0, 2.0]), present=[False, True])
    rig.commit(0, 1, samples=2)
    assert rig.values().tolist() == [3.0, 3.0, 3.0, 3.0], "0.5 * 8 + 2 / 2 for who has one gradient of two"


def test_in_deterministic_mode_sums_agree_to_the_bit_in_any_order_of_arrival(
    threads: ThreadPoolExecutor,
) -> None:
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(500, generator=generator) * 10.0**w for w in range(5)]
    results = []
    for arrivals in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 4, 0, 3, 1]):
        rig = Rig(one_bucket(tensor("w", 500)), workers=range(5), deterministic=True)
        pushes = [threads.submit(rig.push, w, gradients[w], samples=w + 1) for w in arrivals]
        assert all(push.result(10) for push in pushes)
        rig.commit(*range(5), samples=15)
        results.append(rig.values())
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.usefixtures("short_wait")
def test_in_deterministic_mode_a_long_wait_does_not_change_the_order() -> None:
    rig = Rig(one_bucket(tensor("w", 4)), workers=(0, 1), deterministic=True)
    with pytest.raises(Refused, match="turn") as refused:
        rig.push(1, ones(4))
    assert refused.value.code is RefusalCode.NOT_READY
    assert rig.push(0, ones(4))
    assert rig.push(1, ones(4))


def test_in_deterministic_mode_nobody_waits_for_who_has_vanished(threads: ThreadPoolExecutor) -> None:
    rig = Rig(one_bucket(tensor("w", 4)), workers=(0, 1), deterministic=True)
    waiting = threads.submit(rig.push, 1, ones(4), attempt=0)
    rig.restart(1)
    assert refusal(waiting) is RefusalCode.STALE_ATTEMPT
    assert rig.push(1, ones(4))


# --- what must not enter the sums


def test_a_repeated_push_is_added_once() -> None:
    rig = Rig(one_bucket(tensor("w", 4)))
    assert rig.push(0, ones(4))
    assert not rig.push(0, ones(4))
    rig.commit(0, samples=1)
    assert torch.equal(rig.values(), ones(4, -1.0))


def test_a_push_repeated_while_the_first_is_being_received_is_added_once(threads: ThreadPoolExecutor) -> None:
    rig = Rig(one_bucket(tensor("w", 4)))
    gate = threading.Event()
    slow = Body(ones(4), gate=gate)
    first = threads.submit(rig.push, 0, slow)
    assert slow.started.wait(10)
    second = threads.submit(rig.push, 0, ones(4))
    gate.set()
    assert (first.result(10), second.result(10)) == (True, False)
    rig.commit(0, samples=1)
    assert torch.equal(rig.values(), ones(4, -1.0))


@pytest.mark.usefixtures("short_wait")
def test_a_push_repeated_while_the_first_hangs_for_long_is_added_once(threads: ThreadPoolExecutor) -> None:
    rig = Rig(one_bucket(tensor("w", 4)))
    gate = threading.Event()
    slow = Body(ones(4), gate=gate)
    first = threads.submit(rig.push, 0, slow)
    assert slow.started.wait(10)
    second = threads.submit(rig.push, 0, ones(4))
    assert refusal(second) is RefusalCode.NOT_READY, "to be asked again"
    gate.set()
    assert first.result(10)
    assert not rig.push(0, ones(4))
    rig.commit(0, samples=1)
    assert torch.equal(rig.values(), ones(4, -1.0))


def test_a_repeated_push_takes_over_when_the_first_is_cut_off(threads: ThreadPoolExecutor) -> None:
    rig = Rig(one_bucket(tensor("w", 4)))
    gate = threading.Event()
    broken = Body(ones(4, 5.0), gate=gate, cut_off=True)
    first = threads.submit(rig.push, 0, broken)
    assert broken.started.wait(10)
    second = threads.submit(rig.push, 0, ones(4))
    gate.set()
    assert isinstance(first.exception(10), ConnectionLost)
    assert second.result(10)
    rig.commit(0, samples=1)
    assert torch.equal(rig.values(), ones(4, -1.0))


def test_bodies_that_are_cut_off_leave_nothing_and_take_no_receive_buffer(short_wait: None) -> None:
    rig = Rig(one_bucket(tensor("w", 4)))
    for _ in range(3 * shard_module.RECEIVE_BUFFERS):
        with pytest.raises(ConnectionLost):
            rig.push(0, Body(ones(4, 100.0), cut_off=True))
        with pytest.raises(ConnectionLost):
            rig.shard.initialise(0, 0, 10, Body(ones(4, 100.0), cut_off=True))
        with pytest.raises(Refused):
            rig.push(0, ones(4, float("nan")))
    assert rig.push(1, ones(4))
    assert rig.push(0, ones(4))
    rig.commit(0, 1, samples=2)
    assert torch.equal(rig.values(), ones(4, -1.0))


def test_when_all_buffers_are_taken_a_push_is_asked_to_come_again(
    threads: ThreadPoolExecutor, short_wait: None
) -> None:
    workers = range(shard_module.RECEIVE_BUFFERS + 1)
    rig = Rig(one_bucket(tensor("w", 4)), workers=workers)
    gate = threading.Event()
    bodies = [Body(ones(4), gate=gate) for _ in workers[:-1]]
    pushes = [threads.submit(rig.push, w, body) for w, body in zip(workers, bodies, strict=False)]
    assert all(body.started.wait(10) for body in bodies)
    with pytest.raises(Refused, match="push again") as refused:
        rig.push(workers[-1], ones(4))
    assert refused.value.code is RefusalCode.NOT_READY
    gate.set()
    assert all(push.result(10) for push in pushes)
    assert rig.push(workers[-1], ones(4))


def test_a_round_that_starts_again_while_a_push_is_received_does_not_get_it(
    threads: ThreadPoolExecutor,
) -> None:
    rig = Rig(one_bucket(tensor("w", 4)))
    gate = threading.Event()
    slow = Body(ones(4, 50.0), gate=gate)
    push = threads.submit(rig.push, 0, slow)
    assert slow.started.wait(10)
    rig.restart(0, 1)
    gate.set()
    assert refusal(push) is RefusalCode.STALE_ATTEMPT
    for worker in (0, 1):
        assert rig.push(worker, ones(4))
    rig.commit(0, 1, samples=2)
    assert torch.equal(rig.values(), ones(4, -1.0))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_what_is_not_finite_is_refused_and_the_sums_are_untouched(dtype: str, value: float) -> None:
    rig = Rig(one_bucket(tensor("w", 4, dtype=dtype)))
    good = torch.ones(4, dtype=dtype_of(dtype))
    rig.push(1, good)
    bad = good.clone()
    bad[2] = value
    with pytest.raises(Refused, match="worker 0, step 0, bucket 0: 1 of 4 values") as refused:
        rig.push(0, bad)
    assert refused.value.code is RefusalCode.NOT_FINITE
    rig.commit(1, samples=1)
    assert torch.equal(rig.values(), -good)


def test_a_buffer_may_hold_infinity_where_the_model_has_it() -> None:
    """As an attention mask does; what becomes infinite in training is refused."""
    rig = Rig(one_bucket(tensor("mask", 3, rule=Rule.MEAN)))
    mask = torch.tensor([float("-inf"), 0.0, float("-inf")])
    rig.fill(0, mask)
    for worker in (0, 1):
        rig.push(worker, mask, samples=3)
    for wrong in (-mask, mask + torch.tensor([0.0, float("inf"), 0.0]), mask * float("nan")):
        with pytest.raises(Refused, match="NaN or Inf"):
            rig.push(2, wrong)
    rig.commit(0, 1, samples=6)
    assert torch.equal(rig.values(), mask)


def test_large_finite_values_whose_sum_overflows_are_taken() -> None:
    rig = Rig(one_bucket(tensor("w", 4, dtype="float16")))
    assert rig.push(0, torch.full((4,), 60000.0, dtype=torch.float16), samples=64)
    rig.commit(0, samples=64)
    assert rig.values().tolist() == [-60000.0] * 4


@pytest.mark.parametrize(
    ("count", "bucket", "samples", "present"),
    [(3, 0, 1, ()), (5, 0, 1, ()), (0, 0, 1, ()), (4, 0, 0, ()), (4, 0, 1, (True, True)), (4, 7, 1, ())],
)
def test_what_does_not_fit_is_refused(
    count: int, bucket: int, samples: int, present: tuple[bool, ...]
) -> None:
    rig = Rig(one_bucket(tensor("w", 4)))
    with pytest.raises(Refused) as refused:
        rig.push(0, ones(count), bucket=bucket, samples=samples, present=present)
    assert refused.value.code is RefusalCode.MALFORMED
    assert rig.push(0, ones(4))


@pytest.mark.parametrize("count", [3, 5])
def test_first_values_of_the_wrong_size_are_refused(count: int) -> None:
    rig = Rig(one_bucket(tensor("w", 4)))
    with pytest.raises(Refused) as refused:
        rig.fill(0, ones(count, 9.0))
    assert refused.value.code is RefusalCode.MALFORMED
    assert torch.equal(rig.values(), ones(4, 0.0))


def test_first_values_that_are_not_finite_are_refused() -> None:
    rig = Rig(one_bucket(tensor("w", 4)))
    with pytest.raises(Refused) as refused:
        rig.fill(0, ones(4, float("nan")))
    assert refused.value.code is RefusalCode.NOT_FINITE
    assert torch.equal(rig.values(), ones(4, 0.0))


def test_first_values_that_come_late_do_not_overwrite_what_was_trained() -> None:
    """From a worker that was declared gone while it initialised the model, and did not notice."""
    rig = Rig(one_bucket(tensor("w", 4)))
    rig.push(0, ones(4))
    with pytest.raises(Refused, match="trained already"):
        rig.fill(0, ones(4, 9.0))
    rig.commit(0, samples=1)
    with pytest.raises(Refused, match="trained already"):
        rig.fill(0, ones(4, 9.0))
    assert torch.equal(rig.values(), ones(4, -1.0))


# --- rounds


def test_nothing_is_applied_unless_the_sums_are_exactly_the_contributions() -> None:
    rig = Rig(partition([tensor("a", 400), tensor("b", 400)], bucket_bytes=1600, shards=1))
    assert len(rig.buckets) == 2
    for bucket in rig.buckets:
        rig.push(0, ones(400), bucket=bucket.index)
    rig.push(1, ones(400), bucket=0)
    wrong = [
        rig.application(0, 1, samples=2),
        rig.application(0, samples=1),
        Application(1, [(0, 10, 0)], 1, LR),
    ]
    for application in wrong:
        with pytest.raises(Refused) as refused:
            rig.shard.advance(1, 0, rig.workers, application)
        assert refused.value.code is RefusalCode.INVALID
    assert rig.shard.version == 0
    rig.push(1, ones(400), bucket=1)
    rig.commit(0, 1, samples=2)
    assert torch.equal(rig.values(0), ones(400, -1.0))


def test_a_repeated_order_is_applied_once(threads: ThreadPoolExecutor) -> None:
    """The call may be repeated while the first is still at work, when its answer takes too long."""
    rig = Rig(partition([tensor(str(i), 50_000) for i in range(20)], bucket_bytes=200_000, shards=1))
    for bucket in rig.buckets:
        rig.push(0, ones(50_000), bucket=bucket.index)
    application = rig.application(0, samples=1)
    orders = [threads.submit(rig.shard.advance, 1, 0, rig.workers, application) for _ in range(8)]
    for order in orders:
        order.result(10)
    rig.shard.advance(1, 0, rig.workers, application)
    for bucket in rig.buckets:
        assert torch.equal(rig.values(bucket.index), ones(50_000, -1.0))


def test_an_order_that_comes_late_changes_nothing() -> None:
    rig = Rig(one_bucket(tensor("w", 4)))
    rig.push(0, ones(4))
    rig.commit(0, samples=1)
    rig.push(0, ones(4))
    rig.shard.advance(0, 0, {2: 12}, None)
    rig.shard.advance(0, 3, {2: 12}, None)
    assert rig.shard.version == 1
    assert not rig.push(0, ones(4)), "still in the sum"
    rig.restart(0, 1)
    rig.push(0, ones(4))
    rig.shard.advance(1, 0, {2: 12}, None)
    assert not rig.push(0, ones(4))


def test_the_model_is_brought_by_the_process_that_was_told_to(short_wait: None) -> None:
    """Not by one of before, whose place another one has taken."""
    rig = Rig(one_bucket(tensor("w", 4)), workers=[])
    with pytest.raises(Refused) as refused:
        rig.shard.initialise(0, 0, 10, Body(ones(4)))
    assert refused.value.code is RefusalCode.NOT_READY
    rig.shard.advance(0, 0, {0: 11}, None)
    with pytest.raises(Refused) as refused:
        rig.shard.initialise(0, 0, 10, Body(ones(4)))
    assert refused.value.code is RefusalCode.STALE_INCARNATION
    rig.shard.initialise(0, 0, 11, Body(ones(4, 2.0)))
    assert torch.equal(rig.values(), ones(4, 2.0))


def test_a_process_whose_place_another_has_taken_cannot_push_into_its_round() -> None:
    rig = Rig(one_bucket(tensor("w", 4)))
    rig.restart(0, 1)
    rig.workers[0] = 20
    rig.shard.advance(0, 1, rig.workers, None)
    with pytest.raises(Refused, match="worker 0 with incarnation 10") as refused:
        rig.push(0, ones(4, 100.0))
    assert refused.value.code is RefusalCode.STALE_INCARNATION
    assert rig.push(0, ones(4), incarnation=20)
    rig.push(1, ones(4))
    application = Application(1, [(0, 20, 0), (1, 11, 0)], 2, LR)
    rig.shard.advance(1, 0, rig.workers, application)
    assert torch.equal(rig.values(), ones(4, -1.0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_finite_gradients_whose_weighted_sum_overflows_are_refused_by_name(dtype: str) -> None:
    rig = Rig(one_bucket(tensor("w", 4, dtype=dtype)))
    huge = 2.0 ** (math.frexp(torch.finfo(dtype_of(dtype)).max)[1] - 2)

    def gradient(value: float) -> torch.Tensor:
        return torch.tensor([1.0, value, 1.0, 1.0], dtype=dtype_of(dtype))

    with pytest.raises(
        Refused, match="worker 0, step 0, bucket 0: 1 of 4 values, weighed with 4 samples"
    ) as no:
        rig.push(0, gradient(huge), samples=4)
    assert no.value.code is RefusalCode.NOT_FINITE
    assert rig.push(0, gradient(huge), samples=3)
    with pytest.raises(Refused, match="worker 1, step 0, bucket 0: 1 of 4 values"):
        rig.push(1, gradient(huge), samples=2)
    assert rig.push(1, gradient(-huge), samples=3), "the sum is as before"
    rig.commit(0, 1, samples=6)
    assert torch.equal(rig.values().float(), torch.tensor([-1.0, 0.0, -1.0, -1.0]))


def test_a_shard_that_fails_in_the_middle_of_a_step_has_lost_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some buckets are stepped and others are not; going on would train a model that no version ever was."""
    layout = partition((tensor("a", 300), tensor("b", 300)), bucket_bytes=1200, shards=1)
    rig = Rig(layout, workers=[0])
    for bucket in rig.buckets:
        rig.push(0, ones(300), bucket=bucket.index)
    original, calls = BucketValues.apply, []

    def apply(self: BucketValues, *arguments: Any) -> None:
        calls.append(self)
        if len(calls) == 2:
            raise MemoryError("no memory for a step")
        original(self, *arguments)

    monkeypatch.setattr(BucketValues, "apply", apply)
    with pytest.raises(MemoryError):
        rig.commit(0, samples=1)
    for order in (None, rig.application(0, samples=1)):
        with pytest.raises(Refused, match="failed in the middle of a step") as refused:
            rig.shard.advance(rig.version + (order is not None), 0, rig.workers, order)
        assert refused.value.code is RefusalCode.NOT_READY
    assert len(calls) == 2


def test_a_shard_without_the_version_does_not_go_on_with_what_it_has() -> None:
    rig = Rig(one_bucket(tensor("w", 4)))
    for apply in (None, Application(0, [], 1, LR)):
        with pytest.raises(Refused, match="version 0, told to go on from") as refused:
            rig.shard.advance(5, 0, rig.workers, apply)
        assert refused.value.code is RefusalCode.NOT_READY
    assert rig.shard.version == 0


def test_settings_of_a_round_are_used_from_it_on() -> None:
    rig = Rig(one_bucket(tensor("w", 4)))
    for lr in (1.0, 0.5):
        rig.settings = Settings(({"lr": lr},))
        rig.push(0, ones(4))
        rig.commit(0, samples=1)
    assert torch.equal(rig.values(), ones(4, -1.5))


def test_an_optimizer_that_cannot_be_built_is_refused_in_words() -> None:
    with pytest.raises(InvalidModel, match="LBFGS"):
        Rig(one_bucket(tensor("w", 4)), optimizer="LBFGS")


# --- pulls


def pull(rig: Rig, version: int, **options: Any) -> list[Pulled | RestartedAs | None]:
    """Pull all buckets; the values are copied at once."""
    options = {"attempt": None, "contributor": False, **options}
    numbers = [bucket.index for bucket in rig.layout.pull_order]
    return list(rig.shard.pull(numbers, version, **options))


def test_a_pull_waits_for_its_version(threads: ThreadPoolExecutor) -> None:
    rig = Rig(one_bucket(tensor("w", 4)))
    pulled = threads.submit(pull, rig, 1, contributor=True, attempt=0)
    rig.push(0, ones(4))
    assert not pulled.done()
    rig.commit(0, samples=1)
    (item,) = pulled.result(10)
    assert isinstance(item, Pulled)
    assert item.version == 1
    assert bytes(item.data) == bytes(as_bytes(ones(4, -1.0)))


def test_a_pull_that_waits_is_told_that_the_round_starts_again(threads: ThreadPoolExecutor) -> None:
    rig = Rig(one_bucket(tensor("w", 4)))
    pulled = threads.submit(pull, rig, 1, contributor=True, attempt=0)
    watching = threads.submit(pull, rig, 1)
    rig.restart(0)
    assert pulled.result(10) == [RestartedAs(1)]
    assert pull(rig, 1, contributor=True, attempt=0) == [RestartedAs(1)], "also who asks afterwards"
    rig.push(0, ones(4))
    rig.commit(0, samples=1)
    assert isinstance(watching.result(10)[0], Pulled), "who takes no part is not told"


def test_a_pull_for_which_nothing_happens_says_so(short_wait: None) -> None:
    assert pull(Rig(one_bucket(tensor("w", 4))), 1) == [None]


def test_a_copy_stays_as_it_was_and_a_contributor_gets_the_memory_itself() -> None:
    rig = Rig(one_bucket(tensor("w", 4)))
    (copy,), (live,) = pull(rig, 0), pull(rig, 0, contributor=True)
    rig.push(0, ones(4))
    rig.commit(0, samples=1)
    assert isinstance(copy, Pulled)
    assert isinstance(live, Pulled)
    assert bytes(copy.data) == bytes(16)
    assert bytes(live.data) == bytes(as_bytes(ones(4, -1.0)))


def test_who_joins_later_gets_frozen_parameters_too(short_wait: None) -> None:
    tensors = [tensor("body", 4, rule=Rule.CONSTANT), tensor("head", 4)]
    rig = Rig(partition(tensors, bucket_bytes=1024, shards=1))
    rig.fill(1, ones(4, 5.0))
    rig.push(0, ones(4))
    rig.commit(0, samples=1)
    items = pull(rig, 1)
    assert [item.version for item in items if isinstance(item, Pulled)] == [1, 1]


def test_a_pull_of_another_shards_bucket_is_refused() -> None:
    with pytest.raises(Refused, match="bucket 3 is not on shard 0"):
        list(Rig(one_bucket(tensor("w", 4))).shard.pull([3], 0, attempt=None, contributor=False))


# --- the optimizers of torch

VARIANTS: dict[str, list[Mapping[str, Any]]] = {
    "SGD": [{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}, {"lr": 0.1}],
    "Adam": [{"amsgrad": True, "betas": (0.8, 0.9)}, {"weight_decay": 0.1}],
    "RMSprop": [{"centered": True, "momentum": 0.5}],
}


def cases() -> Iterator[Any]:
    for name in ALLOWED:
        for number, options in enumerate(VARIANTS.get(name, [{"lr": 0.05}])):
            yield pytest.param(name, options, id=f"{name}-{number}")


@pytest.mark.parametrize(("name", "options"), list(cases()))
@pytest.mark.parametrize(("bucket_bytes", "shards"), [(4 * 1024 * 1024, 1), (600, 3)])
def test_steps_are_those_of_torchs_own_optimizer_for_any_cut(
    name: str, options: Mapping[str, Any], bucket_bytes: int, shards: int
) -> None:
    generator = torch.Generator().manual_seed(7)
    shapes = [(13, 40), (40,), (), (5, 40, 2), (3,)]
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    groups = [{"params": parameters[:2], "lr": 0.02}, {"params": parameters[2:]}]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(groups, **options)
    specs = [
        TensorSpec(str(i), tuple(p.shape), "float32", Rule.GRADIENT, 0 if i < 2 else 1)
        for i, p in enumerate(parameters)
    ]
    settings = Settings.from_json(
        Settings(tuple(plain_group(g, i) for i, g in enumerate(optimizer.param_groups))).to_json()
    )
    layout = partition(specs, bucket_bytes=bucket_bytes, shards=shards)
    rigs = [Rig(layout, index=s, optimizer=name, settings=settings, workers=(0, 1)) for s in range(shards)]

    def part(tensors: Sequence[torch.Tensor], bucket: Bucket) -> torch.Tensor:
        pieces = [tensors[p.tensor].detach().reshape(-1)[p.start : p.start + p.length] for p in bucket.pieces]
        return torch.cat(pieces)

    for rig in rigs:
        for bucket in rig.buckets:
            rig.fill(bucket.index, part(parameters, bucket))
    for _ in range(6):
        gradients = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(2)]
        for parameter, first, second in zip(parameters, *gradients, strict=True):
            parameter.grad = (3 * first + second) / 4
        optimizer.step()
        for rig in rigs:
            for worker, samples in ((0, 3), (1, 1)):
                for bucket in rig.buckets:
                    rig.push(worker, part(gradients[worker], bucket), bucket=bucket.index, samples=samples)
            rig.commit(0, 1, samples=4)
    for rig in rigs:
        for bucket in rig.buckets:
            torch.testing.assert_close(
                rig.values(bucket.index), part(parameters, bucket), rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_gradients_are_summed_in_single_precision(dtype: str) -> None:
    """In half precision 1 + 2**-12 is 1, so the small gradients of many workers would be lost."""
    workers = range(9)
    rig = Rig(one_bucket(tensor("w", 4, dtype=dtype)), workers=workers)
    for worker in workers:
        value = 1.0 if worker == 0 else 2.0**-12
        rig.push(worker, torch.full((4,), value, dtype=dtype_of(dtype)), samples=4096)
    rig.commit(*workers, samples=9 * 4096)
    expected = torch.full((4,), -(1 + 8 * 2.0**-12) / 9).to(dtype_of(dtype))
    assert torch.equal(rig.values(), expected)


def test_state_is_copied_and_complete() -> None:
    settings = Settings(({"lr": 0.1},))
    rig = Rig(one_bucket(tensor("a", 2), tensor("b", 3)), optimizer="Adam", settings=settings)
    rig.push(0, ones(5))
    rig.commit(0, samples=1)
    entries = list(rig.shard.state())
    assert {(e.tensor, e.key, e.scalar) for e in entries} == {
        (t, key, key == "step") for t in (0, 1) for key in ("step", "exp_avg", "exp_avg_sq")
    }
    before = [e.value.clone() for e in entries]
    rig.push(0, ones(5))
    rig.commit(0, samples=1)
    assert all(torch.equal(e.value, value) for e, value in zip(entries, before, strict=True))
