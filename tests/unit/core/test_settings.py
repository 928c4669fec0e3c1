"""What of an optimizer travels, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_ps.core.settings import (
    ALLOWED,
    Divisors,
    Made,
    Position,
    Settings,
    check_constraints,
    check_optimizer,
    plain,
    plain_group,
)
from elastic_ps.errors import InvalidModel

values = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.floats(allow_nan=False), st.text(max_size=5)
)
groups = st.dictionaries(st.text(max_size=5), values | st.lists(values, max_size=3), max_size=4)


positions = st.builds(Position, st.integers(0), st.integers(0), st.integers(0))


@given(st.lists(groups, max_size=3), st.lists(groups, max_size=2), positions)
def test_settings_survive_the_way(
    groups: list[dict[str, Any]], schedulers: list[dict[str, Any]], position: Position
) -> None:
    settings = Settings(tuple(groups), tuple(schedulers), position, first=tuple(groups[:1]))
    assert Settings.from_json(settings.to_json()) == settings


@given(st.lists(groups, max_size=3), st.lists(groups, max_size=2), positions)
def test_settings_of_a_version_are_written_as_if_they_were_made_anew(
    groups: list[dict[str, Any]], schedulers: list[dict[str, Any]], position: Position
) -> None:
    """What versions have in common is encoded once; the text is that of all of it, with sorted keys."""
    before = Settings((), first=tuple(groups[:1]), made=Made(1, 2))
    sent = Settings(tuple(groups), tuple(schedulers))
    for made in (Made(2, 32), Made(3, 48)):
        settings = sent.of_version(position, made, before)
        anew = replace(sent, position=position, made=made, first=before.first)
        assert settings == anew
        assert settings.to_json() == json.dumps(vars_of(anew), sort_keys=True)
        before = settings


def vars_of(settings: Settings) -> dict[str, Any]:
    """All of it as plain data."""
    return {each.name: getattr(settings, each.name) for each in fields(settings)}


def test_equal_settings_are_written_alike() -> None:
    """Whatever the order in which a worker's optimizer has its options."""
    one, other = {"lr": 0.1, "momentum": 0.9}, {"momentum": 0.9, "lr": 0.1}
    assert Settings((one,)).to_json() == Settings((other,)).to_json()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"groups": [{}], "schedulers": []}', "7", "null"])
def test_what_is_not_settings_is_refused(text: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        Settings.from_json(text)


@pytest.mark.parametrize("name", ALLOWED)
def test_the_hyperparameters_of_every_allowed_class_can_be_sent(name: str) -> None:
    optimizer = getattr(torch.optim, name)([torch.nn.Parameter(torch.zeros(2))], lr=torch.tensor(0.25))
    check_optimizer(name)
    sent = json.loads(json.dumps(plain_group(optimizer.param_groups[0], 0)))
    assert sent["lr"] == 0.25
    assert not {"params", "foreach", "fused", "capturable"} & sent.keys()


@pytest.mark.parametrize("name", ["LBFGS", "__import__", "Optimizer", ""])
def test_other_classes_are_refused_with_what_to_use(name: str) -> None:
    with pytest.raises(InvalidModel, match="SGD, Adam"):
        check_optimizer(name)


def test_what_is_not_plain_is_refused_by_name() -> None:
    with pytest.raises(InvalidModel, match=r"param_groups\[1\]\['hook'\] is a function"):
        plain_group({"lr": 0.1, "hook": lambda: None}, 1)
    with pytest.raises(InvalidModel):
        plain(torch.zeros(2), where="lr")
    assert plain((1, (2.0, None)), where="x") == [1, [2.0, None]]


LIKE = Settings(({"lr": 0.1, "betas": [0.9, 0.99], "maximize": False, "weight_decay": 0},))


@pytest.mark.parametrize(
    "group",
    [
        {"lr": 1, "betas": [0.5, 0.5], "maximize": True, "weight_decay": 1e-4},
        {"lr": 0.1, "betas": [0.9, 0.99], "maximize": False, "weight_decay": 0, "initial_lr": 0.1},
        {"lr": 0.0, "betas": (0.9, 0.99), "maximize": False, "weight_decay": 0},
    ],
)
def test_other_values_of_the_same_kind_can_follow(group: dict[str, Any]) -> None:
    LIKE.check_follows(Settings((group,)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": None}, "lr is None"),
        ({"lr": "0.1"}, "lr is '0.1'"),
        ({"lr": math.nan}, "lr is nan"),
        ({"lr": math.inf}, "lr is inf"),
        ({"betas": [0.9]}, "betas is"),
        ({"betas": 0.9}, "betas is"),
        ({"maximize": 3}, "maximize is 3"),
        ({"params": []}, "params"),
    ],
)
def test_values_that_the_optimizer_cannot_step_with_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidModel, match=message):
        LIKE.check_follows(Settings(({**LIKE.groups[0], **change},)))


