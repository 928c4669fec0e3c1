"""How the YAML of a job is read: as kubectl reads it, so that a file means the same everywhere.

PyYAML takes 1e-3 for a text, 2026-01-31 for a date and 12:30:45 for a number in base 60. kubectl, which reads
with sigs.k8s.io/yaml, takes the first for a number and the others for texts.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

_INT = re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]+|0|[1-9][0-9_]*)\Z")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?\Z|[-+]?\.(inf|Inf|INF)\Z|\.(nan|NaN|NAN)\Z"
)


class DuplicateKey(yaml.YAMLError):
    """A mapping has the same key twice. YAML's own loader would drop the first value."""


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, as `kubectl` does. A mapping may override keys that `<<` merges into it."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                before = lines[key.value]
                where = f"on line {line}" if before == line else f"on line {before} and on line {line}"
                raise DuplicateKey(f"{key.value!r} is given twice, {where}; keep one")
            lines[key.value] = line
        return node


def _replace_resolvers() -> None:
    """Which plain scalars are numbers; no scalar is a date, unless a tag says so."""
    replaced = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp")}
    _Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in replaced]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
    _Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


_replace_resolvers()


def read(text: str) -> Any:
    """The document in a text.

    Raises:
        yaml.YAMLError: it is not YAML. DuplicateKey, which is one: a mapping has a key twice.
    """
    return yaml.load(text, _Loader)
