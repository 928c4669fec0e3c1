"""`elastic-ps set`: change fields of a running job from another terminal."""

from __future__ import annotations

import argparse
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import yaml

from elastic_ps.api import manifest
from elastic_ps.api.job import TrainingJob, TrainingJobSpec, parse_job
from elastic_ps.api.mutable import (
    MutableFields,
    without_options_of_other_codecs,
    without_options_of_other_modes,
)
from elastic_ps.api.rules import SET, fields, part_of
from elastic_ps.api.status import TuningStatus
from elastic_ps.cli.control import directory_of, status_of
from elastic_ps.errors import InvalidJob, UserError
from elastic_ps.local.state import JobDirectory, generation_of

LIMIT = timedelta(seconds=60)
"""How long the command waits until the change is in force."""

_SETTABLE = [field for field in fields(TrainingJobSpec) if field.own is SET]
PARTS = [field.path for field in _SETTABLE if part_of(field.info) is not None]
"""Parts of a job with changeable fields. A rule may refuse a change."""
FIELDS = [field.path for field in _SETTABLE if field.path not in PARTS]
"""The changeable fields of other parts."""


def set_fields(parsed: argparse.Namespace) -> int:
    """Change fields of a running job, and wait until the change is in force."""
    directory = directory_of(parsed.job)
    status_of(directory)
    if directory.launcher() is None:
        raise UserError(f"job {directory.job!r} is not running; change its file, and start it")
    assigned = dict(assignment(text) for text in parsed.assignments)
    before, after = directory.edit(lambda job: changed(job, assigned))
    if before == after:
        print(f"{directory.job} already has these values")
        return 0
    return _await(directory, generation_of(after), before)


def _back(job: TrainingJob, generation: int, before: TrainingJob) -> TrainingJob:
    """The job before a refused change, unless somebody has changed it since."""
    if generation_of(job) != generation:
        return job
    return job.model_copy(update={"spec": MutableFields.of(before.spec).applied_to(job.spec)})


def _await(directory: JobDirectory, generation: int, before: TrainingJob) -> int:
    """Print when the change is in force. If it is refused, revert it and raise UserError."""
    deadline = time.monotonic() + LIMIT.total_seconds()
    while directory.launcher() is not None and time.monotonic() < deadline:
        server = status_of(directory).server
        tuning = server.tuning if server is not None else TuningStatus()
        if tuning.asked == generation and tuning.problem:
            directory.edit(lambda job: _back(job, generation, before))
            raise UserError(f"{directory.job} is not changed: {tuning.problem}")
        if tuning.generation >= generation:
            now = MutableFields.of(directory.read_job().spec)
            print(f"{directory.job} has changed; {in_force(tuning, now, MutableFields.of(before.spec))}")
            return 0
        time.sleep(0.1)
    if directory.launcher() is None:
        raise UserError(f"{directory.job} ended before the change was in force; make it in the job's file")
    print(f"{directory.job}: the parameter server will apply the change as soon as it can")
    return 0


def in_force(status: TuningStatus, now: MutableFields, before: MutableFields) -> str:
    """The differences between `now` and before, in words."""
    words = {"consistency": status.consistency, "compression": status.compression}
    changed_it = now.news(before)
    parts = [f"{name} is ({text})" for name, text in words.items() if name in changed_it]
    said = [f"since version {status.since}, {', '.join(parts)}"] if parts else []
    if now.checkpoint != before.checkpoint:
        times = now.checkpoint.model_dump(mode="json", by_alias=True, exclude_none=True)
        said.append(f"checkpoints are ({', '.join(f'{name}: {value}' for name, value in times.items())})")
    return "; ".join(said)


