"""The best metric and the patience of a Trainer, as values of the job.

They are kept in a process, which a job may replace. So the chief writes them to `Session.state`, where a
worker that begins finds them.
"""

from __future__ import annotations

from typing import Any

from transformers import EarlyStoppingCallback

from elastic_ps.worker.session import Session


class Best:
    """What a trainer knows of its best evaluation. Without `metric_for_best_model` it does nothing."""

    def __init__(self, trainer: Any, session: Session) -> None:
        self._trainer, self._session = trainer, session
        self._key = f"transformers best {trainer.args.metric_for_best_model}"

    @property
    def is_known(self) -> bool:
        """True once there is something to keep."""
        return self._trainer.state.best_metric is not None

    def keep(self) -> None:
        """Write it to the job; for the chief. Blocks."""
        state = self._trainer.state
        patience = [each.early_stopping_patience_counter for each in self._stopping]
        kept = {"metric": state.best_metric, "step": state.best_global_step, "patience": patience}
        self._session.state[self._key] = kept

    def take_over(self) -> None:
        """Go on with what the job has, if it has any. All processes of a worker call this. Blocks."""
        if self._trainer.args.metric_for_best_model is None:
            return
        kept = self._session.processes.decide(
            "the best metric", lambda: dict(self._session.state.get(self._key, {}))
        )
        if not kept:
            return
        state = self._trainer.state
        state.best_metric, state.best_global_step = kept["metric"], kept["step"]
        for callback, counter in zip(self._stopping, kept["patience"], strict=False):
            callback.early_stopping_patience_counter = counter

    @property
    def _stopping(self) -> list[EarlyStoppingCallback]:
        return [
            each
            for each in self._trainer.callback_handler.callbacks
            if isinstance(each, EarlyStoppingCallback)
        ]
