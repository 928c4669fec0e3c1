"""The fields of a job that may change while it runs, and the rules for such changes.

A term makes all of its versions in the same way. So a change takes effect in a new term, which continues from
the current version. The starter of the job (launcher or operator) writes the wanted fields to a file, which
the parameter server of shard 0 watches; see `env.ProcessEnvironment.tuning`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError
from pydantic.alias_generators import to_camel

from elastic_ps.api.checkpoints import Times
from elastic_ps.api.compression import Compression
from elastic_ps.api.consistency import LOCAL_STAYS, MODES_OF, Consistency
from elastic_ps.api.fields import AUTO, CamelModel
from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.api.rules import NOT_LOCALLY, fields_of, names_of
from elastic_ps.errors import InvalidJob


def fixed_parts(consistency: Consistency) -> dict[str, tuple[object, str]]:
    """The parts of the consistency that cannot change: by name, the value and why it cannot."""
    said, local = consistency.model_dump(by_alias=True), consistency.mode == "local"
    never = {field.path: field.own.why for field in fields_of(Consistency) if field.own and field.own.why}
    others = {name: said[name] for name in names_of(Consistency, NOT_LOCALLY)} if local else None
    return {name: (said[name], why) for name, why in never.items()} | {
        "the place of the optimizer": (local, LOCAL_STAYS),
        "everything but steps": (others, "other fields configure the running outer optimizer"),
    }


class Moved(CamelModel):
    """The values that the parameter server has set by itself to reach a user's objective.

    Attributes:
        times: how often it has set them.
        desired: the consistency that the user has asked for.
    """

    times: int = Field(ge=1)
    desired: Consistency


class MutableFields(CamelModel):
    """The fields of a spec that may change while the job runs.

    Attributes:
        generation: the number of the change. Each change by a user has a higher one.
        moved: what the parameter server has set since; None if nothing.
        run: the run of the job. Only generations of the same run can be compared.
        since: the version since which it is in force. The parameter server sets it.
    """

    generation: int = Field(default=0, ge=0)
    run: str = ""
    since: int = Field(default=0, ge=0)
    consistency: Consistency = Field(default_factory=Consistency)
    compression: Compression = Field(default_factory=Compression)
    checkpoint: Times = Field(default_factory=Times)
    moved: Moved | None = None

    @classmethod
    def of(cls, spec: TrainingJobSpec, *, generation: int = 0, run: str = "") -> MutableFields:
        """The mutable fields of `spec`."""
        checkpoint = spec.parameter_server.checkpoint
        times = {name: getattr(checkpoint, name) for name in Times.model_fields}
        return cls(
            generation=generation,
            run=run,
            consistency=spec.consistency,
            compression=spec.compression,
            checkpoint=Times(**times),
        )

    def applied_to(self, spec: TrainingJobSpec) -> TrainingJobSpec:
        """`spec` with these fields instead of its own."""
        server = spec.parameter_server
        checkpoint = server.checkpoint.model_copy(update=dict(self.checkpoint))
        server = server.model_copy(update={"checkpoint": checkpoint})
        return spec.model_copy(
            update={
                "consistency": self.consistency,
                "compression": self.compression,
                "parameter_server": server,
            }
        )

    def replaces(self, other: MutableFields) -> bool:
        """Whether this is a later change in the same run than `other`."""
        return self.run == other.run and self._number > other._number

    @property
    def _number(self) -> tuple[int, int]:
        return self.generation, self.moved.times if self.moved else 0

    @property
    def desired(self) -> Consistency:
        """The consistency that a user has asked for last."""
        return self.moved.desired if self.moved else self.consistency

    def moved_to(self, consistency: Consistency) -> MutableFields:
        """A copy with the consistency that the parameter server has set to reach the objective."""
        times = self.moved.times + 1 if self.moved else 1
        moved = Moved(times=times, desired=self.desired)
        return self.model_copy(update={"consistency": consistency, "moved": moved})

    def after(self, before: MutableFields) -> MutableFields:
        """This change after `before`. Values that the server has set stay if the consistency is the same."""
        if self.consistency != before.desired:
            return self
        return self.model_copy(update={"consistency": before.consistency, "moved": before.moved})

    def differs(self, other: MutableFields) -> bool:
        """Whether any field differs from `other`."""
        return self.needs_term(other) or self.checkpoint != other.checkpoint

    def needs_term(self, before: MutableFields) -> bool:
        """Whether the change needs a new term, because workers and shards have to know of it."""
        return bool(self.news(before))

    def news(self, before: MutableFields) -> dict[str, tuple[str, str]]:
        """The changes that need a new term: by field, the new and the old value in words."""
        news = {}
        if self.consistency != before.consistency:
            news["consistency"] = describe(self.consistency), describe(before.consistency)
        if self.compression != before.compression:
            ours, theirs = describe(self.compression), describe(before.compression)
            news["compression"] = ours, theirs
        return news

    def refusal(self, later: MutableFields) -> str:
        """Why a running job cannot change from this to `later`; "" if it can."""
        kept = fixed_parts(self.consistency)
        for name, (value, why) in fixed_parts(later.consistency).items():
            if kept[name][0] != value:
                now, then = describe(self.consistency), describe(later.consistency)
                return (
                    f"consistency cannot change from ({now}) to ({then}) while the job runs; "
                    f"{name} stays as it is: {why}. Start a new job for that"
                )
        if later.consistency.deterministic and later.compression.codec == AUTO:
            return (
                "compression.codec cannot become auto in a job with consistency.deterministic: true, because "
                "it chooses by measured times; name a codec"
            )
        return ""

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True, exclude_none=True)


def read_mutable(text: str, *, source: str) -> MutableFields:
    """Read the output of `MutableFields.to_json`. Raises InvalidJob, whose message begins with `source`."""
    try:
        return MutableFields.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidJob(f"{source}: {f'{where}: ' if where else ''}{first['msg']}") from None


def describe(part: Consistency | Compression) -> str:
    """A consistency or a compression in one line, as in YAML."""
    first = next(iter(type(part).model_fields))
    said = {first: getattr(part, first), **part.model_dump(mode="json", by_alias=True, exclude_defaults=True)}
    return ", ".join(
        f"{name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in said.items()
    )


def without_options_of_other_codecs(
    compression: Mapping[str, Any], before: Mapping[str, Any]
) -> dict[str, Any]:
    """A compression as in YAML, without the options of codecs that only `before` has."""
    foreign = set()
    if compression.get("codec") != before.get("codec"):
        foreign |= {"options", "maxError"}
    if compression.get("values") != before.get("values"):
        foreign |= {"valuesOptions"}
    return {name: value for name, value in compression.items() if name not in foreign}


def without_options_of_other_modes(consistency: Mapping[str, Any]) -> dict[str, Any]:
    """A consistency as in YAML, without the fields of other modes."""
    mode = consistency.get("mode", "sync")
    foreign = {to_camel(field) for field, modes in MODES_OF.items() if mode not in modes}
    return {name: value for name, value in consistency.items() if name not in foreign}
