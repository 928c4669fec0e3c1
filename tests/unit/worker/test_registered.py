"""A model whose tensors are others than the job was given: buffers are taken, all else is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from elastic_ps.errors import UsageError
from elastic_ps.worker.registered import Registered


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
        (lambda net: prune.l1_unstructured(net.fc, "weight", amount=4), r"fc\.weight is not .*keep_zeros"),
        (lambda net: parametrizations.spectral_norm(net.fc), r"fc\.weight is not there any more.* before"),
        (become("center", lambda net: torch.zeros(3, dtype=torch.double)), r"center was .*float32.*float64"),
        (become("empty", lambda net: torch.zeros(4)), r"empty was .*\[0\].*\[4\].*once on a batch before"),
        (become("late", lambda net: torch.zeros(4)), r"late is new.*once on a batch before"),
        (become("center", lambda net: net.fc.bias * 2), r"center .*gradient function.*detach"),
        (become("center", lambda net: net.before), r"center .*shares memory with before.*clone"),
        (become("center", lambda net: net.before[:]), r"center .*shares memory with before"),
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
