"""Data sets of the examples, as map-style torch data sets."""

from elastic_ps.datasets.digits import digits

__all__ = ["digits"]
