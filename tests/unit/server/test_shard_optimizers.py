"""A shard steps as torch's own optimizers do, whatever the cut into buckets."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from elastic_ps.codec import dtype_of
from elastic_ps.core.partition import Bucket, Rule, TensorSpec, partition
from elastic_ps.core.settings import ALLOWED, Settings, plain_group
from elastic_ps.errors import InvalidModel
from tests.testing.shard import Rig, one_bucket, ones, tensor

ARGUMENTS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01, "nesterov": {"momentum": 0.9}},
    "Adam": {"betas": (0.8, 0.9), "eps": 0.1, "weight_decay": 0.1, "amsgrad": True}
    | {"decoupled_weight_decay": {"weight_decay": 0.1}},
    "AdamW": {"betas": (0.8, 0.9), "eps": 0.1, "weight_decay": 0.1, "amsgrad": True},
    "Adagrad": {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 1.0, "eps": 0.1},
    "RMSprop": {"alpha": 0.5, "eps": 0.1, "weight_decay": 0.1, "momentum": 0.5, "centered": True},
    "Adadelta": {"rho": 0.5, "eps": 0.1, "weight_decay": 0.1},
    "Adamax": {"betas": (0.8, 0.9), "eps": 0.1, "weight_decay": 0.1},
    "NAdam": {"betas": (0.8, 0.9), "eps": 0.1, "weight_decay": 0.1, "momentum_decay": 0.1}
    | {"decoupled_weight_decay": {"weight_decay": 0.1}},
    "RAdam": {"betas": (0.8, 0.9), "eps": 0.1, "weight_decay": 0.1}
    | {"decoupled_weight_decay": {"weight_decay": 0.1}},
    "ASGD": {"lambd": 0.1, "alpha": 0.5, "t0": 2.0, "weight_decay": 0.1},
    "Rprop": {"etas": (0.3, 1.5), "step_sizes": (0.02, 0.06)},
}
"""For every constructor argument a value that is not its default. A dict: what it needs beside True."""

COMMON = {"lr": torch.tensor(0.05), "maximize": True}
"""Arguments that all classes take."""

HOW = ("foreach", "fused", "capturable")
"""Arguments that say how to compute, not what."""


def cases() -> Iterator[Any]:
    for name in ALLOWED:
        yield pytest.param(name, {}, id=name)
        for argument, value in {**COMMON, **ARGUMENTS[name]}.items():
            options = {argument: True, **value} if isinstance(value, dict) else {argument: value}
            yield pytest.param(name, {"lr": 0.05, **options}, id=f"{name}-{argument}")


@pytest.mark.parametrize("name", ALLOWED)
def test_every_argument_of_the_constructor_is_tried(name: str) -> None:
    known = set(inspect.signature(getattr(torch.optim, name)).parameters) - {"params", "differentiable"}
    assert known - set(HOW) == {*COMMON, *ARGUMENTS[name]}


@pytest.mark.parametrize(("name", "options"), list(cases()))
@pytest.mark.parametrize(("bucket_bytes", "shards"), [(4 * 1024 * 1024, 1), (600, 3)])
def test_steps_are_those_of_torchs_own_optimizer_for_any_cut(
    name: str, options: Mapping[str, Any], bucket_bytes: int, shards: int
) -> None:
    generator = torch.Generator().manual_seed(7)
    shapes = [(13, 40), (40,), (), (5, 40, 2), (3,)]
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    groups = [{"params": parameters[:2], "lr": 0.02}, {"params": parameters[2:]}]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(groups, **options, foreach=False)
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


def test_hyperparameters_that_torch_refuses_are_refused_in_its_words() -> None:
    with pytest.raises(InvalidModel, match=r"Adam does not take .*Invalid epsilon value: -1"):
        Rig(
            one_bucket(tensor("w", 4)),
            optimizer="Adam",
            settings=Settings(groups=({"lr": 0.1, "eps": -1.0},)),
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_steps_too_small_for_half_precision_add_up(dtype: str) -> None:
    """1 + 2**-12 is 1 in half precision; 4096 such steps make 2."""
    rig = Rig(one_bucket(tensor("w", 4, dtype=dtype)))
    rig.fill(0, torch.ones(4, dtype=dtype_of(dtype)))
    for _ in range(64):
        rig.push(0, torch.full((4,), -(2.0**-12), dtype=dtype_of(dtype)))
        rig.commit(0, samples=1)
    assert rig.values().dtype is dtype_of(dtype)
    assert rig.values().float().tolist() == [1 + 2.0**-6] * 4
    assert all(e.value.dtype is torch.float32 for e in rig.shard.state() if not e.scalar)


def test_values_are_clamped_after_each_step() -> None:
    """All of the group, also those that have no gradient in the step; other groups are left alone."""
    settings = Settings(({"lr": 1.0, "clamp": [-0.5, 0.25]}, {"lr": 1.0, "clamp": None}))
    tensors = (tensor("a", 2), tensor("b", 1), replace(tensor("c", 2), group=1))
    rig = Rig(one_bucket(*tensors), settings=settings)
    rig.fill(0, torch.tensor([0.0, 0.1, 9.0, 0.0, 0.1]))
    rig.push(0, torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0]), present=[True, False, True])
    rig.commit(0, samples=1)
    torch.testing.assert_close(rig.values(), torch.tensor([-0.5, 0.25, 0.25, -1.0, 1.1]))


def test_rows_are_brought_within_their_norm_after_each_step() -> None:
    """Each row by itself, in tensors of any number of dimensions; other groups are left alone."""
    settings = Settings(({"lr": 1.0, "max_norm": 2.0}, {"lr": 1.0}))
    tensors = (tensor("a", 2, 2), tensor("b", 1, 2, 2), replace(tensor("c", 1, 2), group=1))
    rig = Rig(one_bucket(*tensors), settings=settings)
    rig.fill(0, torch.tensor([3.0, 4.0, 0.3, 0.4, 0.0, 0.0, 2.0, 0.0, 3.0, 4.0]))
    rig.push(0, torch.tensor([0.0] * 8 + [1.0, 1.0]), present=[True, False, True])
    rig.commit(0, samples=1)
    expected = torch.tensor([1.2, 1.6, 0.3, 0.4, 0.0, 0.0, 2.0, 0.0, 2.0, 3.0])
    torch.testing.assert_close(rig.values(), expected)


def test_zeros_are_kept_in_the_groups_that_ask_for_it() -> None:
    """Pruned weights; also if momentum moves them. One that becomes zero by a step stays it, too."""
    settings = Settings(({"lr": 1.0, "momentum": 0.5, "keep_zeros": True}, {"lr": 1.0, "momentum": 0.5}))
    rig = Rig(one_bucket(tensor("a", 4), replace(tensor("b", 2), group=1)), settings=settings)
    rig.fill(0, torch.tensor([0.0, 1.0, 2.0, -0.0, 0.0, 1.0]))
    for _ in range(2):
        rig.push(0, ones(6))
        rig.commit(0, samples=1)
    assert rig.values().tolist() == [0.0, 0.0, -0.5, 0.0, -2.5, -1.5]


@pytest.mark.parametrize("read", [1, 3, 6])
def test_state_is_complete_and_of_one_version_whenever_it_is_read(read: int) -> None:
    settings = Settings(({"lr": 0.1},))
    rig = Rig(one_bucket(tensor("a", 2), tensor("b", 3)), optimizer="Adam", settings=settings)
    rig.push(0, ones(5))
    rig.commit(0, samples=1)
    state = rig.shard.state()
    before = {entry.name: entry.value for entry in rig.shard.state()}
    entries = list(itertools.islice(state, read))
    rig.push(0, ones(5))
    rig.commit(0, samples=1)
    entries += state
    assert {(e.tensor, e.key, e.scalar) for e in entries} == {
        (t, key, key == "step") for t in (0, 1) for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert all(torch.equal(entry.value, before[entry.name]) for entry in entries)


@pytest.mark.parametrize(("name", "states"), [("SGD", 0), ("Adam", 2), ("Adagrad", 1)])
def test_the_size_of_the_optimizers_state_is_known_before_the_first_step(name: str, states: int) -> None:
    rig = Rig(one_bucket(tensor("w", 100)), optimizer=name)
    values, state = rig.shard.model_bytes
    assert values == 400
    assert state - states * values in (0, 4), "Adam and Adagrad count their steps, too"
    half, more = Rig(one_bucket(tensor("w", 100, dtype="bfloat16")), optimizer=name).shard.model_bytes
    assert (half, more) == (200, state + 400), "what is stepped has float32"
