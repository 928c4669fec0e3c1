"""A shard that follows another one steps to the same bits."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from elastic_ps.codec import dtype_of
from elastic_ps.codec.optimizers import MASTER
from elastic_ps.core.partition import Rule
from elastic_ps.core.settings import Application, Settings
from elastic_ps.errors import ConnectionLost, RefusalCode, Refused
from elastic_ps.process.telemetry import Trace
from elastic_ps.server.job.standby import for_standby, sum_key
from elastic_ps.server.orders import Advance, Configuration
from elastic_ps.server.shards.shard import Shard
from tests.testing.shard import PLAIN, TERM, Body, Rig, one_bucket, tensor

ADAM = Settings(groups=({"lr": 0.01},))


def follow(rig: Rig) -> Shard:
    """A standby of the rig's shard with the same first values."""
    standby = Shard(
        0,
        Configuration(rig.layout, "Adam", ADAM, TERM, None),
        trace=Trace(None, ""),
    )
    standby.advance(0, 0, {0: 1}, None)
    standby.initialise(0, 0, 1, Body(rig.values()))
    return standby


def send(rig: Rig, standby: Shard, **change: int) -> None:
    """What a follower sends of the open round."""
    place = {"term": TERM, "bucket": 0, "version": rig.version, "attempt": rig.attempt} | change
    for part in rig.shard.sums():
        standby.take_sum(sum_key(**place), part.present, Body(part.sum))


def carry_out(standby: Shard, application: Application, version: int) -> None:
    order = for_standby(Advance(version, 0, {0: 10, 1: 11}, application))
    standby.advance(order.version, order.attempt, order.expected, order.apply)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("rule", [Rule.GRADIENT, Rule.MEAN, Rule.MAXIMUM, Rule.BROADCAST, Rule.SUM])
def test_the_same_bits(dtype: str, rule: Rule) -> None:
    rig = Rig(
        one_bucket(tensor("a", 5, dtype=dtype, rule=rule), tensor("b", 3, dtype=dtype, rule=rule)),
        optimizer="Adam",
        settings=ADAM,
        workers=(0, 1),
    )
    generator = torch.Generator().manual_seed(0)
    rig.fill(0, torch.randn(8, generator=generator).to(dtype_of(dtype)))
    standby = follow(rig)
    for number in range(4):
        present = [True, number != 2] if rule is Rule.GRADIENT else []
        for worker, samples in ((0, 3), (1, 4)):
            values = torch.randn(8, generator=generator).to(dtype_of(dtype))
            rig.push(worker, values, samples=samples, present=present)
        standby.advance(rig.version, 0, {}, None)
        send(rig, standby)
        application = rig.application(0, 1, samples=7)
        rig.commit(0, 1, samples=7)
        carry_out(standby, application, rig.version)
        (_, followed), *_ = standby.values()
        assert torch.equal(followed, rig.values())
        ours, theirs = list(rig.shard.state()), list(standby.state())
        assert [entry.name for entry in ours] == [entry.name for entry in theirs]
        assert all(torch.equal(a.value, b.value) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", [Rule.GRADIENT, Rule.MEAN, Rule.MAXIMUM, Rule.BROADCAST, Rule.SUM])
def test_assigned_values_are_there_to_the_bit_and_the_optimizers_state_stays(dtype: str, rule: Rule) -> None:
    rig = Rig(one_bucket(tensor("a", 5, dtype=dtype, rule=rule)), optimizer="Adam", settings=ADAM)
    standby = follow(rig)
    for assigns in (False, True, False):
        values = torch.linspace(-1, 3, 5).to(dtype_of(dtype))
        rig.push(1, values)
        standby.advance(rig.version, 0, {}, None)
        send(rig, standby)
        application = replace(rig.application(1, samples=1), assigns=assigns)
        before = [entry.value for entry in rig.shard.state()]
        rig.shard.advance(rig.version + 1, 0, rig.workers, application)
        rig.version += 1
        carry_out(standby, application, rig.version)
        after = [entry.value for entry in rig.shard.state()]
        if assigns:
            assert torch.equal(rig.values(), values)
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        elif rule in (Rule.GRADIENT, Rule.SUM) and rig.version > 1:
            assert not torch.equal(rig.values(), values)
        (_, followed), *_ = standby.values()
        assert torch.equal(followed, rig.values())
    masters = [stored.value for stored in rig.shard.stored(0) if stored.key == MASTER]
    assert len(masters) == (rule is Rule.GRADIENT and dtype == "bfloat16")
    assert all((master.bfloat16() == rig.values()).all() for master in masters)


def test_a_round_of_which_a_sum_is_missing_is_not_applied() -> None:
    rig = Rig(one_bucket(tensor("a", 4)), optimizer="Adam", settings=ADAM, workers=(0,))
    rig.fill(0, torch.ones(4))
    standby = follow(rig)
    rig.push(0, torch.ones(4))
    with pytest.raises(Refused, match="lacks gradients"):
        carry_out(standby, rig.application(0, samples=1), 1)
    assert standby.version == 0


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"term": TERM - 1}, RefusalCode.STALE_TERM),
        ({"version": 1}, RefusalCode.WRONG_VERSION),
        ({"attempt": 1}, RefusalCode.WRONG_VERSION),
        ({"bucket": 7}, RefusalCode.MALFORMED),
    ],
)
def test_a_sum_of_another_round_is_refused(change: dict[str, int], code: RefusalCode) -> None:
    rig = Rig(one_bucket(tensor("a", 4)), optimizer="Adam", settings=ADAM, workers=(0,))
    rig.fill(0, torch.ones(4))
    standby = follow(rig)
    rig.push(0, torch.ones(4))
    with pytest.raises(Refused) as refused:
        send(rig, standby, **change)
    assert refused.value.code is code


