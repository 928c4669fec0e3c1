"""What the benchmark on a device makes of a profiler's trace."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks import device


@pytest.mark.parametrize(
    ("copies", "kernels", "share"),
    [
        ([(0, 10)], [(0, 4), (2, 6)], 0.6),
        ([(0, 10), (20, 30)], [(5, 25)], 0.5),
        ([(5, 6)], [(0, 4), (7, 9)], 0.0),
        ([(1, 2), (3, 4)], [(0, 10), (1, 2)], 1.0),
    ],
)
def test_the_share_of_the_copies_that_is_under_kernels(
    copies: list[device.Span], kernels: list[device.Span], share: float
) -> None:
    assert device.under(copies, kernels) == pytest.approx(share)


def test_copies_to_the_host_are_told_from_others() -> None:
    """As torch's profiler names them."""
    trace: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M"},
        {"name": "Memcpy DtoH (Device -> Pinned)", "cat": "gpu_memcpy", "ts": 5.0, "dur": 2.0},
        {"name": "Memcpy HtoD (Pinned -> Device)", "cat": "gpu_memcpy", "ts": 9.0, "dur": 2.0},
        {"name": "gemm", "cat": "kernel", "ts": 4.0, "dur": 2.0},
        {"name": "aten::mm", "cat": "cpu_op", "ts": 1.0, "dur": 2.0},
    ]
    assert device.spans(trace) == ([(5.0, 7.0)], [(4.0, 6.0)])
    assert math.isnan(device.under([], [(0, 1)]))
