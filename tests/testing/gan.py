"""Two networks with an optimizer each, as a job trains them and as plain torch does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from elastic_ps.core.ledger import Range
from elastic_ps.data.shuffle import permutation
from elastic_ps.worker.session import Session
from tests.testing.harness import Job, make_mlp
from tests.testing.oracle import Commit

RECORDS, BATCH = 96, 4
Networks = dict[int, torch.nn.ModuleDict]
Optimizers = dict[str, torch.optim.Optimizer]
Make = Callable[[torch.nn.ModuleDict], Optimizers]


class Pairs(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Noise, and what is real."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(7)
        self.noise = torch.randn(RECORDS, 2, generator=random)
        self.real = torch.randn(RECORDS, 2, generator=random) * 0.1 + 3.0

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.noise[index], self.real[index]


DATA = Pairs()


def make_networks(seed: int = 0) -> torch.nn.ModuleDict:
    return torch.nn.ModuleDict(
        {"generator": make_mlp((2, 12, 2), seed=seed), "critic": make_mlp((2, 16, 1), seed=seed + 1)}
    )


def adam_and_sgd(both: torch.nn.ModuleDict) -> Optimizers:
    """Of the kinds that the parameter server has, which make one pass over memory."""
    first, rest = both["critic"][0], both["critic"][2:]  # type: ignore[index]
    groups = [{"params": first.parameters()}, {"params": rest.parameters(), "lr": 0.02}]
    return {
        "generator": torch.optim.Adam(both["generator"].parameters(), lr=0.01, fused=True),
        "critic": torch.optim.SGD(groups, lr=0.05, momentum=0.9, fused=True),
    }


def turn(version: int) -> str:
    return "generator" if version % 3 == 2 else "critic"


def loss(both: Any, name: str, noise: torch.Tensor, real: torch.Tensor) -> Any:
    """That of the generator leaves gradients in the critic, and the other way round."""
    fake = both["critic"](both["generator"](noise))
    return -fake.mean() if name == "generator" else fake.mean() - both["critic"](real).tanh().mean()


def decay(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)


def trainer(
    networks: Networks,
    make: Make = adam_and_sgd,
    *,
    epochs: int = 1,
    until: int = 10**9,
    each: Callable[[Session], object] = lambda session: None,
    ended: Callable[[Session, Any], object] = lambda session, optimizers: None,
) -> Callable[[Session], None]:
    """A script that trains them in turn. Its workers begin with other values, which do not count."""

    def script(session: Session) -> None:
        both = networks[session.worker] = make_networks(seed=10 * session.worker)
        optimizers = session.optimizer(make(both), both)
        session.scheduler(decay(optimizers["critic"]), interval="step")
        for noise, real in session.loader(DATA, BATCH, epochs=epochs):
            name = turn(session.version)
            optimizers[name].zero_grad()
            loss(both, name, noise, real).backward()
            each(session)
            optimizers[name].step()
            if session.version >= until:
                session.drain()
        ended(session, optimizers)

    return script


def run(job: Job, workers: int, script: Callable[[Session], None]) -> None:
    """Worker 0 brings the model."""
    job.start(0, script)
    job.until(lambda: bool(job.status().ready), "worker 0 brings the model")
    for worker in range(1, workers):
        job.start(worker, script)
    job.join()


def alone(commits: Sequence[Commit], job: Job, make: Make = adam_and_sgd) -> tuple[Any, Optimizers]:
    """Plain torch on the rounds of a job: the networks and their optimizers.

    The gradients of a version are averaged as the parameter server does it, so that the bits are the same.
    """
    both = make_networks()
    optimizers = make(both)
    schedule = decay(optimizers["critic"])
    for commit in commits:
        name = turn(commit["version"] - 1)
        parameters = list(both[name].parameters())
        mean: list[torch.Tensor] = []
        weight = 0
        for contribution in sorted(commit["contributions"], key=lambda c: c["worker"]):
            records = [i for r in contribution["records"] for i in _records(Range(*r), job)]
            noise, real = (torch.stack(column) for column in zip(*(DATA[i] for i in records), strict=True))
            both.zero_grad()
            loss(both, name, noise, real).backward()
            gradients = [p.grad for p in parameters if p.grad is not None]
            weight += len(records)
            share = len(records) / weight
            mean = [torch.lerp(a, b, share) for a, b in zip(mean or gradients, gradients, strict=True)]
        both.zero_grad()
        for parameter, gradient in zip(parameters, mean, strict=True):
            parameter.grad = gradient
        optimizers[name].step()
        schedule.step()
    return both, optimizers


def _records(r: Range, job: Job) -> Sequence[int]:
    data = job.spec.data
    return permutation(RECORDS, r.epoch, shuffle=data.shuffle, seed=data.seed)[r.start : r.stop]


def same_bits(ours: torch.nn.Module, theirs: torch.nn.Module) -> bool:
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def assert_same_state(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], *, besides: Collection[str] = ()
) -> None:
    """State, and hyperparameters but for those, are equal to the bit; how torch computes does not count."""
    aside = {"fused", *besides}
    assert ours["state"].keys() == theirs["state"].keys()
    for number, entries in theirs["state"].items():
        for key, value in entries.items():
            kept = ours["state"][number].get(key)
            assert value is None if kept is None else torch.equal(kept, torch.as_tensor(value)), (number, key)
    for group, other in zip(ours["param_groups"], theirs["param_groups"], strict=True):
        assert {k: v for k, v in group.items() if k not in aside} == {
            k: v for k, v in other.items() if k not in aside
        }
