"""Lightning's EarlyStopping and ModelCheckpoint, whose states are values of the job.

Patience and the best files are kept in a process, which a job may replace. So the chief writes them to
`Session.state`, where a worker that begins finds them, and a worker that becomes the chief.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from elastic_ps.errors import UsageError
from elastic_ps.integrations.processes import leads
from elastic_ps.worker.session import Session

logger = logging.getLogger(__name__)

STOPPING, SAVING = "EarlyStopping", "ModelCheckpoint"

_PLAIN = (bool, int, float, str, dict, type(None))


class CallbackStates:
    """The states of a Trainer's callbacks. A Trainer without such callbacks reads and writes nothing.

    Attributes:
        kept: the callbacks.
    """

    def __init__(self, trainer: Any, session: Session) -> None:
        self._session, self._warned = session, False
        self.kept = [each for each in trainer.callbacks if leads() and {STOPPING, SAVING} & _kinds(each)]
        self._written = {_key(each): _plain(each) for each in self.kept}

    def load(self, *kinds: str) -> None:
        """Take over the job's states of these kinds of callbacks. Blocks."""
        wanted = [each for each in self.kept if {*kinds} & _kinds(each)]
        stored = dict(self._session.state) if wanted else {}
        for each in wanted:
            own, state = each.state_dict(), stored.get(_key(each))
            # With another folder, the files of the state are not this worker's: Lightning would warn.
            if state is None or state.get("dirpath") != own.get("dirpath"):
                continue
            each.load_state_dict({**own, **{name: _restored(value) for name, value in state.items()}})
            self._written[_key(each)] = _plain(each)

    def keep(self) -> None:
        """Write the states that have changed; for the chief. Blocks."""
        now = {_key(each): _plain(each) for each in self.kept}
        changed = {key: state for key, state in now.items() if state != self._written[key]}
        if not changed:
            return
        self._written = now
        try:
            self._session.state.update(changed)
        except UsageError as error:  # such as a list of files that is too long
            if not self._warned:
                logger.warning(
                    "workers that join later do not get the state of %s: %s", ", ".join(changed), error
                )
            self._warned = True


def act_where_saved(trainer: Any, saves: Callable[[], bool]) -> None:
    """Let each ModelCheckpoint look for files, and link them, on the worker that saves them.

    Lightning asks `is_global_zero` there. All processes of a worker call `saves`, which may block.
    """

    def as_seen(acts: bool) -> Any:
        return SimpleNamespace(is_global_zero=acts, strategy=trainer.strategy)

    for each in trainer.callbacks:
        if SAVING in _kinds(each):
            looks, links = each.file_exists, each._link_checkpoint  # noqa: SLF001 (no other way)
            each.file_exists = lambda path, _, looks=looks: looks(path, as_seen(saves()))
            # A new chief may lack the file, and then leaves the link as it is.
            each._link_checkpoint = lambda _, path, link, links=links: links(  # noqa: SLF001
                as_seen(saves() and Path(path).exists()), path, link
            )


def overwrite_config(trainer: Any) -> None:
    """Let LightningCLI write its file again: a worker that replaces another one finds that one's."""
    for each in trainer.callbacks:
        if "SaveConfigCallback" in _kinds(each):
            each.overwrite = True


def _kinds(callback: Any) -> set[str]:
    return {kind.__name__ for kind in type(callback).__mro__}  # of either package


def _key(callback: Any) -> str:
    return f"lightning {callback.state_key}"


def _plain(callback: Any) -> dict[str, Any]:
    """The part of a callback's state that JSON has, with numbers for tensors."""
    numbers = {name: _number(value) for name, value in callback.state_dict().items()}
    return {name: value for name, value in numbers.items() if isinstance(value, _PLAIN)}


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value)
    return {key: _number(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def _restored(value: Any) -> Any:
    """The value that `_number` was given. Every float was a tensor."""
    if isinstance(value, float):
        single = torch.tensor(value, dtype=torch.float32)
        return single if single.item() == value else torch.tensor(value, dtype=torch.float64)
    return {key: _restored(each) for key, each in value.items()} if isinstance(value, Mapping) else value
