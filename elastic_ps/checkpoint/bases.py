"""Lets checkpoints of tables have only the rows that changed since an earlier checkpoint, their base.

Such a checkpoint has a hard link to the base's file. So each checkpoint directory has all that it needs, the
chain has two links at most, and what no checkpoint needs any more is deleted with the last directory.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from elastic_ps.checkpoint import files
from elastic_ps.checkpoint.manifest import BASE, ShardFile
from elastic_ps.checkpoint.store import Store

MOST_PLACES = 8


class Bases:
    """The base of a shard's next checkpoints in one term. `wrote` may run beside the others."""

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._base: tuple[int, ShardFile] | None = None
        self._places: list[Path] = []  # where it is, unless that was deleted

    @property
    def version(self) -> int | None:
        """The version of the base; None if there is none."""
        return None if (base := self._base) is None else base[0]

    def link(self, since: int | None, term: int, number: int, version: int) -> ShardFile | None:
        """Link the base, of version `since`, into a checkpoint that is written; see `Store.write_shard`.

        Returns:
            None if it is not the base any more, or cannot be linked: the file system has no links, or the
            checkpoints that had it are deleted.
        """
        if self._store is None or (base := self._base) is None or base[0] != since:
            return None
        linked = replace(base[1], file=f"{BASE}{base[1].file.partition('-')[2]}")
        target = self._store.partial(term, number, version) / linked.file
        for place in reversed(self._places):
            try:
                if place.lstat().st_size != linked.size:
                    continue
                files.make_directory(target.parent)
                with suppress(FileExistsError):  # it was ordered before
                    os.link(place, target, follow_symlinks=False)
                if not place.samefile(target):
                    continue
            except OSError:
                continue
            return linked
        return None

    def wrote(self, version: int, file: ShardFile, base: ShardFile | None) -> None:
        """Note what was written of a version. Without a base, it is one."""
        if self._store is None:
            return
        directory = self._store.path(version)
        if base is None:
            self._places = [directory / file.file]
            self._base = version, file
        else:
            self._places = [*self._places[1 - MOST_PLACES :], directory / base.file]
