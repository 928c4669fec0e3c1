"""What the parameters should be: the recorded rounds, replayed by plain torch in one process.

The parameter server's history says which records made each version. The replay computes one ordinary
optimizer step for each version, on the joined batch of all contributions. So whatever workers came, went
or died, and however the records were handed out, there is one right answer, up to round-off.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from elastic_ps.api.consistency import Consistency
from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.core.ledger import Range
from elastic_ps.data.shuffle import permutation

Loss = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], Any]
"""Gives a tensor. It is called Any because torch leaves `Tensor.backward` without annotations."""
MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]
Commit = dict[str, Any]


def mse(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    """The mean over the batch, so that a joined batch weighs each record the same."""
    return torch.nn.functional.mse_loss(model(x), y)


def ranges_of(commit: Commit) -> list[Range]:
    """The positions whose gradients made this version."""
    return [Range(*r) for c in commit["contributions"] for r in c["records"]]


def of_the_end(commits: Iterable[Commit]) -> list[Commit]:
    """Those that the last model is made of: none that the job has gone back behind.

    A version may be made twice. With more workers there may be fewer versions than the first time.
    """
    kept: list[Commit] = []
    for commit in commits:
        while kept and kept[-1]["version"] >= commit["version"]:
            kept.pop()
        kept.append(commit)
    return kept


def replay(
    commits: Sequence[Commit],
    data: torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]],
    model: torch.nn.Module,
    make_optimizer: MakeOptimizer,
    spec: TrainingJobSpec,
    *,
    loss: Loss = mse,
    before: Callable[[int, torch.nn.Module, torch.optim.Optimizer], None] | None = None,
    after: Callable[[int, torch.optim.Optimizer], None] | None = None,
    assigned: Callable[[torch.nn.Module], object] | None = None,
    set_to_none: bool = True,
) -> torch.optim.Optimizer:
    """Train `model` in place as the commits say; returns the optimizer.

    Args:
        before, after: called around the step that makes version `v + 1` out of `v`, with `v`.
        assigned: gives the model the values that a script has assigned, where a version was made of them.
    """
    optimizer = make_optimizer(model)
    records: int = len(data)  # type: ignore[arg-type]
    dtype = next(model.parameters()).dtype
    for number, commit in enumerate(commits):
        assert commit["version"] == commits[0]["version"] + number, "versions have no gap"
        version = commit["version"] - 1
        if assigned is not None and not ranges_of(commit):
            assigned(model)
            continue
        pairs = []
        for r in ranges_of(commit):
            order = permutation(records, r.epoch, shuffle=spec.data.shuffle, seed=spec.data.seed)
            pairs += [data[i] for i in order[r.start : r.stop]]
        x, y = (torch.stack(column).to(dtype) for column in zip(*pairs, strict=True))
        if before is not None:
            before(version, model, optimizer)
        optimizer.zero_grad(set_to_none)
        loss(model, x, y).backward()
        with torch.sparse.check_sparse_tensor_invariants(False):  # said, because torch warns if nobody says
            optimizer.step()
        if after is not None:
            after(version, optimizer)
    return optimizer


class Adapted:
    """The rates and momenta that a version is made with, where the job leaves them to the parameter server.

    Args:
        optimizer: as the script has made it, or as the outer rule's paper has it.
        rule: the job's.
        adaptive: whether the workers' own optimizer divides a gradient by its size.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, rule: Consistency, *, adaptive: bool = False
    ) -> None:
        self._optimizer, self._rule, self._adaptive = optimizer, rule, adaptive
        self._asked = [(group["lr"], group.get("momentum", 0)) for group in optimizer.param_groups]

    def before(self, commit: Commit) -> None:
        """The optimizer is about to make this version."""
        stale = max(c["staleness"] for c in commit["contributions"])
        for group, (rate, momentum) in zip(self._optimizer.param_groups, self._asked, strict=True):
            if self._scale == "none":
                stale = 0
            rooted = (self._adaptive or "eps" in group) and self._scale == "damped"
            group["lr"] = rate / (stale + 1) ** (0.5 if rooted else 1)
            if momentum and self._scale == "damped":
                group["momentum"] = 1 - 1 / (1 + momentum / (1 - momentum) / (stale + 1))
            elif momentum and self._warms:
                exchanges = group.get("every", 1) * (self._rule.fragments or 1)
                group["momentum"] = min(momentum, 1 - 20 / (21 + (commit["version"] - 1) // exchanges))

    @property
    def _warms(self) -> bool:
        rule = self._rule
        diloco = rule.outer in (None, "diloco", "delayed")
        return rule.mode == "local" and diloco and rule.outer_momentum is None

    @property
    def _scale(self) -> str:
        rule = self._rule
        if rule.mode == "local":
            divided = rule.outer == "downpour" and rule.outer_learning_rate is None
            return "damped" if divided else "none"
        return rule.staleness_scale or "damped"


def assert_equal_up_to_round_off(
    model: torch.nn.Module,
    initial: torch.nn.Module,
    replayed: Callable[[torch.nn.Module], object],
) -> None:
    """`model` is as near to the right answer as one process is.

    `replayed` trains a model in place. It is called in the model's own precision and in double precision;
    the difference between the two is what round-off does to this computation.
    """
    plain, exact = copy.deepcopy(initial), copy.deepcopy(initial).double()
    replayed(plain)
    replayed(exact)
    ours, single, double = (_flat(m) for m in (model, plain, exact))
    assert not torch.equal(double, _flat(initial)), "the replay has trained nothing"
    noise = float((single - double).abs().max())
    epsilon = torch.finfo(next(model.parameters()).dtype).eps * float(double.abs().max())
    error = float((ours - double).abs().max())
    assert error <= 6 * noise + 8 * epsilon, f"error {error:.2e}, one process has {noise:.2e}"


def _flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def assert_each_record_once(commits: Iterable[Commit], *, records: int, epochs: int) -> None:
    """The multiset of records in the commits is the data set, for every epoch."""
    counted = Counter((r.epoch, i) for c in commits for r in ranges_of(c) for i in range(r.start, r.stop))
    expected = Counter((epoch, i) for epoch in range(epochs) for i in range(records))
    missing, surplus = expected - counted, counted - expected
    assert counted == expected, f"missing {list(missing)[:9]}, too many {list(surplus)[:9]}"
