"""What tests of libraries share that keep the state of a process in classes: here workers are threads."""

from __future__ import annotations

import warnings

import pytest
from accelerate import state
from lightning_utilities.core.rank_zero import rank_zero_only

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".*deprecated - use", category=DeprecationWarning)
    import lightning.pytorch  # noqa: F401  it imports matplotlib, whose version 3.7 uses what pyparsing deprecates


@pytest.fixture(autouse=True)
def _state_of_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As accelerate does it itself where threads are its processes. Lightning keeps a rank, too."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for kind in (state.PartialState, state.AcceleratorState, state.GradientState):
        monkeypatch.setattr(kind, "_shared_state", state.ThreadLocalSharedDict())
    monkeypatch.setattr(rank_zero_only, "rank", 0)
