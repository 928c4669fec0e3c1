"""What a script changes in parameters is noticed by the sums of their bits."""

from __future__ import annotations

import pytest
import torch

from elastic_ps.core.partition import Rule, TensorSpec, partition
from elastic_ps.worker.seal import ALWAYS, EVERY, MUCH, PAGE, PARTS, Seal


def sealed(values: torch.Tensor) -> Seal:
    name = str(values.dtype).removeprefix("torch.")
    layout = partition(
        (TensorSpec("w", tuple(values.shape), name, Rule.GRADIENT, 0),), bucket_bytes=1 << 22, shards=1
    )
    seal = Seal(layout, [values], [], [values], [], lambda _: values)
    seal.close()
    return seal


def steps(seal: Seal, count: int) -> None:
    """A script changes nothing, and gets new values."""
    for _ in range(count):
        assert seal.changed() is None
        seal.close()


@pytest.mark.parametrize("elements", [7, 65_536, 65_539])
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_that_is_changed_is_noticed(elements: int, place: int, dtype: torch.dtype) -> None:
    """Also in the last bytes, which make no whole word, and through `.data`, which torch does not count."""
    values = torch.randn(elements).to(dtype)
    seal = sealed(values)
    for _ in range(10):
        assert seal.changed() is None
    values.data.view(torch.uint8)[4 * place] ^= 1
    assert seal.changed() == []
    values.data.view(torch.uint8)[4 * place] ^= 1
    assert seal.changed() is None


@pytest.mark.parametrize("after", [0, ALWAYS, ALWAYS + 3, EVERY])
def test_a_row_of_much_memory_that_is_changed_is_noticed_at_once(after: int) -> None:
    values = torch.randn(MUCH // 2)
    seal = sealed(values)
    steps(seal, after)
    values.data[70_000 : 70_000 + PAGE // 4].zero_()
    assert seal.changed() == []


def noticed_after(seal: Seal, values: torch.Tensor, step: int, *, through_data: bool) -> int:
    """A script changes one element in each step, from `step` on. Returns after how many that is noticed."""
    steps(seal, step)
    for count in range(1, EVERY + 1):
        (values.data if through_data else values)[70_000] += 1
        if seal.changed() is not None:
            return count
        seal.close()
    raise AssertionError(f"not noticed in {EVERY} steps")


@pytest.mark.parametrize("after", range(ALWAYS, ALWAYS + 2 * PARTS, 3))
def test_an_element_of_much_memory_that_is_changed_again_and_again_is_noticed(after: int) -> None:
    """In each step some part of each page is looked at, and all of it once torch has counted a change."""
    values = torch.randn(MUCH // 2)
    assert noticed_after(sealed(values), values, after, through_data=True) < EVERY
    assert noticed_after(sealed(values), values, after, through_data=False) <= 2


def test_an_element_of_much_memory_is_noticed_in_the_first_steps_and_in_some_later_ones() -> None:
    values = torch.randn(MUCH // 2)
    for after in [*range(ALWAYS), EVERY - 1, 2 * EVERY - 1]:
        seal = sealed(values)
        steps(seal, after)
        values.data[70_000] += 1
        assert seal.changed() == [], after


def test_what_is_written_back_is_no_change() -> None:
    """As by a script that tests an average of the model, and goes on with the model."""
    values = torch.randn(MUCH // 2)
    seal = sealed(values)
    steps(seal, ALWAYS + 1)
    before = values.clone()
    values.zero_()
    values.copy_(before)
    assert seal.changed() is None


@pytest.mark.parametrize("every", [2, PARTS, 12])
@pytest.mark.parametrize("looks", [1, PARTS])
def test_what_is_changed_every_so_many_steps_is_noticed(every: int, looks: int) -> None:
    """Each part is looked at in some of these steps, however often a worker looks before an arrival."""
    values = torch.randn(MUCH // 2)
    seal = sealed(values)
    steps(seal, ALWAYS + 1)
    for step in range(8 * every * PARTS):
        if step % every == 0:
            values.data[70_000] += 1
        if any(seal.changed() is not None for _ in range(looks)):
            return
        seal.close()
    raise AssertionError("not noticed")


def test_what_is_after_the_last_page_is_always_looked_at() -> None:
    values = torch.randn(MUCH // 4 + 3)
    seal = sealed(values)
    steps(seal, ALWAYS + 1)
    values.data[-1] += 1
    assert seal.changed() == []
