"""What a script does to its model that a job cannot follow is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.utils import parametrizations, prune

from elastic_ps.codec.memory import MUCH, PAGE, PARTS
from elastic_ps.core.partition import Rule, TensorSpec, partition
from elastic_ps.errors import UsageError
from elastic_ps.worker.model.checks import (
    ALWAYS,
    EVERY,
    Averages,
    Registered,
    WriteDetector,
)


class Net(nn.Module):
    """Has a buffer of each kind; `tied` and `again` are one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        self.center: Any
        self.before: Any
        self.register_buffer("center", torch.zeros(3))
        self.register_buffer("before", torch.zeros(3))
        self.register_buffer("late", None)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.tied = self.again = nn.BatchNorm1d(3)
        self.probe = nn.Module()
        self.probe.register_buffer("seen", torch.zeros(1))


def test_what_is_assigned_to_a_buffer_goes_to_the_jobs_buffer() -> None:
    """Also to each of two whose values move on, and to one that two modules share."""
    net = Net()
    given = dict(net.named_buffers())
    registered = Registered(net)
    net.center = torch.ones(3)
    net.tied.running_mean = torch.full((3,), 2.0)
    registered.settle()
    net.before, net.center = net.center, torch.full((3,), 5.0)
    registered.settle()
    assert {name: value.tolist() for name, value in given.items()} == {
        **{name: value.tolist() for name, value in Net().named_buffers()},
        "before": [1.0] * 3,
        "center": [5.0] * 3,
        "tied.running_mean": [2.0] * 3,
    }
    assert all(buffer is given[name] for name, buffer in net.named_buffers())


def test_what_is_a_workers_own_may_become_anything() -> None:
    """Named so, or not persistent."""
    net = Net()
    registered = Registered(net, ["probe"])
    net.probe = nn.Linear(3, 3)
    net.cache = torch.zeros(9)
    net.register_buffer("mask", torch.zeros(2), persistent=False)
    registered.settle()
    assert net.cache.shape == (9,)
    registered.settle()


def replace_parameter(net: Net) -> None:
    net.fc.weight = nn.Parameter(net.fc.weight.detach().clone())


def tie(net: Net) -> None:
    net.fc.weight = net.other.weight


def replace_module(net: Net) -> None:
    net.fc = nn.Linear(3, 3)


def add(net: Net) -> None:
    net.head = nn.Linear(3, 1)


def load(net: Net) -> None:
    net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)


def become(name: str, value: Callable[[Net], object]) -> Callable[[Net], None]:
    return lambda net: setattr(net, name, value(net))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (replace_parameter, r"fc\.weight was replaced.* in place.*session\.assign"),
        (tie, r"fc\.weight was replaced"),
        (replace_module, r"fc\.weight was replaced"),
        (load, r"fc\.weight was replaced.*assign=True"),
        (add, r"head\.weight is new"),
        (lambda net: prune.l1_unstructured(net.fc, "weight", amount=4), r"fc\.weight no longer .*keep_zeros"),
        (lambda net: parametrizations.spectral_norm(net.fc), r"fc\.weight no longer exists.* before"),
        (become("center", lambda net: torch.zeros(3, dtype=torch.double)), r"center was .*float32.*float64"),
        (become("empty", lambda net: torch.zeros(4)), r"empty was .*\[0\].*\[4\].*once on a batch before"),
        (become("late", lambda net: torch.zeros(4)), r"late is new.*once on a batch before"),
        (become("center", lambda net: net.fc.bias * 2), r"center .*gradient function.*detach"),
        (become("center", lambda net: net.before), r"center .*share memory with before.*clone"),
        (become("center", lambda net: net.before[:]), r"center .*share memory with before"),
        (become("again", lambda net: nn.BatchNorm1d(3)), r"tied.*weight|again.*weight"),
    ],
)
def test_all_else_is_refused_by_name(change: Callable[[Net], Any], match: str) -> None:
    net = Net()
    registered = Registered(net)
    change(net)
    with pytest.raises(UsageError, match=match):
        registered.settle()


def test_a_compiled_model_has_the_names_of_the_one_within() -> None:
    net = torch.compile(Net(), backend="eager")
    assert isinstance(net, nn.Module)
    registered = Registered(net, ["probe"])
    inner = net.get_submodule("_orig_mod")
    given = inner.get_buffer("center")
    inner.center = torch.ones(3)
    inner.get_submodule("probe").seen = torch.zeros(5)
    registered.settle()
    assert inner.get_buffer("center") is given
    assert given.tolist() == [1.0] * 3
    inner.empty = torch.zeros(4)
    with pytest.raises(UsageError, match=": empty was"):
        registered.settle()


