"""How properties are tested: without a time limit for an example, which a busy machine would miss."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("unit", deadline=None, max_examples=50)
settings.load_profile("unit")
