"""What must not enter a shard's sums: repeated, broken, late or unfit pushes."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from elastic_ps.codec import dtype_of
from elastic_ps.core.partition import Rule
from elastic_ps.core.settings import Application
from elastic_ps.errors import ConnectionLost, RefusalCode, Refused
from elastic_ps.transport import buffers
from tests.testing.shard import HASTY, LR, Body, Rig, one_bucket, ones, refusal, tensor


def test_a_repeated_push_is_added_once() -> None:
    rig = Rig(one_bucket(tensor("w", 4)))
    assert rig.push(0, ones(4))
    assert not rig.push(0, ones(4))
    rig.commit(0, samples=1)
    assert torch.equal(rig.values(), ones(4, -1.0))


def pushed_twice(threads: ThreadPoolExecutor, rig: Rig, body: Body) -> tuple[Future[bool], Future[bool]]:
    """A push whose body is being received, and the same push again, with a body of ones."""
    first = threads.submit(rig.push, 0, body)
    assert body.started.wait(10)
    return first, threads.submit(rig.push, 0, ones(4))


def test_a_push_repeated_while_the_first_is_being_received_is_added_once(threads: ThreadPoolExecutor) -> None:
    rig, gate = Rig(one_bucket(tensor("w", 4))), threading.Event()
    first, second = pushed_twice(threads, rig, Body(ones(4), gate=gate))
    gate.set()
    assert (first.result(10), second.result(10)) == (True, False)
    rig.commit(0, samples=1)
    assert torch.equal(rig.values(), ones(4, -1.0))


def test_a_push_repeated_while_the_first_hangs_for_long_is_added_once(threads: ThreadPoolExecutor) -> None:
    rig, gate = Rig(one_bucket(tensor("w", 4)), limits=HASTY), threading.Event()
    first, second = pushed_twice(threads, rig, Body(ones(4), gate=gate))
    assert refusal(second) is RefusalCode.NOT_READY, "to be asked again"
    gate.set()
    assert first.result(10)
    assert not rig.push(0, ones(4))
    rig.commit(0, samples=1)
    assert torch.equal(rig.values(), ones(4, -1.0))


def test_a_repeated_push_takes_over_when_the_first_is_cut_off(threads: ThreadPoolExecutor) -> None:
    rig, gate = Rig(one_bucket(tensor("w", 4))), threading.Event()
    first, second = pushed_twice(threads, rig, Body(ones(4, 5.0), gate=gate, cut_off=True))
    gate.set()
    assert isinstance(first.exception(10), ConnectionLost)
    assert second.result(10)
    rig.commit(0, samples=1)
    assert torch.equal(rig.values(), ones(4, -1.0))


def test_bodies_that_are_cut_off_leave_nothing_and_take_no_receive_buffer() -> None:
    rig = Rig(one_bucket(tensor("w", 4)), limits=HASTY)
    for _ in range(3 * buffers.RECEIVE_BUFFERS):
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


def test_when_all_buffers_are_taken_a_push_is_asked_to_come_again(threads: ThreadPoolExecutor) -> None:
    workers = range(buffers.RECEIVE_BUFFERS + 1)
    rig = Rig(one_bucket(tensor("w", 4)), workers=workers, limits=HASTY)
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
    assert "lower the learning rate" in str(refused.value)
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


def test_the_model_is_brought_by_the_process_that_was_told_to() -> None:
    """Not by an earlier one, whose place another one has taken."""
    rig = Rig(one_bucket(tensor("w", 4)), workers=[], limits=HASTY)
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