def watched(values: torch.Tensor) -> WriteDetector:
    name = str(values.dtype).removeprefix("torch.")
    layout = partition(
        (TensorSpec("w", tuple(values.shape), name, Rule.GRADIENT, 0),), bucket_bytes=1 << 22, shards=1
    )
    writes = WriteDetector(layout, [values], [], [values], [], lambda _: values)
    writes.close()
    return writes


def steps(writes: WriteDetector, count: int) -> None:
    """A script changes nothing, and gets new values."""
    for _ in range(count):
        assert writes.changed() is None
        writes.close()


@pytest.mark.parametrize("elements", [7, 65_536, 65_539])
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_that_is_changed_is_noticed(elements: int, place: int, dtype: torch.dtype) -> None:
    """Also in the last bytes, which make no whole word, and through `.data`, which torch does not count."""
    values = torch.randn(elements).to(dtype)
    writes = watched(values)
    for _ in range(10):
        assert writes.changed() is None
    values.data.view(torch.uint8)[4 * place] ^= 1
    assert writes.changed() == []
    values.data.view(torch.uint8)[4 * place] ^= 1
    assert writes.changed() is None


def test_values_of_little_memory_that_change_places_are_noticed() -> None:
    values = torch.arange(16.0)
    writes = watched(values)
    values.data.copy_(values.view(8, 2).flip(0).reshape(-1).clone())
    assert writes.changed() == []


@pytest.mark.parametrize("after", [0, ALWAYS, ALWAYS + 3, EVERY])
def test_a_row_of_much_memory_that_is_changed_is_noticed_at_once(after: int) -> None:
    values = torch.randn(MUCH // 2)
    writes = watched(values)
    steps(writes, after)
    values.data[70_000 : 70_000 + PAGE // 4].zero_()
    assert writes.changed() == []


def noticed_after(writes: WriteDetector, values: torch.Tensor, step: int, *, through_data: bool) -> int:
    """A script changes one element in each step, from `step` on. Returns after how many that is noticed."""
    steps(writes, step)
    for count in range(1, EVERY + 1):
        (values.data if through_data else values)[70_000] += 1
        if writes.changed() is not None:
            return count
        writes.close()
    raise AssertionError(f"not noticed in {EVERY} steps")


@pytest.mark.parametrize("after", range(ALWAYS, ALWAYS + 2 * PARTS, 3))
def test_an_element_of_much_memory_that_is_changed_again_and_again_is_noticed(after: int) -> None:
    """In each step some part of each page is looked at, and all of it once torch has counted a change."""
    values = torch.randn(MUCH // 2)
    assert noticed_after(watched(values), values, after, through_data=True) < EVERY
    assert noticed_after(watched(values), values, after, through_data=False) <= 2


def test_an_element_of_much_memory_is_noticed_in_the_first_steps_and_in_some_later_ones() -> None:
    values = torch.randn(MUCH // 2)
    for after in [*range(ALWAYS), EVERY - 1, 2 * EVERY - 1]:
        writes = watched(values)
        steps(writes, after)
        values.data[70_000] += 1
        assert writes.changed() == [], after


def test_what_is_written_back_is_no_change() -> None:
    """As by a script that tests an average of the model, and goes on with the model."""
    values = torch.randn(MUCH // 2)
    writes = watched(values)
    steps(writes, ALWAYS + 1)
    before = values.clone()
    values.zero_()
    values.copy_(before)
    assert writes.changed() is None


@pytest.mark.parametrize("every", [2, PARTS, 12])
@pytest.mark.parametrize("looks", [1, PARTS])
def test_what_is_changed_every_so_many_steps_is_noticed(every: int, looks: int) -> None:
    """Each part is looked at in some of these steps, however often a worker looks before an arrival."""
    values = torch.randn(MUCH // 2)
    writes = watched(values)
    steps(writes, ALWAYS + 1)
    for step in range(8 * every * PARTS):
        if step % every == 0:
            values.data[70_000] += 1
        if any(writes.changed() is not None for _ in range(looks)):
            return
        writes.close()
    raise AssertionError("not noticed")


def test_what_is_after_the_last_page_is_always_looked_at() -> None:
    values = torch.randn(MUCH // 4 + 3)
    writes = watched(values)
    steps(writes, ALWAYS + 1)
    values.data[-1] += 1
    assert writes.changed() == []


def test_a_session_may_begin_and_end_while_a_model_is_built() -> None:
    """In another thread. Torch's own hooks must not change then; here one of them begins and ends it."""
    begun: list[Averages] = []

    def session(*_: object) -> None:
        begun.append(Averages(lambda: False))
        begun[-1].close()

    handle = register_module_module_registration_hook(session)
    try:
        nn.Sequential(nn.Linear(1, 1))
    finally:
        handle.remove()
    assert begun
