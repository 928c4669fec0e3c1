"""What of a job may change while it runs, and what may not.

A change takes effect in a new term, which continues from the version that the model has: a term has one way
to make versions. Whoever started the job (the launcher, the operator) writes what is wanted to a file, and
shard 0's parameter server looks at it; see `env.ProcessEnvironment.tuning`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError
from pydantic.alias_generators import to_camel

from elastic_ps.api.compression import Compression
from elastic_ps.api.consistency import LOCAL_STAYS, MODES_OF, Consistency
from elastic_ps.api.fields import AUTO, CamelModel
from elastic_ps.api.job import Times, TrainingJobSpec
from elastic_ps.api.rules import NOT_LOCALLY, fields_of, names_of
from elastic_ps.errors import InvalidJob


def fixed_parts(consistency: Consistency) -> dict[str, tuple[object, str]]:
    """What a running job keeps of its consistency: by name its value, and what a change would need."""
    said, local = consistency.model_dump(by_alias=True), consistency.mode == "local"
    never = {field.path: field.own.why for field in fields_of(Consistency) if field.own and field.own.why}
    others = {name: said[name] for name in names_of(Consistency, NOT_LOCALLY)} if local else None
    return {name: (said[name], why) for name, why in never.items()} | {
        "mode local": (local, LOCAL_STAYS),
        "everything but steps": (others, "the outer rule is the optimizer that the job was started with"),
    }


class Moved(CamelModel):
    """The values that the parameter server has set by itself to keep an objective that a person named.

    Attributes:
        times: how often.
        desired: the consistency that the person has named.
    """

    times: int = Field(ge=1)
    desired: Consistency


class MutableFields(CamelModel):
    """The fields of a spec that may change while the job runs.

    Attributes:
        generation: grows with every change that a person makes, so that the newer of two is known.
        moved: what has become of that since; None for nothing.
        run: of which run of the job; generations of other runs cannot be compared with it.
        since: the version after which it is in force; the parameter server fills it in.
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
        """What `spec` says."""
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
        """`spec` with these fields in the place of its own."""
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
        """Whether this is a later one of the same run."""
        return self.run == other.run and self._number > other._number

    @property
    def _number(self) -> tuple[int, int]:
        return self.generation, self.moved.times if self.moved else 0

    @property
    def desired(self) -> Consistency:
        """The consistency that a person has named last."""
        return self.moved.desired if self.moved else self.consistency

    def moved_to(self, consistency: Consistency) -> MutableFields:
        """The same, with the consistency that keeps its objective now."""
        times = self.moved.times + 1 if self.moved else 1
        moved = Moved(times=times, desired=self.desired)
        return self.model_copy(update={"consistency": consistency, "moved": moved})

    def after(self, before: MutableFields) -> MutableFields:
        """This, which follows on `before`: what that has moved stays if the consistency is not meant."""
        if self.consistency != before.desired:
            return self
        return self.model_copy(update={"consistency": before.consistency, "moved": before.moved})

    def differs(self, other: MutableFields) -> bool:
        """Whether it says anything else."""
        return self.needs_term(other) or self.checkpoint != other.checkpoint

    def needs_term(self, before: MutableFields) -> bool:
        """Whether it takes effect in a new term only, since workers and shards have to know of it."""
        return bool(self.news(before))

    def news(self, before: MutableFields) -> dict[str, tuple[str, str]]:
        """What takes effect in a new term only: what it is of, how it is, and how it was, in words."""
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
                    f"consistency cannot change from ({now}) to ({then}) while the job runs. "
                    f"{name} stays what it is: {why}. Start a new job for that"
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
    """Read what `MutableFields.to_json` has written. Raises InvalidJob, in words that begin with `source`."""
    try:
        return MutableFields.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidJob(f"{source}: {f'{where}: ' if where else ''}{first['msg']}") from None


def describe(part: Consistency | Compression) -> str:
    """A consistency, or what gradients and values are encoded with, in one line, as in YAML."""
    first = next(iter(type(part).model_fields))
    said = {first: getattr(part, first), **part.model_dump(mode="json", by_alias=True, exclude_defaults=True)}
    return ", ".join(
        f"{name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in said.items()
    )


def without_options_of_other_codecs(
    compression: Mapping[str, Any], before: Mapping[str, Any]
) -> dict[str, Any]:
    """A compression as in YAML, without what belongs to the codecs of `before` alone."""
    foreign = set()
    if compression.get("codec") != before.get("codec"):
        foreign |= {"options", "maxError"}
    if compression.get("values") != before.get("values"):
        foreign |= {"valuesOptions"}
    return {name: value for name, value in compression.items() if name not in foreign}


def without_options_of_other_modes(consistency: Mapping[str, Any]) -> dict[str, Any]:
    """A consistency as in YAML, without what belongs to another mode than its own."""
    mode = consistency.get("mode", "sync")
    foreign = {to_camel(field) for field, modes in MODES_OF.items() if mode not in modes}
    return {name: value for name, value in consistency.items() if name not in foreign}