def test_groups_cannot_come_or_go() -> None:
    with pytest.raises(InvalidModel, match="0 parameter groups"):
        LIKE.check_follows(Settings(()))
    LIKE.check_follows(Settings(({"lr": 0.2, "initial_lr": 0.1},)))


@pytest.mark.parametrize(
    ("group", "match"),
    [
        ({"clamp": "none"}, "clamp='none'; expected two numbers"),
        ({"keep_zeros": 1}, "keep_zeros=1; expected True or False"),
        ({"max_norm": 2.0}, r"max_norm was added to param_groups\[0\] after session.optimizer"),
        ({"max_grad_norm": 2.0}, r"max_grad_norm was added to param_groups\[0\] after session.optimizer"),
    ],
)
def test_constraints_that_cannot_be_kept_cannot_come_later(group: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidModel, match=match):
        LIKE.check_follows(Settings(({**LIKE.groups[0], **group},)))
    LIKE.check_follows(Settings(({**LIKE.groups[0], "clamp": [0, 1], "keep_zeros": True},)))


ADAM = {"lr": 0.1, "amsgrad": False}
RMSPROP = {"lr": 0.1, "momentum": 0, "centered": False}


@pytest.mark.parametrize(
    ("start", "key", "value"),
    [(ADAM, "amsgrad", True), (RMSPROP, "centered", True), (RMSPROP, "momentum", 0.9)],
)
def test_what_needs_more_state_cannot_come_after_the_first_step(
    start: dict[str, Any], key: str, value: object
) -> None:
    without, with_it = Settings((start,)), Settings(({**start, key: value},))
    without.check_follows(with_it)  # as by OneCycleLR, which sets a momentum before the first step
    later = replace(without, position=Position(steps=1))
    with pytest.raises(InvalidModel, match=f"{key} is {value}, and was {start[key]} before"):
        later.check_follows(with_it)
    replace(with_it, position=Position(steps=1)).check_follows(without)


def test_sgd_may_get_its_momentum_later() -> None:
    made = Settings(({"lr": 0.1, "momentum": 0},), position=Position(steps=1))
    made.check_follows(Settings(({"lr": 0.1, "momentum": 0.9},)))


def test_the_limit_of_the_gradient_is_that_of_all_groups() -> None:
    like = Settings(({"max_grad_norm": 1.0}, {"max_grad_norm": 1.0}))
    like.check_follows(Settings(({"max_grad_norm": 2.0}, {"max_grad_norm": 2.0})))
    with pytest.raises(InvalidModel, match=r"all parameter groups need the same value; got 2\.0, 1\.0"):
        like.check_follows(Settings(({"max_grad_norm": 2.0}, {"max_grad_norm": 1.0})))
    with pytest.raises(InvalidModel, match=r"all parameter groups need the same value; got 2\.0, None"):
        like.check_follows(Settings(({"max_grad_norm": 2.0}, {})))


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ({"max_norm": 0}, "a number above 0"),
        ({"max_norm": -1.0}, "a number above 0"),
        ({"max_norm": math.nan}, "a number above 0"),
        ({"max_norm": True}, "a number above 0"),
        ({"max_norm": "2"}, "a number above 0"),
        ({"clamp": (1.0,)}, "two numbers"),
        ({"clamp": (0.0, 1.0, 2.0)}, "two numbers"),
        ({"clamp": (2.0, 1.0)}, "two numbers"),
        ({"clamp": 3.0}, "two numbers"),
        ({"keep_zeros": 1}, "True or False"),
    ],
)
def test_a_constraint_that_means_nothing_is_refused_in_words(group: dict[str, Any], expected: str) -> None:
    ((name, _),) = group.items()
    with pytest.raises(InvalidModel, match=rf"param_groups\[3\] has {name}=.*expected {expected}"):
        check_constraints(group, 3)


@pytest.mark.parametrize(
    "group", [{}, {"max_norm": 0.5}, {"clamp": (0.0, 0.0)}, {"clamp": [-1, 1]}, {"keep_zeros": False}]
)
def test_a_constraint_that_can_be_kept_is_none_to_be_refused(group: dict[str, Any]) -> None:
    check_constraints({"lr": 0.1, **group}, 0)


def test_slowed_settings_differ_in_the_learning_rate_alone() -> None:
    settings = Settings(({"lr": 0.4, "momentum": 0.9}, {"lr": 0.1}), position=Position(3))
    slow = settings.slowed(Divisors(4, 4))
    assert [group["lr"] for group in slow.groups] == pytest.approx([0.1, 0.025])
    assert slow.groups[0]["momentum"] == 0.9
    assert slow.position == settings.position
    adaptive = Settings(({"lr": 0.4}, {"lr": 0.1, "eps": 1e-8}))
    assert [group["lr"] for group in adaptive.slowed(Divisors(4, 2)).groups] == pytest.approx([0.1, 0.05])
    assert [group["lr"] for group in adaptive.slowed(Divisors(4, 4)).groups] == pytest.approx([0.1, 0.025])
    assert settings.groups[0]["lr"] == 0.4
