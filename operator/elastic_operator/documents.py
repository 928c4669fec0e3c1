"""Documents that other versions of the operator, or of a job's image, have written or will read. Pure.

Unknown fields are left out when a document is read, and kept when it is written over. The API server stores
objects with up to 10,000 levels, which Python cannot read: what is nested so deeply is cut off.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.api.status import Condition, ServerStatus, TrainingJobStatus

_M = TypeVar("_M", bound=BaseModel)

MOST_LEVELS = 200
"""The most levels of a spec."""

_CUT = 500
"""The levels that are left of a document with more: half of what Python reads, and enough for a spec with too
many.
"""

_BRACKETS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[][{}]', re.DOTALL)
"""The brackets of a JSON text, and its strings, which may have brackets in them. It never backtracks."""


def read_json(text: str | bytes) -> Any:
    """Read JSON, without what is nested too deeply to be read.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return json.loads(text)
    except RecursionError:
        return json.loads(shallow(text.encode() if isinstance(text, str) else text))


def shallow(text: bytes, levels: int = _CUT) -> bytes:
    """A JSON text with null in place of each object and list below so many levels."""
    if text.count(b"{") + text.count(b"[") <= levels:
        return text
    kept, begin, depth = bytearray(), 0, 0
    for found in _BRACKETS.finditer(text):
        if found[0] in (b"{", b"["):
            if depth == levels:
                kept += text[begin : found.start()] + b"null"
            depth += 1
        elif found[0] in (b"}", b"]"):
            depth -= 1
            if depth == levels:
                begin = found.end()
    return bytes(kept + text[begin:])


def too_deep(document: Any, levels: int = MOST_LEVELS) -> bool:
    """Whether a document holds anything below so many levels."""
    outer = [document]
    for _ in range(levels + 1):
        outer = [inner for each in outer for inner in _parts(each)]
    return bool(outer)


def _parts(document: Any) -> Iterable[Any]:
    if isinstance(document, Mapping):
        return document.values()
    return document if isinstance(document, list) else ()


def read_status(job: Mapping[str, Any]) -> TrainingJobStatus:
    """The status of a job, without the parts that this version does not understand."""
    status = job.get("status")
    document = copy.deepcopy(dict(status)) if isinstance(status, Mapping) else {}
    return _understood(TrainingJobStatus, document)


def read_server_status(document: dict[str, Any]) -> ServerStatus:
    """The answer of a parameter server, without fields of a newer version.

    Raises:
        ValidationError: it is not a status.
    """
    known, _ = _without_unknown(ServerStatus, document)
    return ServerStatus.model_validate(known)


def known_spec(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A spec without the fields that this version does not know, and the names of these fields."""
    return _without_unknown(TrainingJobSpec, document)


def over(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The status `new`, with the foreign fields and conditions of `old`."""
    kept = _with_foreign(old, new, TrainingJobStatus)
    ours = get_args(Condition.model_fields["type"].annotation)
    before = [item for item in old.get("conditions") or [] if isinstance(item, Mapping)]
    by_type = {item.get("type"): item for item in before}
    conditions = [_with_foreign(by_type.get(c["type"], {}), c, Condition) for c in new.get("conditions", [])]
    conditions += [dict(item) for item in before if item.get("type") not in ours]
    return {**kept, "conditions": conditions}


def _understood(model: type[_M], document: dict[str, Any]) -> _M:
    while True:
        try:
            return model.model_validate(document)
        except ValidationError as error:
            _leave_out(document, error.errors()[0]["loc"])


def _leave_out(document: dict[str, Any], location: tuple[int | str, ...]) -> None:
    """Remove the innermost existing part at `location`; if a field is missing, the part that lacks it."""
    container: Any = document
    for depth, part in enumerate(location):
        inner = container[part]
        rest = location[depth + 1 :]
        if not rest or not _has(inner, rest[0]):
            del container[part]
            return
        container = inner


def _has(container: Any, part: int | str) -> bool:
    if isinstance(container, list):
        return isinstance(part, int) and part < len(container)
    return isinstance(container, dict) and part in container


def _without_unknown(model: type[BaseModel], document: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    known, left_out = copy.deepcopy(dict(document)), []
    try:
        model.model_validate(known)
    except ValidationError as error:
        for item in error.errors():
            if item["type"] == "extra_forbidden":
                _leave_out(known, item["loc"])
                left_out.append(".".join(map(str, item["loc"])))
    return known, left_out


def _with_foreign(old: Mapping[str, Any], new: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """`new`, a document of `model`, with all fields of `old` that the model lacks, at every level."""
    fields = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    kept = dict(new)
    for key, value in old.items():
        kind = fields.get(key)
        if key not in fields:
            kept[key] = value
        elif isinstance(kind, type) and issubclass(kind, BaseModel) and isinstance(value, Mapping):
            kept[key] = _with_foreign(value, new.get(key) or {}, kind)
    return kept
