"""Which tensors share memory."""

from __future__ import annotations

import torch

from elastic_ps.codec import overlaps

STORAGE = torch.zeros(6, 4)


def test_what_shares_elements() -> None:
    whole, columns = STORAGE, STORAGE[:, 1:3]
    assert overlaps([whole, whole.t()]) == [(0, 1)]
    assert overlaps([torch.zeros(6, 4), columns, STORAGE[2], whole.view(torch.uint8)]) == [(1, 2), (2, 3)]
    assert overlaps([STORAGE[0, 0].expand(3), STORAGE[0]]) == [(0, 1)]


def test_what_lies_side_by_side_does_not() -> None:
    halves = STORAGE[:, :2], STORAGE[:, 2:]
    assert overlaps([*halves, torch.zeros(6, 4), torch.zeros(0), torch.zeros(0)]) == []
    assert overlaps([STORAGE[3:], STORAGE[:3]]) == []