def assignment(text: str) -> tuple[str, Any]:
    """Parse a field's path and value. An empty value means none.

    Raises:
        UserError: the text is not of the form FIELD=VALUE, or the field cannot be changed while a job runs.
    """
    path, value = _split(text)
    if path == "worker.replicas":
        raise UserError("the number of workers is changed with `elastic-ps scale JOB --workers N`")
    if path not in FIELDS and path.rpartition(".")[0] not in PARTS:
        raise UserError(
            f"{path} cannot change while a job runs. These can: the fields of consistency, as in "
            "consistency.mode; those of compression, as in compression.codec=int8 or "
            f"compression.options='{{block: 128}}'; {', '.join(FIELDS)}; and the number of workers, with "
            "`elastic-ps scale`"
        )
    return path, value


def _split(text: str) -> tuple[str, Any]:
    path, equals, value = text.partition("=")
    if not (equals and path):
        raise UserError(f"{text!r} is not of the form FIELD=VALUE, as in consistency.mode=async")
    path = path.removeprefix("spec.")
    try:
        return path, manifest.read(value) if value else None
    except yaml.YAMLError:
        raise UserError(f"{path}: {value!r} is not valid YAML") from None


def with_fields(job: TrainingJob, assignments: Sequence[str]) -> TrainingJob:
    """A job that has not started yet, with new values of any fields.

    Args:
        assignments: texts of the form FIELD=VALUE, as in the YAML file. A field is one of spec, or of
            metadata with that prefix. An empty value unsets it.

    Raises:
        UserError: an assignment does not have that form, or the resulting job is invalid (InvalidJob).
    """
    document = job.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    for text in assignments:
        path, value = _split(text)
        *parents, name = path.split(".")
        top = document if parents[:1] == ["metadata"] else document["spec"]
        _within(top, parents)[name] = value
        if value is None:
            del _within(top, parents)[name]
    try:
        return parse_job(document, source="--set")
    except InvalidJob as error:
        lines = [line.removeprefix("--set: ") for line in str(error).splitlines()]
        raise InvalidJob("\n".join(f"{_named(line, assignments)}: {line}" for line in lines)) from None


def _named(line: str, assignments: Sequence[str]) -> str:
    """The assignments that a line of an error is about, as they are given on the command line."""
    found = re.search(r"\b(?:spec|metadata)[\w.]*", line)
    location = f"{found.group()}." if found else ""
    about = []
    for text in assignments:
        path, _ = _split(text)
        place = f"{path}." if path.startswith("metadata.") else f"spec.{path}."
        if place.startswith(location) or location.startswith(place):
            about.append(text)
    return shlex.join(part for text in about or assignments for part in ("--set", text))


def changed(job: TrainingJob, assigned: Mapping[str, Any]) -> TrainingJob:
    """The job with other values of fields. It drops the options of the previous mode.

    So do the options of a codec with that codec.

    Raises:
        UserError: the values do not fit together, or a running job cannot change like that.
    """
    document = job.model_dump(mode="json", by_alias=True, exclude_none=True)
    mode, before = job.spec.consistency.mode, dict(document["spec"]["compression"])
    for path, value in assigned.items():
        *parents, name = path.split(".")
        _within(document["spec"], parents)[name] = value
    consistency = _given(document, "consistency")
    if consistency.get("mode", mode) != mode:
        usual = without_options_of_other_modes(consistency)
        consistency = {k: v for k, v in consistency.items() if k in usual or f"consistency.{k}" in assigned}
    document["spec"]["consistency"] = consistency
    compression = _given(document, "compression")
    usual = without_options_of_other_codecs(compression, before)
    document["spec"]["compression"] = {
        k: v for k, v in compression.items() if k in usual or f"compression.{k}" in assigned
    }
    after = parse_job(document, source=job.name)
    if refusal := MutableFields.of(job.spec).refusal(MutableFields.of(after.spec)):
        raise UserError(f"{job.name}: {refusal}")
    return after


def _given(document: dict[str, Any], group: str) -> dict[str, Any]:
    """The fields of a part of the spec that are set."""
    return {name: value for name, value in document["spec"][group].items() if value is not None}


def _within(document: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    for name in path:
        document = document.setdefault(name, {})
        if not isinstance(document, dict):
            raise UserError(f"{'.'.join(path)}: {name} is {document!r}, which has no fields")
    return document
