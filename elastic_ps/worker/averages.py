"""Warns of an average of the model that each worker makes for itself."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.swa_utils import AveragedModel

logger = logging.getLogger(__name__)

_APART = (
    "an AveragedModel was made that is no part of the job's model. It averages what this worker has, and a "
    "worker that joins later, or has no records in an epoch, has less. To average each epoch once, save it "
    "where session.is_chief is true, and average the files; to average each step, make it part of the model, "
    "and name it in session.optimizer(..., averaged=[...]): Averages of the model in docs/scripts.md"
)


class Averages:
    """Notes the `AveragedModel`s that the thread makes which made this.

    Args:
        over: whether all records are trained, so that each worker may average what it likes.
    """

    def __init__(self, over: Callable[[], bool]) -> None:
        self._over, self._thread = over, threading.get_ident()
        self._made = weakref.WeakSet[torch.nn.Module]()
        self._begun = False
        self.close = register_module_module_registration_hook(self._registered).remove

    def _registered(self, parent: torch.nn.Module, _name: str, _child: torch.nn.Module | None) -> None:
        if isinstance(parent, AveragedModel) and threading.get_ident() == self._thread:
            self._made.add(parent)
            self._look()

    def begin(self, model: torch.nn.Module) -> None:
        """The job trains this model. Those that are part of it are the job's."""
        self._made -= {*model.modules()}
        self._begun = True
        self._look()

    def _look(self) -> None:
        if self._begun and self._made and not self._over():
            logger.warning(_APART)
            self.close()
