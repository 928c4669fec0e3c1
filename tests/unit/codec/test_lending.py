"""Memory that is lent to tensors of a script."""

from __future__ import annotations

import io

import pytest
import torch

from elastic_ps.codec.lending import Loans


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (3, 4)], ids=str)
def test_a_lent_tensor_is_the_memory_and_like_any_other(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    memory = torch.zeros(24, dtype=dtype)
    number = torch.Size(shape).numel()
    lent = Loans().lend(0, memory[5 : 5 + number].view(shape))
    lent.add_(2)
    assert memory.tolist() == [0] * 5 + [2] * number + [0] * (19 - number)
    assert (lent.shape, lent.dtype, lent.is_leaf) == (torch.Size(shape), dtype, True)
    torch.save(lent, saved := io.BytesIO())
    assert lent.untyped_storage().nbytes() == lent.nbytes, "nothing else is saved with it"
    assert torch.equal(torch.load(io.BytesIO(saved.getvalue())), lent)
    lent.detach_()  # a view would refuse


def test_memory_is_in_use_as_long_as_a_tensor_shares_it() -> None:
    loans, memory = Loans(), torch.zeros(4)
    assert not loans.in_use(0)
    lent = loans.lend(0, memory)
    part, array = lent[2:].detach(), lent.numpy()
    assert loans.in_use(0)
    assert not loans.in_use(1)
    del lent
    assert loans.in_use(0), "of a view"
    del part
    assert loans.in_use(0), "of an array"
    del array
    assert not loans.in_use(0)
