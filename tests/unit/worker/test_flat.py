"""The flat memory of a model on the CPU."""

from __future__ import annotations
