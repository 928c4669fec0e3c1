"""What all tests share: the tiers, and properties without a time limit, which a busy machine would miss."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest
import torch
from hypothesis import settings

from elastic_ps.process.lifecycle import importing
from tests.testing.jitter import Jitter
from tests.testing.tiers import mark_nightly

settings.register_profile("nightly", deadline=None, max_examples=200, print_blob=True)
settings.register_profile("change", settings.get_profile("nightly"), max_examples=25, derandomize=True)


def pytest_configure(config: pytest.Config) -> None:
    """A change is judged by the same examples each time, the night draws others.

    Tests run in several processes. Threads of torch that have no core would wait for each other, spinning.
    """
    torch.set_num_threads(1)
    settings.load_profile("change" if config.getoption("-m") == "not nightly" else "nightly")
    if "ELASTIC_PS_JITTER" in os.environ:
        config.pluginmanager.register(Jitter(os.environ["ELASTIC_PS_JITTER"]))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a failure at once: the summary comes an hour later, or never if the run is ended."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid}", flush=True)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """Say how a process of pytest-xdist died: with a signal it writes nothing itself."""
    if error is not None:
        print(f"\n{node.gateway.id} ended with status {node.gateway._io.popen.wait(60)}", flush=True)  # noqa: SLF001


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    with importing():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before tests are chosen by their marks."""
    mark_nightly(items)
