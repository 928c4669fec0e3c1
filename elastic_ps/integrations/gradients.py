"""What scripts of other libraries do to gradients, of which the parameter server has those of all workers."""

from __future__ import annotations

from elastic_ps.worker.optimizer import ElasticOptimizer


def are_there(optimizer: ElasticOptimizer) -> bool:
    """Whether a parameter has a gradient. A GradScaler makes no step without one, and raises an error."""
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
