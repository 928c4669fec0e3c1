"""What a script changes in parameters is noticed by the sums of their bits."""

from __future__ import annotations

import pytest
import torch

from elastic_ps.core.partition import Rule, TensorSpec, partition
from elastic_ps.worker.seal import Seal


@pytest.mark.parametrize("elements", [7, 65_536, 65_539])
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_that_is_changed_is_noticed(elements: int, place: int, dtype: torch.dtype) -> None:
    """Also in the last bytes, which make no whole word, and through `.data`, which torch does not count."""
    values = torch.randn(elements).to(dtype)
    spec = TensorSpec("w", (elements,), str(dtype).removeprefix("torch."), Rule.GRADIENT, 0)
    layout = partition((spec,), bucket_bytes=1 << 22, shards=1)
    seal = Seal(layout, [values], [], [values], [], lambda _: values)
    seal.close()
    for _ in range(10):
        assert seal.changed() is None
    values.data.view(torch.uint8)[4 * place] ^= 1
    assert seal.changed() == []
    values.data.view(torch.uint8)[4 * place] ^= 1
    assert seal.changed() is None
