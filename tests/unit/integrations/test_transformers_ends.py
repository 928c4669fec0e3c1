"""How a Trainer's training ends in a job, and where it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from elastic_ps.integrations.transformers import prepare_trainer
from elastic_ps.worker.session import Session
from tests.testing.harness import running_job
from tests.testing.trainers import BATCH, EPOCHS, IN_ORDER, RECORDS, make


@pytest.mark.parametrize("steps", [1, 2], ids=["after a step", "within a step"])
def test_a_callback_that_leaves_the_last_epoch_ends_the_training(tmp_path: Path, steps: int) -> None:
    class Leaving(TrainerCallback):  # type: ignore[misc]
        """Leaves each epoch after two batches or more."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_epoch_stop |= steps == 1 and state.epoch % 1 > BATCH / RECORDS

        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_epoch_stop |= state.epoch % 1 > 0

    options: dict[str, Any] = {"gradient_accumulation_steps": steps, "eval_strategy": "no"}

    def script(session: Session) -> None:
        trainer = make(tmp_path / "out", given={"callbacks": [Leaving()]}, **options)
        prepare_trainer(trainer, session=session).train()
        assert trainer.state.epoch == EPOCHS
        trainer.save_model()

    with running_job(tmp_path / "job", data=IN_ORDER) as job:
        job.run(script, workers=1)
        assert job.status().progress.stopped == "a callback of the Trainer has left the last epoch"
    assert (tmp_path / "out" / "model.safetensors").exists()