def test_a_sum_of_the_wrong_size_is_refused() -> None:
    rig = Rig(one_bucket(tensor("a", 4)), optimizer="Adam", settings=ADAM, workers=(0,))
    standby = follow(rig)
    with pytest.raises(Refused, match="12 bytes and 1 flags for bucket 0, which has 16 bytes"):
        standby.take_sum(sum_key(TERM, 0, 0, 0), [True], Body(torch.ones(3)))


def test_a_sum_with_more_than_all_rows_of_a_table_takes_no_memory() -> None:
    rig, sum_ = Rig(one_bucket(replace(tensor("e", 4, 2), sparse=True))), Body(torch.zeros(4 * (2 + 2) + 1))
    with pytest.raises(Refused, match="68 bytes") as refused:
        rig.shard.take_sum(sum_key(TERM, 0, 0, 0), [True], sum_)
    assert refused.value.code is RefusalCode.MALFORMED
    assert not sum_.started.is_set()


def test_no_worker_can_push_to_a_standby() -> None:
    rig = Rig(one_bucket(tensor("a", 4)), optimizer="Adam", settings=ADAM, workers=(0,))
    standby = follow(rig)
    with pytest.raises(Refused, match="does not take part"):
        standby.push(rig.key(0), 1, PLAIN, Body(torch.ones(4)))


def test_a_sum_is_taken_once_and_not_while_it_comes(threads: ThreadPoolExecutor) -> None:
    rig = Rig(one_bucket(tensor("a", 4)), optimizer="Adam", settings=ADAM, workers=(0,))
    standby = follow(rig)
    gate, key = threading.Event(), sum_key(TERM, 0, 0, 0)
    body = Body(torch.ones(4), gate=gate)
    first = threads.submit(standby.take_sum, key, [True], body)
    assert body.started.wait(10)
    with pytest.raises(Refused, match="is being received") as refused:
        standby.take_sum(key, [True], Body(torch.zeros(4)))
    assert refused.value.code is RefusalCode.NOT_READY
    gate.set()
    first.result(10)
    standby.take_sum(key, [True], Body(torch.zeros(4)))
    (values,) = standby.sums()
    assert values.sum.tolist() == [1.0] * 4


def test_a_sum_that_is_cut_off_is_taken_again() -> None:
    rig = Rig(one_bucket(tensor("a", 4)), optimizer="Adam", settings=ADAM, workers=(0,))
    standby = follow(rig)
    key = sum_key(TERM, 0, 0, 0)
    with pytest.raises(ConnectionLost):
        standby.take_sum(key, [True], Body(torch.zeros(4), cut_off=True))
    standby.take_sum(key, [True], Body(torch.ones(4)))
    (values,) = standby.sums()
    assert values.sum.tolist() == [1.0] * 4
