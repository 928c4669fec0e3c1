"""What is to hold after each step: the parameter server sees to it as plain torch would on one machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import prune

from elastic_ps.errors import InvalidModel
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.oracle import assert_each_record_once, assert_equal_up_to_round_off, mse, replay
from tests.testing.trained import Models, alone, check_against_replay, failing, sgd

SERVERS = [
    pytest.param({"bucketBytes": 1024}, id="one shard"),
    pytest.param({"replicas": 2, "bucketBytes": 1024}, id="two shards"),
    pytest.param({"replicas": 2, "durability": "standby"}, id="standby"),
]

Limit = Callable[[torch.Tensor], None]


class Words(torch.nn.Module):
    """Six numbers are looked up as words; the embedding is cut into several buckets."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(40, 16, **options)
        self.body = torch.nn.Linear(96, 1)
        with torch.no_grad():
            values = torch.linspace(-1, 1, 40 * 16).view(40, 16)
            self.embedding.weight.copy_(values)
            self.embedding.weight[1::2] *= 0.05
            self.embedding.weight[7] = 0.0
            self.embedding.weight[:, 3] = 0.0
            self.body.weight.copy_(torch.linspace(-0.5, 0.5, 96))
            self.body.bias.zero_()

    def forward(self, x: torch.Tensor) -> Any:
        words = ((x + 4) * 5).long().clamp(0, 39)
        return self.body(self.embedding(words).flatten(1))


def clamped(weight: torch.Tensor) -> None:
    weight.data.clamp_(-0.25, 0.2)


def rows_limited(weight: torch.Tensor) -> None:
    norms = weight.data.norm(dim=1, keepdim=True)
    weight.data.mul_(torch.where(norms > 0.75, 0.75 / norms, 1.0))


