"""What a shard makes of pushes: the mean weighted by samples, in any order and in any precision."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from elastic_ps.api.consistency import Consistency
from elastic_ps.codec import dtype_of
from elastic_ps.core.partition import Rule, partition
from elastic_ps.core.settings import Settings
from elastic_ps.errors import RefusalCode, Refused
from tests.testing.polling import eventually
from tests.testing.shard import HASTY, Rig, one_bucket, ones, refusal, tensor


def test_weights_that_are_no_whole_numbers_add_up_in_any_order() -> None:
    model = [tensor("a", 4), tensor("b", 4)]
    rig = Rig(partition(model, bucket_bytes=16, shards=1, smallest=16))
    weights = [0.1, 0.2, 0.3, 0.7]
    for bucket, order in enumerate(([0, 1, 2], [2, 1, 0])):
        for worker in order:
            rig.push(worker, ones(4, float(worker)), bucket=bucket, samples=weights[worker])
    rig.commit(0, 1, 2, samples=math.fsum(weights[:3]))
    for bucket in (0, 1):
        assert rig.values(bucket).tolist() == pytest.approx([-(0.2 + 0.6) / 0.6] * 4)


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
        expected = before - sum(w * (w + 1) for w in workers) / 55
        assert torch.allclose(rig.values(), expected), "in whatever order"


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
        samples, flags = 1 + 2 * worker, torch.tensor([worker == 1, False])
        rig.push(worker, torch.tensor([3 + worker, 2**40 - worker]), bucket=number[0], samples=samples)
        rig.push(worker, ones(2, float(worker)), bucket=number[1], samples=samples)
        rig.push(worker, flags, bucket=number[3], samples=samples)
    with pytest.raises(Refused, match="CONSTANT"):
        rig.push(0, ones(2), bucket=number[2])
    rig.commit(0, 1, samples=4)
    assert rig.values(number[0]).tolist() == [4, 2**40]
    assert rig.values(number[1]).tolist() == [0.75, 0.75]
    assert rig.values(number[2]).tolist() == [7.0, 7.0]
    assert rig.values(number[3]).tolist() == [True, False]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
@pytest.mark.parametrize("dtype", ["bool", "int64", "bfloat16", "float64"])
def test_the_lowest_contributor_decides_what_is_broadcast(order: tuple[int, ...], dtype: str) -> None:
    """In whatever order the pushes arrive; when that worker is gone, the next one's values count."""
    rig = Rig(one_bucket(tensor("queue", 3, dtype=dtype, rule=Rule.BROADCAST)))
    sent = [torch.tensor(row).to(dtype_of(dtype)) for row in ([0, 1, 0], [1, 0, 0], [1, 1, 1])]
    for worker in order:
        rig.push(worker, sent[worker], samples=worker + 1)
    rig.commit(0, 1, 2, samples=6)
    assert torch.equal(rig.values(), sent[0])
    rig.push(0, sent[2])
    rig.restart(1, 2)
    for worker in order:
        if worker:
            rig.push(worker, sent[worker])
    rig.commit(1, 2, samples=2)
    assert torch.equal(rig.values(), sent[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_constant_buffer_stays_as_it_is(dtype: str) -> None:
    """A mask, a table of frequencies: the mean of equal values is that value, to the bit."""
    kind = dtype_of(dtype)
    largest = torch.finfo(kind).max
    constant = torch.cat([torch.rand(61), torch.tensor([largest, -largest, -math.inf])]).to(kind)
    rig = Rig(one_bucket(tensor("mask", 64, dtype=dtype, rule=Rule.MEAN)))
    rig.fill(0, constant)
    for _ in range(20):
        for worker, samples in enumerate((3, 7, 11)):
            rig.push(worker, constant, samples=samples)
        rig.commit(0, 1, 2, samples=21)
        assert torch.equal(rig.values(), constant)


def test_the_mean_of_a_buffer_keeps_infinities_and_does_not_overflow() -> None:
    rig = Rig(one_bucket(tensor("buffer", 3, rule=Rule.MEAN)))
    rig.fill(0, torch.tensor([-math.inf, -math.inf, 0.0]))
    rig.push(0, torch.tensor([-math.inf, 1.0, 3e38]), samples=1)
    rig.push(1, torch.tensor([1.0, -math.inf, -3e38]), samples=3)
    rig.commit(0, 1, samples=4)
    assert rig.values().tolist() == [-math.inf, -math.inf, pytest.approx(-1.5e38)]


def test_counters_of_a_stale_step_do_not_go_back() -> None:
    layout = partition((tensor("count", 2, dtype="int64", rule=Rule.MAXIMUM),), bucket_bytes=1024, shards=1)
    rig = Rig(layout, workers=(0,), consistency=Consistency(mode="bounded", max_staleness=4))
    rig.fill(0, torch.tensor([7, 2]))
    rig.push(0, torch.tensor([5, 3]))
    rig.commit(0, samples=1)
    assert rig.values(0).tolist() == [7, 3]


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
        rig = Rig(one_bucket(tensor("w", 500)), workers=range(5), consistency=Consistency(deterministic=True))
        pushes = [threads.submit(rig.push, w, gradients[w], samples=w + 1) for w in arrivals]
        assert all(push.result(10) for push in pushes)
        rig.commit(*range(5), samples=15)
        results.append(rig.values())
    assert all(torch.equal(result, results[0]) for result in results)


def test_in_deterministic_mode_a_long_wait_does_not_change_the_order() -> None:
    rig = Rig(
        one_bucket(tensor("w", 4)), workers=(0, 1), consistency=Consistency(deterministic=True), limits=HASTY
    )
    with pytest.raises(Refused, match="turn") as refused:
        rig.push(1, ones(4))
    assert refused.value.code is RefusalCode.NOT_YOUR_TURN
    assert rig.shard.queued == {1}
    assert rig.push(0, ones(4))
    assert rig.shard.queued == frozenset(), "it is its turn, whether it comes again or not"
    assert rig.push(1, ones(4))


def test_in_deterministic_mode_nobody_waits_for_who_has_vanished(threads: ThreadPoolExecutor) -> None:
    rig = Rig(one_bucket(tensor("w", 4)), workers=(0, 1), consistency=Consistency(deterministic=True))
    waiting = threads.submit(rig.push, 1, ones(4), attempt=0)
    eventually(lambda: rig.shard.queued == {1}, "the push waits")
    rig.restart(1)
    assert refusal(waiting) is RefusalCode.STALE_ATTEMPT
    assert rig.shard.queued == frozenset()
    assert rig.push(1, ones(4))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize(("sign", "samples"), [(1, 4), (-1, 4), (1, 2**63 - 1)])
def test_the_mean_of_finite_gradients_is_finite(dtype: str, sign: int, samples: int) -> None:
    """However large they are, and however many samples a worker says that they are made of."""
    rig = Rig(one_bucket(tensor("w", 4, dtype=dtype)))
    huge = torch.finfo(dtype_of(dtype)).max

    def gradient(value: float) -> torch.Tensor:
        return torch.tensor([1.0, value, huge, 1.0], dtype=dtype_of(dtype))

    rig.push(0, gradient(huge), samples=samples)
    rig.push(1, gradient(sign * huge), samples=samples)
    rig.commit(0, 1, samples=2 * samples)
    expected = torch.tensor([-1.0, -huge if sign > 0 else 0.0, -huge, -1.0], dtype=torch.float64)
    assert torch.allclose(rig.values().double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("few_first", [True, False])
def test_a_step_of_few_samples_counts_as_exactly_as_one_of_many(dtype: str, few_first: bool) -> None:
    """A millionth of the samples, with gradients that are much larger, makes the larger part of the mean."""
    rig = Rig(one_bucket(tensor("w", 4, dtype=dtype)))
    few, many = ones(4, 3e7).to(dtype_of(dtype)), ones(4, 0.03).to(dtype_of(dtype))
    steps = [(few, 1), (many, 10**6)]
    for worker, (gradient, samples) in enumerate(steps if few_first else steps[::-1]):
        rig.push(worker, gradient, samples=samples)
    rig.commit(0, 1, samples=10**6 + 1)
    expected = -(few.double() + 10**6 * many.double()) / (10**6 + 1)
    accurate = 4 * torch.finfo(dtype_of(dtype)).eps
    assert torch.allclose(rig.values().double(), expected, rtol=accurate, atol=0)
