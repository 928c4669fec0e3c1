"""Rows of the next batch, which are fetched while a step goes on.

They stay exact: the step that uses them asks for those that have changed since, and gets only these.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from elastic_ps.embedding.init import Ids
from elastic_ps.errors import ElasticPSError, UsageError


class Held(NamedTuple):
    """The rows in an answer of a shard.

    Attributes:
        ids: one or more, each once, ascending.
        values: of shape (ids, dim).
        life, version: those of the answer.
    """

    ids: Ids
    values: torch.Tensor
    life: int
    version: int

    def find(self, ids: Ids) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """Where each id is, and a mask of those that are."""
        places = np.searchsorted(self.ids, ids)
        return places, np.take(self.ids, places, mode="clip") == ids


Found: TypeAlias = Mapping[tuple[str, int], Held]
"""What was fetched, by the names of tables and the shards."""


class Ahead:
    """Fetches rows in a thread.

    Args:
        fetch: blocks until it has them.
        staleness: when the rows are used; 0, or 1: they are used as they are.
    """

    def __init__(self, fetch: Callable[[], Found], staleness: Callable[[], int]) -> None:
        self.staleness = staleness
        self._fetch, self._found = fetch, dict[tuple[str, int], Held]()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rows-ahead", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = dict(self._fetch())
        except BaseException as error:  # noqa: BLE001 - raised where the rows are used
            self._error = error

    def rows(self) -> Found:
        """What was fetched. Blocks until it is there.

        If a parameter server has not answered, or has refused, that is nothing: the step that needs the rows
        asks again, and learns why.
        """
        self._thread.join()
        if self._error is not None and not isinstance(self._error, ElasticPSError):
            raise self._error
        return self._found


class Prefetch:
    """What a script says about the rows of its batches; see `Session.loader`.

    Args:
        ids_of: the ids of a batch, by the names of tables.
        mode: that of the job's consistency at present.

    Raises:
        UsageError: the mode has no such staleness.
    """

    def __init__(
        self, ids_of: Callable[[Any], Mapping[str, Any]], staleness: int, mode: Callable[[], str]
    ) -> None:
        if staleness not in (0, 1) or (staleness and mode() != "async"):
            raise UsageError(
                f"prefetch_staleness is {staleness}, in mode {mode()}; expected 0, or 1 in mode async. In "
                "mode sync all rows are of the version that a step computes on"
            )
        self._ids_of, self._staleness, self._mode = ids_of, staleness, mode

    def staleness(self) -> int:
        """The staleness that the job's present mode allows."""
        return self._staleness if self._mode() == "async" else 0

    def batches(
        self, given: Iterable[Any], fetch: Callable[[Any, Callable[[], int]], object]
    ) -> Iterator[Any]:
        """Yield the same batches, and fetch the rows of the next one before."""
        batches, end = iter(given), object()
        fetch({}, self.staleness)  # what was fetched for a loop that was left may be of any version by now
        batch = next(batches, end)
        while batch is not end:
            following = next(batches, end)
            fetch({} if following is end else self._ids_of(following), self.staleness)
            yield batch
            batch = following


def no_rows(wanted: Mapping[str, Any], _: Callable[[], int]) -> None:
    """Raise UsageError if rows are wanted: there is no model with tables."""
    if wanted:
        raise UsageError(
            "session.loader was given prefetch, but the model has no tables that grow, or session.optimizer "
            "was not called yet"
        )
