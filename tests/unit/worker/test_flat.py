"""The flat memory of a model on the CPU."""

from __future__ import annotations

import torch

from elastic_ps.codec import as_bytes
from elastic_ps.core.partition import Rule, TensorSpec, partition
from elastic_ps.transport.memory import place_of
from elastic_ps.worker.flat import Flat


def test_first_values_are_sent_from_shared_memory_and_leave_no_gradient_there() -> None:
    trained = TensorSpec("w", (6,), "float32", Rule.GRADIENT, 0)
    constant = TensorSpec("c", (2,), "float32", Rule.CONSTANT, -1)
    values = [torch.arange(6.0), torch.ones(2)]
    layout = partition((trained, constant), bucket_bytes=1024, shards=1)
    flat = Flat(layout, values)
    for bucket in layout.buckets:
        sent = flat.first_values(bucket)
        assert sent == as_bytes(values[bucket.pieces[0].tensor].clone())
        assert (place_of(sent) is None) is (bucket.rule is Rule.CONSTANT)
    flat.clear_contribution(0)
    assert not flat.contribution(0).any()
    assert torch.equal(flat.value(0), torch.arange(6.0))
