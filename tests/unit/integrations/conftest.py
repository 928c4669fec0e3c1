"""What tests of libraries share that keep the state of a process in classes: here workers are threads."""

from __future__ import annotations

import itertools
import signal
import warnings

import pytest
from lightning_utilities.core.rank_zero import rank_zero_only

from tests.testing.trainers import have_workers_as_threads

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".*deprecated - use", category=DeprecationWarning)
    import lightning.pytorch  # noqa: F401  it imports matplotlib, whose version 3.7 uses what pyparsing deprecates
    import pytorch_lightning  # noqa: F401

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]


@pytest.fixture(autouse=True)
def _state_of_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning keeps a rank, too."""
    have_workers_as_threads(monkeypatch)
    monkeypatch.setattr(rank_zero_only, "rank", 0)


@pytest.fixture(autouse=True)
def _is_no_rank_of_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning asks MPI, which then begins in this process, and leaves a file in shared memory."""
    for package in ("lightning.fabric", "lightning_fabric"):
        where = f"{package}.plugins.environments.MPIEnvironment.detect"
        monkeypatch.setattr(where, staticmethod(lambda: False))


@pytest.fixture(autouse=True)
def _crashes_leave_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's Trainer resets all signals in the end, those of `faulthandler`, too."""
    own = staticmethod(lambda: {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1})
    for package in PACKAGES:
        where = f"{package}.trainer.connectors.signal_connector._SignalConnector._valid_signals"
        monkeypatch.setattr(where, own)


@pytest.fixture
def workers_may_be_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning changes `DataLoader` itself while it asks for one, which is not for several threads."""
    for package, loop in itertools.product(PACKAGES, ["fit_loop", "evaluation_loop"]):
        where = f"{package}.loops.{loop}._request_dataloader"
        monkeypatch.setattr(where, lambda source: source.dataloader())
