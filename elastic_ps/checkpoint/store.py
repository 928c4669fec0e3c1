"""Writes, finds, verifies and prunes the checkpoints of a directory.

Shards write their files with `write_shard`, from their own processes; then shard 0 calls `commit`. One
process at a time commits and prunes. Nothing here is pickled.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from elastic_ps.checkpoint import files
from elastic_ps.checkpoint.manifest import LIMIT as MANIFEST_LIMIT
from elastic_ps.checkpoint.manifest import MANIFEST, MOST_TERMS, Manifest, ShardFile, is_count, parse
from elastic_ps.checkpoint.owner import Claim
from elastic_ps.checkpoint.tensors import Reader, write
from elastic_ps.codec.state import Stored
from elastic_ps.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointUnreadable,
    Fenced,
    NoCheckpoint,
    StorageUnavailable,
    UserError,
)

_NAME = re.compile(r"version-(\d{10})")
_BEFORE = re.compile(r"partial-\d+-\d+-(\d+)-before")
_PARTIAL = re.compile(r"partial-(\d+)-(\d+)-(\d{10})")
_CORRUPT = re.compile(r"corrupt-(\d{10})-\d+")

Check = Callable[[Reader], None]
"""A check that raises CheckpointCorrupt or CheckpointUnreadable if a checkpoint cannot be used."""


class Store:
    """The checkpoints of a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._claim: Claim | None = None
        self._identity: str | None = None  # the identity of the directory in which the term began

    def claim(self, job: str, run: str, *, adopt: bool = False, wait: bool = False) -> None:
        """Make a run of a job the owner of the directory until `close`; see `Claim.take`.

        Raises:
            InvalidJob: it belongs to another job, or to another run that goes on.
            StorageUnavailable: an earlier run of the job has not ended yet, or the disk does not allow it.
        """
        claim = Claim(self.directory, job, run)
        try:
            with self._locked():
                claim.take(adopt=adopt, wait=wait, make_room=self._discard_partial)
        except OSError as error:
            raise files.failure(error, f"cannot write into {self.directory}") from error
        self._claim = claim

    def close(self) -> None:
        """Let other jobs have the directory."""
        if self._claim is not None:
            self._claim.close()

    def _names(self) -> list[str]:
        """The names in the directory. Raises StorageUnavailable if it cannot be read at the moment."""
        try:
            return [path.name for path in self.directory.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise files.failure(error, f"cannot look into {self.directory}") from error

    def versions(self) -> list[int]:
        """The versions in the directory, oldest first. They are not verified.

        Raises:
            StorageUnavailable: the directory cannot be read at the moment.
        """
        return sorted(int(match[1]) for name in self._names() if (match := _NAME.fullmatch(name)))

    def chosen(self, version: int | None) -> list[int]:
        """This version alone, or all for None. Raises UserError if there is none, and like `versions`."""
        versions = self.versions()
        if not versions or (version is not None and version not in versions):
            which = "no checkpoint" if version is None else f"no checkpoint of version {version}"
            known = f"; it has {', '.join(map(str, versions))}" if versions else ""
            raise UserError(f"{self.directory} has {which} (a directory version-*){known}")
        return versions if version is None else [version]

    def path(self, version: int) -> Path:
        """The directory of a complete checkpoint."""
        return self.directory / f"version-{version:010d}"

    def partial(self, term: int, number: int, version: int) -> Path:
        """The directory of a checkpoint that is being written."""
        return self.directory / f"partial-{term}-{number}-{version:010d}"

    def write_shard(
        self,
        term: int,
        version: int,
        shard: int,
        shards: int,
        tensors: Iterator[Stored],
        *,
        number: int = 0,
        described: Sequence[Stored] | None = None,
    ) -> ShardFile:
        """Write and flush a shard's file. Blocks for the disk.

        Args:
            number: a number of the checkpoint, unique within the term.
            described: see `tensors.write`; None: all of `tensors` may be in memory at the same time.

        Raises:
            StorageUnavailable: the disk is full, read-only, or failing.
            CheckpointError: the directory cannot be used at all.
        """
        name = f"shard-{shard}-of-{shards}.safetensors"
        directory = self.partial(term, number, version)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for left in self._partials_before(term, number, version):
                if files.is_directory(left):
                    (left / name).unlink(missing_ok=True)  # the file of a checkpoint that was given up
            files.make_directory(directory)
            if described is None:
                described = kept = list(tensors)
                tensors = iter(kept)
            return write(directory / name, described, tensors)
        except OSError as error:
            files.remove(directory)  # otherwise it keeps the disk full
            raise files.failure(error, f"cannot write {name} of version {version}") from error

    def commit(self, manifest: Manifest, *, keep: int, held: Collection[int] = ()) -> Path:
        """Complete a checkpoint from the written files. Then delete all but the newest `keep`, if possible.

        Args:
            held: versions that must not be deleted either.

        Raises:
            StorageUnavailable: the disk is full, read-only, or failing. Older checkpoints are unchanged.
            CheckpointError: a file of the manifest is missing. Older checkpoints are unchanged.
            Fenced: another parameter server has taken over.
        """
        partial = self.partial(manifest.term, manifest.number, manifest.version)
        try:
            with self._locked():
                self.require_term(manifest.term)
                if self._claim is not None:
                    self._claim.hold()
                self._finish(manifest, partial)
                self._prune(manifest, keep, held)
        except OSError as error:
            files.remove(partial)
            raise files.failure(
                error, f"cannot finish the checkpoint of version {manifest.version}"
            ) from error
        return self.path(manifest.version)

    def amend(self, version: int, *, term: int, state: dict[str, Any]) -> None:
        """Replace the manifest of a complete checkpoint, in `term`. Blocks for the disk.

        Raises:
            StorageUnavailable, CheckpointCorrupt, Fenced: see `commit`. The checkpoint is unchanged.
        """
        try:
            with self._locked():
                self.require_term(term)
                if self._claim is not None:
                    self._claim.hold()
                manifest = replace(self.describe(version), term=term, state=state)
                files.write_text(self.path(version) / MANIFEST, manifest.to_text())
        except OSError as error:
            raise files.failure(error, f"cannot amend the checkpoint of version {version}") from error

    def write_beside(self, name: str, text: str, *, term: int) -> None:
        """Write and flush a small file beside the checkpoints, in `term`. Blocks for the disk.

        Raises:
            StorageUnavailable, CheckpointError, Fenced: see `commit`. The file is unchanged.
        """
        try:
            with self._locked():
                self.require_term(term)
                files.write_text(self.directory / name, text)
        except OSError as error:
            raise files.failure(error, f"cannot write {self.directory / name}") from error

    def _finish(self, manifest: Manifest, partial: Path) -> None:
        final = self.path(manifest.version)
        files.make_directory(partial)
        for file in manifest.files:
            # Check again: the shard may have been given up and its file deleted since.
            if (partial / file.file).lstat().st_size != file.size:
                raise CheckpointError(f"{partial / file.file} does not have {file.size} bytes")
        path = partial / MANIFEST
        with files.create(path) as opened:
            opened.write(manifest.to_text().encode())
        files.flush(path)
        files.flush(partial)
        before = partial.with_name(f"{partial.name}-before")
        with suppress(FileNotFoundError):
            final.rename(before)  # a kill while it is removed would leave no whole one
        try:
            partial.rename(final)
        except OSError:
            self._put_back(before)
            raise
        files.flush(self.directory)
        files.remove(before)

    def _prune(self, manifest: Manifest, keep: int, held: Collection[int]) -> None:
        """Delete what a new checkpoint makes superfluous, as far as possible."""
        with suppress(CheckpointError):
            for version in self.versions()[:-keep]:
                if version not in held:
                    files.remove(self.path(version))
            for path in self._partials_before(manifest.term, manifest.number, manifest.version):
                files.remove(path)

    def _partials_before(self, term: int, number: int, version: int) -> list[Path]:
        """The remains of earlier writes; only one checkpoint is written at a time."""
        return [
            self.directory / name
            for name in self._names()
            if (match := _PARTIAL.fullmatch(name))
            and (int(match[1]), int(match[2]), int(match[3])) < (term, number, version)
        ]

    def discard_partial(self) -> None:
        """Delete the remains of interrupted writes, as far as possible. The caller owns the directory."""
        with suppress(CheckpointError, OSError), self._locked():
            self._discard_partial()

    def _discard_partial(self) -> None:
        with suppress(CheckpointError):
            for name in self._names():
                if name.startswith("partial-"):
                    self._put_back(self.directory / name)
                    files.remove(self.directory / name)

    def _put_back(self, path: Path) -> None:
        """Give a checkpoint its name again, if it was renamed for a new one that did not come."""
        if before := _BEFORE.fullmatch(path.name):
            with suppress(OSError):  # the new one has come, or there was no old one
                path.rename(self.path(int(before[1])))

    def describe(self, version: int) -> Manifest:
        """Read a checkpoint's manifest, without checking the other files.

        Raises:
            CheckpointCorrupt: it is missing or invalid.
            StorageUnavailable: it cannot be read at the moment.
        """
        directory = self.path(version)
        with files.reading(directory):
            if directory.is_symlink():
                raise CheckpointCorrupt(
                    f"{directory} is a symbolic link, which is not followed; copy the checkpoint instead"
                )
        path = directory / MANIFEST
        manifest = parse(files.read_text(path, limit=MANIFEST_LIMIT), where=str(path))
        if manifest.version != version:
            raise CheckpointCorrupt(f"{directory} holds version {manifest.version}")
        return manifest

    def open(self, version: int) -> Reader:
        """Open a checkpoint, to read tensors. Raises CheckpointCorrupt and StorageUnavailable."""
        return Reader(self.path(version), self.describe(version))

    def open_whole(self, version: int, check: Check = lambda _: None) -> Reader:
        """`open` a checkpoint after verifying all its files. Blocks for reading them.

        Raises:
            CheckpointCorrupt: a file is missing, differs from the manifest, or does not pass `check`.
            StorageUnavailable: they cannot be read at the moment.
        """
        reader = self.open(version)
        try:
            reader.verify()
            check(reader)
        except BaseException:
            reader.close()
            raise
        return reader

    def manifest(self, version: int) -> Manifest:
        """The manifest of a checkpoint after verifying its files. Blocks and raises like `open_whole`."""
        with self.open_whole(version) as reader:
            return reader.manifest

    def newest(self, check: Check = lambda _: None) -> tuple[Manifest, list[str]]:
        """The newest complete checkpoint, and the problems with it or with newer ones, in words.

        A broken checkpoint is renamed to `corrupt-...`, so that it is kept but not read again.

        Args:
            check: see `open_whole`.

        Raises:
            NoCheckpoint: there is none, and there has been none.
            CheckpointCorrupt: all checkpoints are broken; the message names them.
            CheckpointUnreadable: the newest complete one has another format. It stays in place.
            StorageUnavailable: one cannot be read, or a broken one not be renamed, at the moment.
        """
        problems: list[str] = []
        for version in reversed(self.versions()):
            try:
                with self.open_whole(version, check) as reader:
                    return reader.manifest, [*problems, *_warnings(reader)]
            except CheckpointUnreadable:
                raise
            except CheckpointCorrupt as error:
                aside = self._set_aside(version)
                problems.append(f"{self.path(version)} is broken and was set aside as {aside.name}: {error}")
        broken = sorted(name for name in self._names() if _CORRUPT.fullmatch(name))
        if problems or broken:
            raise CheckpointCorrupt(
                f"all checkpoints in {self.directory} are broken: {'; '.join(problems or broken)}. Put a "
                "complete one there, or name an empty directory to start from scratch"
            )
        raise NoCheckpoint(f"no complete checkpoint in {self.directory}")

    def require_version(self, version: int) -> None:
        """Raise StorageUnavailable unless the directory has, or has had, a checkpoint as new as `version`.

        For a caller that knows that `version` was on disk: the volume may be away, or replaced by an older
        copy. A broken checkpoint that was set aside counts, since the job continues from an earlier one.
        """
        names = self._names()
        found = [
            int(match[1]) for name in names if (match := _NAME.fullmatch(name) or _CORRUPT.fullmatch(name))
        ]
        if max(found, default=-1) < version:
            newest = f"the newest one there is of version {max(found)}" if found else "there is none"
            raise StorageUnavailable(
                f"the checkpoint of version {version} has disappeared from {self.directory}, where {newest}: "
                "the volume may be unmounted, or replaced by an older copy. Mount it again, or stop the job"
            )

    def written(self, version: int) -> float:
        """When the checkpoint of a version was completed (Unix time). Raises CheckpointError."""
        try:
            return self.path(version).lstat().st_mtime
        except OSError as error:
            raise files.failure(error, f"cannot look at {self.path(version)}") from error

    def _set_aside(self, version: int) -> Path:
        names = (self.directory / f"corrupt-{version:010d}-{number}" for number in itertools.count(1))
        aside = next(name for name in names if not os.path.lexists(name))
        try:
            return self.path(version).rename(aside)
        except OSError as error:
            raise StorageUnavailable(f"cannot set {self.path(version)} aside: {error}") from error

    # --- terms

    @cached_property
    def _term_file(self) -> Path:
        return self.directory / "term.json"

    @cached_property
    def _looked(self) -> files.Looked:
        return files.Looked(self._term_file, limit=4096)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock under which terms change and checkpoints are completed."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with files.locked(self.directory / "lock"):
            yield

    def _begun(self) -> tuple[int, str]:
        """The present term, 0 if there was none, and the directory's identity, "" if it has none yet.

        Raises:
            StorageUnavailable: it cannot be read at the moment.
            CheckpointError: it is broken. It is not read as 0, since an earlier parameter server could then
                pass for the present one.
        """
        try:
            text = self._looked.text()
            if text is None:
                return 0, ""
            found = json.loads(text)
            term, identity = found["term"], found.get("identity", "")
            if not is_count(term, below=MOST_TERMS - 1) or not isinstance(identity, str):
                raise TypeError(f"the term is {term!r}, and the identity {identity!r}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, CheckpointCorrupt) as error:
            raise CheckpointError(
                f"{self._term_file}, which holds the term, cannot be read: "
                f'{error!r}. If its content is broken, write {{"term": N}} into it, where N is larger than '
                "any term in the logs"
            ) from error
        return int(term), identity

    def next_term(self, *, after: int | None = None, above: int = 0) -> int:
        """Begin a new term, durably. This fences the parameter server of the previous term.

        From then on this store writes only to this directory, which has a random identity: another directory
        may get its name, such as a volume that was away when a parameter server started.

        Args:
            after: the caller's term, if it has one: only the parameter server of the present term may begin
                another one.
            above: the new term is also greater than this.

        Raises:
            Fenced: another parameter server has begun a term since `after`.
            StorageUnavailable: the term cannot be read or written at the moment.
            CheckpointError: it is broken, or cannot be written at all.
        """
        try:
            with self._locked():
                if after is not None:
                    self.require_term(after)
                before, identity = self._begun()
                term, identity = max(before, above) + 1, identity or uuid.uuid4().hex
                files.write_text(self._term_file, json.dumps({"term": term, "identity": identity}))
                self._identity = identity
        except OSError as error:
            raise files.failure(error, f"cannot write {self._term_file}") from error
        return term

    def require_term(self, term: int) -> None:
        """Raise Fenced if the parameter server has restarted since `term`; otherwise like `_begun`.

        Terms only grow, so an earlier one, or none, raises StorageUnavailable: the volume may be away. So
        does another directory than the one in which this store has begun its term.
        """
        current, identity = self._begun()
        if current and self._identity not in (None, identity):
            raise StorageUnavailable(
                f"{self.directory} is not the directory in which term {term} has begun: since then, a volume "
                "was mounted there, or replaced. Nothing is written into it. Stop the job, and "
                "continue from the checkpoints that you want to keep"
            )
        if current < term:
            raise StorageUnavailable(
                f"{self._term_file} says that {current} is the last term, but term {term} has begun: the "
                "volume may be unmounted, or replaced by an older copy. Mount it again, or stop the job"
            )
        if current != term:
            raise Fenced(
                f"term {current} has taken over, so a parameter server of term {term} must not write"
            )


def _warnings(reader: Reader) -> Iterator[str]:
    """The warnings about a usable checkpoint: its model may hold NaN or Inf."""
    found = reader.not_finite()
    if found:
        named = ", ".join(f"{count} of {name}" for name, count in list(found.items())[:5])
        more = f" and {len(found) - 5} more tensors" if len(found) > 5 else ""
        yield (
            f"the checkpoint of version {reader.manifest.version} holds NaN or Inf: {named}{more}. It is "
            "used as it is; if training has diverged, continue from an earlier one"
        )
