"""What all tests share: properties are examined without a time limit, which a busy machine would miss."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("nightly", deadline=None, max_examples=100, print_blob=True)
settings.register_profile("change", settings.get_profile("nightly"), max_examples=25, derandomize=True)


def pytest_configure(config: pytest.Config) -> None:
    """A change is judged by the same examples each time, the night draws others."""
    settings.load_profile("change" if config.getoption("-m") == "not nightly" else "nightly")
