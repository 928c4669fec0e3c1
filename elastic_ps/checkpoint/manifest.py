"""A checkpoint's manifest: everything but the tensors, as text that is checked completely.

A manifest has a digest of itself, which reveals damage but not malice: whoever writes a manifest can write
the digest. So names of files, sizes and counts are checked as well.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from elastic_ps.core.partition import ITEM_SIZE, Rule, TensorSpec, divided
from elastic_ps.errors import CheckpointCorrupt, CheckpointUnreadable

FORMAT = 2
MANIFEST = "manifest.json"

LIMIT = 1 << 28
"""The largest manifest, in bytes."""

MOST_TERMS = 1 << 31
"""The limit of terms: an incarnation has the term in its upper bits, and 63 bits in all."""

MOST_VERSIONS = 10**10
"""The limit of versions, since a directory's name has ten digits."""

MOST_ELEMENTS = 1 << 48
BASE = "base-"
"""The names of files begin so that have the rows of an earlier checkpoint, and other tensors of no use."""

_FILE = re.compile(r"(?:shard|base)-\d{1,6}-of-\d{1,6}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ShardFile:
    """A shard's part of a checkpoint: file name, SHA-256 in hexadecimal, size in bytes."""

    file: str
    sha256: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a checkpoint, without the tensors.

    Attributes:
        job: the job's name.
        version: the number of optimizer steps.
        term: the term of the parameter server that wrote it.
        number: a number of the checkpoint, unique within the term.
        tensors: the model's tensors, as plain data, in order of registration; see `every`.
        optimizer: name of the optimizer's class.
        state: the coordinator's state at this version: ledger, members, seen steps, settings, metrics.
        files: the file of each shard, and the base of those that have only the changes of rows since.
    """

    job: str
    version: int
    term: int
    tensors: list[dict[str, Any]]
    optimizer: str
    state: dict[str, Any]
    files: list[ShardFile] = field(default_factory=list)
    number: int = 0
    format: int = FORMAT

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors that the checkpoint has."""
        return self._divided[0]

    @property
    def base(self) -> tuple[TensorSpec, ...]:
        """The tensors that it lacks, because each worker has them."""
        return self._divided[1]

    @cached_property
    def _divided(self) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        return divided(self.every)

    @cached_property
    def every(self) -> tuple[TensorSpec, ...]:
        """The model's tensors."""
        return tuple(
            TensorSpec(
                name=t["name"],
                shape=tuple(t["shape"]),
                dtype=t["dtype"],
                rule=Rule(t["rule"]),
                group=t["group"],
                aliases=tuple(t["aliases"]),
                frozen=t["frozen"],
                sparse=t["sparse"],
                content=t["content"],
            )
            for t in self.tensors
        )

    def to_text(self) -> str:
        """Write as JSON, with a digest of everything else."""
        return _sealed(asdict(self))


def _sealed(manifest: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps({**manifest, "sha256": digest}, indent=1)


def parse(text: str, *, where: str) -> Manifest:
    """Read the output of `to_text`. `where` begins the messages of errors.

    Raises:
        CheckpointCorrupt: it is damaged, or its values are impossible.
        CheckpointUnreadable: it has another format.
    """
    try:
        data = json.loads(text)
        del data["sha256"]
        if _sealed(data) != text:
            raise CheckpointCorrupt(f"{where} has been changed since it was written (its SHA-256 differs)")
        if data["format"] != FORMAT:
            raise CheckpointUnreadable(
                f"{where} has format {data['format']}, but this version of elastic-ps reads format {FORMAT}"
            )
        manifest = Manifest(**{**data, "files": [ShardFile(**f) for f in data["files"]]})
        for wrong in _faults(manifest):
            raise CheckpointCorrupt(f"{where}: {wrong}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupt(f"{where} cannot be read: {error!r}") from error
    return manifest


def _faults(manifest: Manifest) -> Iterator[str]:
    """The impossible values, in words."""
    for name, value, most in (
        ("version", manifest.version, MOST_VERSIONS),
        ("term", manifest.term, MOST_TERMS),
        ("number", manifest.number, 1 << 63),
    ):
        if not is_count(value, below=most):
            yield f"{name} {value!r} is not a whole number from 0 to {most - 1}"
    for name, text in (("job", manifest.job), ("optimizer", manifest.optimizer)):
        if not isinstance(text, str):
            yield f"{name} {text!r} is not a string"
    if not isinstance(manifest.state, dict):
        yield "state is not an object"
    yield from (f"it holds the number {n}" for n in _numbers(manifest.state) if abs(n) >= 1 << 63)
    yield from _faults_of_files(manifest.files)
    yield from _faults_of_tensors(manifest.tensors)


def _faults_of_files(files: list[ShardFile]) -> Iterator[str]:
    for file in files:
        if not (isinstance(file.file, str) and _FILE.fullmatch(file.file)):
            yield f"{file.file!r} is not the name of a shard's file"
        if not (isinstance(file.sha256, str) and _SHA256.fullmatch(file.sha256)):
            yield f"{file.sha256!r} is not a SHA-256"
        if not is_count(file.size, below=1 << 63):
            yield f"{file.size!r} is not the size of a file"
    if len({file.file for file in files}) != len(files):
        yield "it names a file twice"


def _faults_of_tensors(tensors: list[dict[str, Any]]) -> Iterator[str]:
    if not isinstance(tensors, list):
        yield "tensors is not a list"
        return
    names: set[str] = set()
    for tensor in tensors:
        name, shape = tensor["name"], tensor["shape"]
        for each in (name, *tensor["aliases"]):
            if not isinstance(each, str) or each in names:
                yield f"{each!r} is not the name of a tensor, or occurs twice"
            names.add(each)
        if not (isinstance(shape, list) and all(is_count(n, below=MOST_ELEMENTS) for n in shape)):
            yield f"tensor {name!r} has the shape {shape!r}"
        elif len(shape) > 64 or math.prod(n or 1 for n in shape) >= MOST_ELEMENTS:
            yield f"tensor {name!r} has the shape {shape!r}, which fits into no memory"
        if tensor["dtype"] not in ITEM_SIZE and tensor["rule"] != Rule.EXTERNAL:
            yield f"tensor {name!r} has the dtype {tensor['dtype']!r}"
        if not is_count(tensor["rule"], below=len(Rule)):
            yield f"tensor {name!r} has the rule {tensor['rule']!r}"
        if not is_count(tensor["group"], below=1 << 31, least=-1):
            yield f"tensor {name!r} is in group {tensor['group']!r}"
        if not isinstance(tensor["frozen"], bool):
            yield f"tensor {name!r} has {tensor['frozen']!r} for frozen; expected true or false"
        if not isinstance(tensor["dtype"], str) or not isinstance(content := tensor["content"], str):
            yield f"tensor {name!r} has the dtype {tensor['dtype']!r} and the content {content!r}"
        if not isinstance(sparse := tensor["sparse"], bool) or (sparse and len(shape) < 2):
            yield f"tensor {name!r} of shape {shape!r} has {sparse!r} for sparse"


def is_count(value: object, *, below: int, least: int = 0) -> bool:
    """Whether `value` is a whole number, and not a bool, in the range."""
    return type(value) is int and least <= value < below


def _numbers(data: object) -> Iterator[int]:
    """All whole numbers in plain data."""
    if isinstance(data, int):
        yield data
    elif isinstance(data, dict | list):
        for item in data.values() if isinstance(data, dict) else data:
            yield from _numbers(item)
