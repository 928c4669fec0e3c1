"""Models of the examples, as plain torch modules."""

from elastic_ps.models.lenet import LeNet, accuracy

__all__ = ["LeNet", "accuracy"]
