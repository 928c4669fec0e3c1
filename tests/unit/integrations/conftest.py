"""What tests of libraries share that keep the state of a process in classes: here workers are threads."""

from __future__ import annotations

import pytest
from accelerate import state


@pytest.fixture(autouse=True)
def _state_of_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As accelerate does it itself where threads are its processes."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for kind in (state.PartialState, state.AcceleratorState, state.GradientState):
        monkeypatch.setattr(kind, "_shared_state", state.ThreadLocalSharedDict())
