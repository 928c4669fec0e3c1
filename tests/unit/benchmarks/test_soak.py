"""The soak's accounting: it adds up after a right job, and finds what is missing, double or torn."""

from __future__ import annotations

import collections
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.soak import (
    EPOCHS,
    Accounts,
    Plan,
    Verdict,
    account,
    make_job,
    make_optimizer,
    plans,
    table,
)
from benchmarks.soak_modes import MODES, STEPS, half
from elastic_ps.api.consistency import MODES_OF, OUTER_RULES, Consistency
from elastic_ps.api.mutable import MutableFields

RECORDS = 6


def trained(steps: int = EPOCHS * RECORDS) -> tuple[Accounts, torch.optim.Optimizer]:
    """Two workers take turns with one record each, one of them with a weight of 3 in the mean."""
    accounts = Accounts(RECORDS)
    optimizer = make_optimizer(accounts)
    cells = list(itertools.product(range(EPOCHS), range(RECORDS)))
    for number, (epoch, record) in enumerate(cells[:steps]):
        optimizer.zero_grad()
        weight = 0.75 if number % 2 else 0.25
        (-weight * (accounts.trained[number % 2][epoch, [record]].sum() + accounts.clock.sum())).backward()
        optimizer.step()
    return accounts, optimizer


def judged(
    tmp_path: Path, accounts: Accounts, versions: int = EPOCHS * RECORDS, rows: torch.Tensor | None = None
) -> Verdict:
    saved = tmp_path / "1.pt"
    torch.save(accounts.state_dict() | ({} if rows is None else {"rows": rows}), saved)
    verdict = Verdict(
        Plan(0, 0, "sync", 1, standbys=False, transport="shm"),
        1.0,
        versions,
        1,
        collections.Counter({"kill-ps": 2}),
    )
    account(verdict, [saved])
    return verdict


def test_rows_that_are_missing_or_came_twice_are_found(tmp_path: Path) -> None:
    rows = Accounts(RECORDS, rows=True).rows
    assert rows is not None
    ids, one = np.arange(EPOCHS * RECORDS), np.ones(1, dtype=np.int64)
    for version, id_ in enumerate([*ids[:-1], ids[3]], start=1):  # not the last one, and another one twice
        rows.table.update(one * id_, torch.full((1, 1), -0.25).double(), one, version)
    verdict = judged(tmp_path, trained()[0], rows=rows(torch.from_numpy(ids)).detach())
    assert (verdict.missing, verdict.twice) == (1, 1)


def test_a_right_job_adds_up(tmp_path: Path) -> None:
    accounts, _ = trained()
    verdict = judged(tmp_path, accounts)
    assert verdict.problems == []
    lines = [line.split(" | ") for line in table([verdict, verdict], RECORDS).splitlines()]
    assert lines[-1][:4] == ["| all", "2", "0", "4"]
    assert [line[0] for line in lines[2:4]] == ["| sync", "| 1 shard, checkpoint"]


def test_a_missing_record_is_found(tmp_path: Path) -> None:
    steps = EPOCHS * RECORDS - 1
    verdict = judged(tmp_path, trained(steps)[0], versions=steps)
    assert verdict.problems == ["1 records are missing, 0 came twice"]


@pytest.mark.parametrize("worker", [0, 1])
def test_a_record_that_came_twice_is_found_whoever_trained_it(tmp_path: Path, worker: int) -> None:
    accounts, optimizer = trained()
    optimizer.zero_grad()
    (-(accounts.trained[worker][1, [2]].sum() + accounts.clock.sum())).backward()
    optimizer.step()
    verdict = judged(tmp_path, accounts, versions=EPOCHS * RECORDS + 1)
    assert verdict.problems == ["0 records are missing, 1 came twice"]


def test_local_steps_are_no_versions_but_a_model_torn_between_two_is_found(tmp_path: Path) -> None:
    accounts, _ = trained()
    saved = tmp_path / "1.pt"

    def problems() -> list[str]:
        torch.save(accounts.state_dict(), saved)
        plan = Plan(0, 0, "local, downpour", 1, standbys=False, transport="shm")
        verdict = Verdict(plan, 1.0, 3, 1, collections.Counter())
        account(verdict, [saved])
        return verdict.problems

    assert problems() == []
    with torch.no_grad():
        accounts.clock[512:] += 1
    assert problems() == ["the model has versions 12, 13, but the job is at version 3"]


def test_where_numbers_move_by_fractions_a_record_without_a_mark_is_missing(tmp_path: Path) -> None:
    accounts, _ = trained()
    saved = tmp_path / "1.pt"

    def judge() -> Verdict:
        torch.save(accounts.state_dict(), saved)
        plan = Plan(0, 0, "local, diloco", 1, standbys=False, transport="shm")
        verdict = Verdict(plan, 1.0, 3, 1, collections.Counter())
        account(verdict, [saved])
        return verdict

    with torch.no_grad():
        for parameter in accounts.parameters():
            parameter.mul_(0.3)
    assert judge().problems == []
    with torch.no_grad():
        for each in accounts.trained:
            each[1, 4] = 0.0
    assert judge().problems == ["1 records are missing, 0 came twice"]


def test_a_torn_model_is_found(tmp_path: Path) -> None:
    accounts, _ = trained()
    with torch.no_grad():
        accounts.clock[512:] += 1
    assert judged(tmp_path, accounts).problems == [
        "the model has versions 12, 13, but the job is at version 12"
    ]


def test_two_chiefs_and_none_are_found(tmp_path: Path) -> None:
    verdict = judged(tmp_path, trained()[0])
    for saved in ([], [tmp_path / "1.pt"] * 2):
        verdict.problems.clear()
        account(verdict, saved)
        assert verdict.problems == [f"{len(saved)} workers were the chief and saved the model"]


def test_every_combination_comes_before_one_comes_again() -> None:
    first = list(itertools.islice(plans(7), 4 * len(MODES)))
    assert len({plan.name for plan in first}) == len(first)
    assert {plan.mode for plan in first[: len(MODES)]} == MODES.keys()
    assert first == list(itertools.islice(plans(7), len(first)))


def test_its_modes_are_said_with_everything_that_they_can_have(tmp_path: Path) -> None:
    jobs = [Consistency.model_validate(mode.consistency) for mode in MODES.values()]
    modes, said = ({each.mode for each in jobs}, {name for each in jobs for name in each.model_fields_set})
    numbers = {"outer_learning_rate", "outer_momentum", "outer_nesterov"}
    assert {name for name, own in MODES_OF.items() if modes & set(own)} - said == numbers
    assert {each.outer for each in jobs} >= OUTER_RULES.keys() - {"diloco"}
    assert all(steps == STEPS for each in jobs if (steps := each.steps))
    assert [half(0), half(2)] == [1.0, 0.25]
    for plan in itertools.islice(plans(3), 4 * len(MODES)):
        make_job(plan, records=RECORDS, seconds=0.1, results=tmp_path)


@pytest.mark.parametrize("name", MODES)
def test_a_change_in_the_soak_is_one_that_the_job_can_make(name: str) -> None:
    mode = MODES[name]
    ways = [Consistency.model_validate(each) for each in (mode.consistency, *mode.changes)]
    for before, after in itertools.permutations(ways, 2):
        assert not MutableFields(consistency=before).refusal(MutableFields(consistency=after))
