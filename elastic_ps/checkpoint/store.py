"""Writing, finding, verifying and pruning the checkpoints of a directory.

Shards write their files with `write_shard`, from their own processes; then shard 0 calls `commit`. One
process at a time commits and prunes. Nothing here is pickled.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from elastic_ps.errors import CheckpointCorrupt, CheckpointError, Fenced, NoCheckpoint, StorageUnavailable

NEVER = frozenset({errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG})
"""Errors that say what there is, and not that the storage fails: to wait for their end would be no use."""

FORMAT = 2
MANIFEST = "manifest.json"
_NAME = re.compile(r"version-(\d{10})")
_PARTIAL = re.compile(r"partial-(\d+)-(\d{10})")


@dataclass(frozen=True)
class ShardFile:
    """A shard's part of a checkpoint: file name, SHA-256 in hexadecimal, size in bytes."""

    file: str
    sha256: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint is, besides the tensors.

    Attributes:
        job: the job's name.
        version: optimizer steps taken.
        term: of the parameter server that wrote it.
        tensors: the model's tensors, as plain data, in order of registration.
        optimizer: name of the optimizer's class.
        state: the coordinator's state at this version: ledger, members, seen steps, settings, metrics.
        files: one for each shard.
    """

    job: str
    version: int
    term: int
    tensors: list[dict[str, Any]]
    optimizer: str
    state: dict[str, Any]
    files: list[ShardFile] = field(default_factory=list)
    format: int = FORMAT


@dataclass(frozen=True)
class Stored:
    """One tensor in a checkpoint: elements from `start` on of the model's tensor number `tensor`.

    `key` is "value" or the name of an entry of the optimizer's state; a `scalar` counts for all elements.
    """

    tensor: int
    start: int
    key: str
    value: torch.Tensor
    scalar: bool = False

    @property
    def name(self) -> str:
        return f"{self.tensor}/{self.start}/{self.key}/{'scalar' if self.scalar else 'elements'}"


class Store:
    """The checkpoints of a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def versions(self) -> list[int]:
        """The versions that have a directory with a manifest, oldest first. They are not verified."""
        if not self.directory.is_dir():
            return []
        matches = (_NAME.fullmatch(p.name) for p in self.directory.iterdir() if (p / MANIFEST).is_file())
        return sorted(int(match[1]) for match in matches if match)

    def path(self, version: int) -> Path:
        """The directory of a whole checkpoint."""
        return self.directory / f"version-{version:010d}"

    def _partial(self, term: int, version: int) -> Path:
        return self.directory / f"partial-{term}-{version:010d}"

    def write_shard(
        self, term: int, version: int, shard: int, shards: int, tensors: Iterator[Stored]
    ) -> ShardFile:
        """Write and flush a shard's file. Blocks for the disk.

        Raises:
            CheckpointError: the disk is full, read-only, or failing.
        """
        name = f"shard-{shard}-of-{shards}.safetensors"
        try:
            directory = self._partial(term, version)
            for left in self._partials_before(term, version + 1):
                (left / name).unlink(missing_ok=True)  # of a checkpoint that was given up
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / name
            safetensors.torch.save_file({t.name: t.value for t in tensors}, path)
            _flush(path)
            return ShardFile(name, _digest(path), path.stat().st_size)
        except (OSError, safetensors.SafetensorError) as error:
            shutil.rmtree(self._partial(term, version), ignore_errors=True)  # else it keeps the disk full
            if isinstance(error, OSError):
                raise _failure(error, f"cannot write {name} of version {version}") from error
            raise StorageUnavailable(f"cannot write {name} of version {version}: {error}") from error

    def commit(self, manifest: Manifest, *, keep: int) -> Path:
        """Make a checkpoint of the files written; then delete all but the newest `keep`, as far as possible.

        Raises:
            CheckpointError: the disk is full, read-only, or failing; the older checkpoints are untouched.
            Fenced: another parameter server has taken over.
        """
        try:
            with self._locked():
                self.require_term(manifest.term)
                self._finish(manifest)
                self._prune(manifest, keep)
        except OSError as error:
            shutil.rmtree(self._partial(manifest.term, manifest.version), ignore_errors=True)
            raise _failure(error, f"cannot finish the checkpoint of version {manifest.version}") from error
        return self.path(manifest.version)

    def _finish(self, manifest: Manifest) -> None:
        partial, final = self._partial(manifest.term, manifest.version), self.path(manifest.version)
        path = partial / MANIFEST
        path.write_text(_sealed(asdict(manifest)))
        _flush(path)
        _flush(partial)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        _flush(self.directory)

    def _prune(self, manifest: Manifest, keep: int) -> None:
        """Delete what is not needed besides a new checkpoint; what cannot be deleted is left."""
        for version in self.versions()[:-keep]:
            shutil.rmtree(self.path(version), ignore_errors=True)
        for path in self._partials_before(manifest.term, manifest.version):
            shutil.rmtree(path, ignore_errors=True)

    def _partials_before(self, term: int, version: int) -> list[Path]:
        """What was left by writes of earlier versions or terms; one checkpoint is written at a time."""
        found = ((_PARTIAL.fullmatch(path.name), path) for path in self.directory.glob("partial-*"))
        return [p for match, p in found if match and (int(match[1]), int(match[2])) < (term, version)]

    def discard_partial(self) -> None:
        """Delete what an interrupted write left behind."""
        for path in self.directory.glob("partial-*"):
            shutil.rmtree(path, ignore_errors=True)

    def manifest(self, version: int) -> Manifest:
        """Read a checkpoint's manifest and verify all its files. Blocks for reading them.

        Raises:
            CheckpointCorrupt: a file is missing or is not what the manifest says.
        """
        directory = self.path(version)
        try:
            text = (directory / MANIFEST).read_text()
            data = json.loads(text)
            del data["sha256"]
            if _sealed(data) != text:
                raise CheckpointCorrupt(f"{directory / MANIFEST} is not what was written (SHA-256 differs)")
            if data["format"] != FORMAT:
                raise CheckpointCorrupt(f"{directory}: format {data['format']}, this program reads {FORMAT}")
            manifest = Manifest(**{**data, "files": [ShardFile(**f) for f in data["files"]]})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointCorrupt(f"{directory / MANIFEST} cannot be read: {error!r}") from error
        if manifest.version != version:
            raise CheckpointCorrupt(f"{directory} holds version {manifest.version}")
        for file in manifest.files:
            path = directory / file.file
            try:
                same = path.stat().st_size == file.size and _digest(path) == file.sha256
            except OSError as error:
                raise CheckpointCorrupt(f"{path} cannot be read: {error}") from error
            if not same:
                raise CheckpointCorrupt(f"{path} is not the file that was written (size or SHA-256 differ)")
        return manifest

    def newest(self) -> tuple[Manifest, list[str]]:
        """The newest whole checkpoint, and a message for each broken one that was set aside.

        A broken checkpoint is renamed to `corrupt-...`, so that it is kept but not looked at again.

        Raises:
            CheckpointError: a broken one cannot be renamed.
            NoCheckpoint: there is none; the message says which broken ones there were.
        """
        problems: list[str] = []
        for version in reversed(self.versions()):
            try:
                return self.manifest(version), problems
            except CheckpointCorrupt as error:
                problems.append(str(error))
                self._set_aside(version)
        detail = f" ({'; '.join(problems)})" if problems else ""
        raise NoCheckpoint(f"no whole checkpoint in {self.directory}{detail}")

    def written(self, version: int) -> float:
        """When the checkpoint of a version was made whole (Unix time). Raises CheckpointError."""
        try:
            return self.path(version).stat().st_mtime
        except OSError as error:
            raise _failure(error, f"cannot look at {self.path(version)}") from error

    def _set_aside(self, version: int) -> None:
        names = (self.directory / f"corrupt-{version:010d}-{number}" for number in itertools.count(1))
        try:
            self.path(version).rename(next(name for name in names if not name.exists()))
        except OSError as error:
            raise _failure(error, f"cannot set {self.path(version)} aside") from error

    def read(self, manifest: Manifest) -> Iterator[Stored]:
        """All tensors of a checkpoint, from the files of all shards."""
        for file in manifest.files:
            path = self.path(manifest.version) / file.file
            with safetensors.safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    tensor, start, key, kind = name.split("/")
                    yield Stored(int(tensor), int(start), key, opened.get_tensor(name), kind == "scalar")

    # --- terms

    @property
    def _term_file(self) -> Path:
        return self.directory / "term.json"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Nobody else changes the term or finishes a checkpoint meanwhile."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def term(self) -> int:
        """The number of the last start of the parameter server; 0 if there was none.

        Raises:
            CheckpointError: it cannot be read. It is not taken for 0: an earlier parameter server could then
                pass for the present one.
        """
        try:
            term = json.loads(self._term_file.read_text())["term"]
            if not isinstance(term, int):
                raise TypeError(f"the term is {term!r}")
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise _failure(error, f"cannot read {self._term_file}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self._term_file}, which counts the starts of the parameter server, cannot be read: "
                f"{error!r}. If its content is broken, put a larger number there than any term in the logs"
            ) from error
        return term

    def next_term(self, *, after: int | None = None) -> int:
        """Begin a new term, durably. The parameter server of the one before is fenced from now on.

        Args:
            after: the term that the caller has, if it has one: only the parameter server of the present term
                may go on with another.

        Raises:
            Fenced: another parameter server has begun a term since `after`.
            CheckpointError: the term cannot be read or written.
        """
        try:
            with self._locked():
                if after is not None:
                    self.require_term(after)
                term = self.term() + 1
                temporary = self._term_file.with_suffix(".partial")
                temporary.write_text(json.dumps({"term": term}))
                _flush(temporary)
                temporary.rename(self._term_file)
                _flush(self.directory)
        except OSError as error:
            raise _failure(error, f"cannot write {self._term_file}") from error
        return term

    def require_term(self, term: int) -> None:
        """Raise Fenced if the parameter server was started again since `term`. Else as `term()`."""
        current = self.term()
        if current != term:
            raise Fenced(f"term {current} has taken over from term {term}, which may write nothing any more")


