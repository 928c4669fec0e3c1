"""What shard 0 orders of the shards, and the same as messages.

Shard 0's coordinator drives its own shard directly and the others by calls; both are a `ShardControl`.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

from elastic_ps.checkpoint.store import ShardFile
from elastic_ps.core.partition import Layout
from elastic_ps.core.settings import Settings
from elastic_ps.errors import Malformed
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.convert import layout_from_message, layout_to_message


@dataclass(frozen=True)
class Application:
    """Which contributions become the next version, and with which settings."""

    attempt: int
    contributors: Collection[tuple[int, int, int]]
    samples: int
    settings: Settings


@dataclass(frozen=True)
class Configuration:
    """What a shard needs to know to begin."""

    layout: Layout
    optimizer: str
    settings: Settings
    epoch: int
    load_version: int | None


@dataclass(frozen=True)
class Advance:
    """The state of the round, and what to do to get there. See messages.proto."""

    version: int
    attempt: int
    expected: Mapping[int, int]
    apply: Application | None = None
    checkpoint: bool = False
    epoch: int = 0
    prepare: bool = False
    state: str = ""
    next: Advance | None = None


class Standing(enum.IntEnum):
    """How far a shard's standby is."""

    NONE = 0
    """The shard has none."""
    AWAY = 1
    """It does not answer."""
    EMPTY = 2
    """It answers, and needs a checkpoint to begin with."""
    CATCHING_UP = 3
    """It loads a checkpoint; the rounds since then are kept for it."""
    FOLLOWING = 4
    """It has every round before the shard applies it."""


@dataclass(frozen=True)
class Written:
    """The outcome of writing a shard's part of a checkpoint: `file`, or the reason in `error`.

    `pause` is how long training stood still for the copy in memory.
    """

    version: int
    file: ShardFile | None
    error: str
    pause: timedelta


@dataclass(frozen=True)
class Report:
    """What a shard answers to an order: checkpoint parts written since the last answer, and its standby."""

    written: list[Written] = field(default_factory=list)
    standby: Standing = Standing.NONE


class ShardControl(Protocol):
    """A shard as the coordinator sees it. Both methods block and may be repeated."""

    def configure(self, configuration: Configuration) -> None:
        """Take a model over, empty or from a checkpoint; whatever was there before is dropped."""

    def advance(self, advance: Advance) -> Report:
        """Bring the round to this state."""


def configuration_to_message(job: str, configuration: Configuration) -> pb.ConfigureRequest:
    return pb.ConfigureRequest(
        job=job,
        layout=layout_to_message(configuration.layout),
        optimizer=pb.Optimizer(name=configuration.optimizer, groups=configuration.settings.to_json()),
        epoch=configuration.epoch,
        load_version=configuration.load_version,
    )


def configuration_from_message(message: pb.ConfigureRequest) -> Configuration:
    """Raises Malformed for a layout or settings that cannot be."""
    return Configuration(
        layout=layout_from_message(message.layout),
        optimizer=message.optimizer.name,
        settings=settings_from_message(message.optimizer.groups),
        epoch=message.epoch,
        load_version=message.load_version if message.HasField("load_version") else None,
    )


def advance_to_message(job: str, advance: Advance) -> pb.AdvanceRequest:
    message = pb.AdvanceRequest(
        job=job,
        version=advance.version,
        attempt=advance.attempt,
        expected=[
            pb.Participant(worker=worker, incarnation=incarnation)
            for worker, incarnation in sorted(advance.expected.items())
        ],
        checkpoint=advance.checkpoint,
        epoch=advance.epoch,
        prepare=advance.prepare,
        state=advance.state,
    )
    if advance.apply is not None:
        apply = advance.apply
        contributors = [
            pb.Contributor(worker=worker, incarnation=incarnation, step=step)
            for worker, incarnation, step in apply.contributors
        ]
        message.apply.CopyFrom(
            pb.Apply(
                attempt=apply.attempt,
                contributors=contributors,
                samples=apply.samples,
                settings=apply.settings.to_json(),
            )
        )
    if advance.next is not None:
        message.next.CopyFrom(advance_to_message(job, advance.next))
    return message


def advance_from_message(message: pb.AdvanceRequest) -> Advance:
    """Raises Malformed for settings that cannot be."""
    apply = None
    if message.HasField("apply"):
        apply = Application(
            attempt=message.apply.attempt,
            contributors=[(c.worker, c.incarnation, c.step) for c in message.apply.contributors],
            samples=message.apply.samples,
            settings=settings_from_message(message.apply.settings),
        )
    return Advance(
        version=message.version,
        attempt=message.attempt,
        expected={who.worker: who.incarnation for who in message.expected},
        apply=apply,
        checkpoint=message.checkpoint,
        epoch=message.epoch,
        prepare=message.prepare,
        state=message.state,
        next=advance_from_message(message.next) if message.HasField("next") else None,
    )


def report_to_message(report: Report) -> pb.AdvanceReply:
    message = pb.AdvanceReply(standby=int(report.standby))
    for part in report.written:
        message.written.add(
            version=part.version,
            file=part.file.file if part.file else "",
            sha256=part.file.sha256 if part.file else "",
            size=part.file.size if part.file else 0,
            error=part.error,
            pause_us=round(part.pause.total_seconds() * 1e6),
        )
    return message


def report_from_message(message: pb.AdvanceReply) -> Report:
    """Raises Malformed for a standing that does not exist."""
    try:
        standing = Standing(message.standby)
    except ValueError as error:
        raise Malformed(str(error)) from error
    return Report([_written(part) for part in message.written], standing)


def _written(part: pb.Written) -> Written:
    file = None if part.error else ShardFile(part.file, part.sha256, part.size)
    return Written(part.version, file, part.error, timedelta(microseconds=part.pause_us))


def settings_from_message(text: str) -> Settings:
    """Raises Malformed if `text` is not what `Settings.to_json` writes."""
    try:
        return Settings.from_json(text)
    except (ValueError, KeyError, TypeError) as error:
        raise Malformed(f"not the settings of an optimizer: {error}") from error