def zeros_kept(weight: torch.Tensor) -> None:
    weight.data[7] = 0.0
    weight.data[:, 3] = 0.0


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize(
    ("option", "limit"),
    [
        ({"clamp": (-0.25, 0.2)}, clamped),
        ({"max_norm": 0.75}, rows_limited),
        ({"keep_zeros": True}, zeros_kept),
    ],
)
def test_a_constraint_is_kept_as_by_plain_torch(
    tmp_path: Path, option: dict[str, Any], limit: Limit, server: dict[str, Any]
) -> None:
    """Momentum moves all rows, also those that a batch does not look up. The other group is left alone."""
    data, models = Numbers(160), Models()

    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        assert isinstance(model, Words)
        groups = [{"params": [model.embedding.weight], **option}, {"params": model.body.parameters()}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def script(session: Session) -> None:
        model = models[session.worker] = Words()
        optimizer = session.optimizer(make(model), model)
        for x, y in session.loader(data, 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    with running_job(tmp_path, checkpoints=tmp_path / "kept", parameterServer=server) as job:
        job.run(script, workers=2)
        commits, spec = job.commits(), job.spec

    def replayed(model: torch.nn.Module, *, limited: bool = True) -> None:
        assert isinstance(model, Words)
        weight = model.embedding.weight
        replay(commits, data, model, make, spec, after=lambda v, o: limit(weight) if limited else None)

    assert_each_record_once(commits, records=160, epochs=1)
    assert_equal_up_to_round_off(models[0], Words(), replayed)
    with pytest.raises(AssertionError):
        assert_equal_up_to_round_off(models[0], Words(), lambda model: replayed(model, limited=False))


def test_clamp_is_for_all_groups_that_say_nothing_else(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        first, *rest = model.parameters()
        groups: list[dict[str, Any]] = [{"params": [first], "clamp": None}, {"params": rest}]
        optimizer = session.optimizer(torch.optim.SGD(groups, lr=0.1), model, clamp=(-0.0625, 0.0625))
        for x, y in session.loader(Numbers(40), 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            assert all(float(p.detach().abs().max()) <= 0.0625 for p in rest)
            assert float(first.detach().abs().max()) > 0.0625

    alone(tmp_path, script)


def test_zeros_are_kept_from_when_a_script_says_so(tmp_path: Path) -> None:
    """The option is a hyperparameter, which takes effect with the next step."""

    def script(session: Session) -> None:
        model = Words()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
        zeros = model.embedding.weight[7]
        for x, y in session.loader(Numbers(80), 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            if session.version == 10:
                assert zeros.detach().count_nonzero() == 16
                optimizer.param_groups[0]["keep_zeros"] = True
            if session.version > 10:
                assert model.body.weight.detach().count_nonzero() == 96

    alone(tmp_path, script)


@pytest.mark.parametrize("server", SERVERS[:2])
def test_torchs_own_pruning_works(tmp_path: Path, server: dict[str, Any]) -> None:
    """Its masks are buffers, and the parameter that is trained is not pruned itself."""

    def pruned() -> torch.nn.Module:
        model = make_mlp()
        for layer in (model[0], model[2]):
            prune.l1_unstructured(layer, "weight", amount=0.5)
            weight = layer.weight
            assert isinstance(weight, torch.Tensor)
            layer.weight = weight.detach()  # made again in each forward; a graph cannot be copied
        return model

    def loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        result = mse(model, x, y)
        assert isinstance(model, torch.nn.Sequential)
        weight = model[2].weight
        assert isinstance(weight, torch.Tensor)
        assert int((weight == 0).sum()) == weight.numel() // 2
        return result

    check_against_replay(tmp_path, pruned, sgd, loss=loss, parameterServer=server)


@pytest.mark.parametrize(
    ("option", "match"),
    [
        ({"clamp": (1, 0)}, r"clamp=\(1, 0\); expected two numbers, the lowest and the highest"),
        ({"max_norm": 0}, "max_norm=0; expected a number above 0"),
        (
            {"max_norm": 1.0},
            "max_norm=1.0, which limits the norm of each row, but one of its parameters has no rows",
        ),
        ({"keep_zeros": ["0.weight"]}, r"keep_zeros=\['0.weight'\]; expected True or False"),
    ],
)
def test_a_constraint_that_means_nothing_is_refused(
    tmp_path: Path, option: dict[str, Any], match: str
) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        session.optimizer(torch.optim.SGD([{"params": model.parameters(), **option}], lr=0.1), model)

    failing(tmp_path, script, InvalidModel, match)


def test_rows_that_are_too_long_for_a_bucket_are_refused(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = torch.nn.Linear(600, 3, bias=False)
        groups = [{"params": model.parameters(), "max_norm": 1.0}]
        session.optimizer(torch.optim.SGD(groups, lr=0.1), model)

    match = r"the rows of weight float32\[3, 600\] have more than parameterServer.bucketBytes=1024 bytes"
    with pytest.raises(InvalidModel, match=match):
        alone(tmp_path, script, parameterServer={"replicas": 2, "bucketBytes": 1024})


@pytest.mark.parametrize("mode", [{"mode": "local", "steps": 2}, {}], ids=["local", "sync"])
@pytest.mark.parametrize("averaged", [False, True])
def test_an_embedding_that_limits_its_rows_itself_is_refused(
    tmp_path: Path, averaged: bool, mode: dict[str, Any]
) -> None:
    """Unless its weight is one that the script changes."""

    def script(session: Session) -> None:
        model = Words(max_norm=0.5)
        names = ["embedding"] if averaged else []
        session.optimizer(sgd(model.body), model, averaged=names)

    advice = 'without max_norm, and give its weight a parameter group of its own, with "max_norm": 0.5'
    if mode:
        advice = "In mode local, limit its rows in the script instead, after optimizer.step"
    if averaged:
        alone(tmp_path, script, consistency=mode)
    else:
        failing(tmp_path, script, InvalidModel, advice, consistency=mode)