def _failure(error: OSError, text: str) -> CheckpointError:
    """What has failed, as an exception that says whether trying again may help."""
    return (CheckpointError if error.errno in NEVER else StorageUnavailable)(f"{text}: {error}")


class Assembled:
    """A checkpoint's tensors put together again, whatever cut they were stored in.

    Raises:
        CheckpointCorrupt: elements of a tensor are missing.
    """

    def __init__(self, elements: Mapping[int, int], stored: Iterator[Stored]) -> None:
        self._full: dict[tuple[int, str], torch.Tensor] = {}
        self._scalars: dict[tuple[int, str], torch.Tensor] = {}
        self._found: Counter[tuple[int, str]] = Counter()
        for item in stored:
            place = (item.tensor, item.key)
            if item.scalar:
                self._scalars[place] = item.value
                continue
            if place not in self._full:
                self._full[place] = torch.empty(elements[item.tensor], dtype=item.value.dtype)
            self._full[place][item.start : item.start + item.value.numel()] = item.value
            self._found[place] += item.value.numel()
        for (tensor, key), count in self._found.items():
            if count != elements[tensor]:
                raise CheckpointCorrupt(
                    f"the checkpoint holds {count} of {elements[tensor]} elements of tensor {tensor}, {key}"
                )

    def value(self, tensor: int, start: int, length: int) -> torch.Tensor:
        """Raises CheckpointCorrupt if the checkpoint does not hold the tensor."""
        try:
            return self._full[tensor, "value"][start : start + length]
        except KeyError:
            raise CheckpointCorrupt(f"the checkpoint holds no values for tensor {tensor}") from None

    def state(self, tensor: int, start: int, length: int) -> dict[str, torch.Tensor]:
        """The optimizer's state of a piece, by key; {} if there was none."""
        pieces = {k: v[start : start + length].clone() for (t, k), v in self._full.items() if t == tensor}
        pieces.pop("value", None)
        scalars = {k: v.reshape(()).clone() for (t, k), v in self._scalars.items() if t == tensor}
        return pieces | scalars


def _sealed(manifest: Mapping[str, Any]) -> str:
    """A manifest as text, with the digest of everything else in it; no character of it can change."""
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps({**manifest, "sha256": digest}, indent=1)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
