"""Reads the YAML of a job as kubectl does, so that a file means the same everywhere.

PyYAML reads 1e-3 as a string, 2026-01-31 as a date and 12:30:45 as a number in base 60. kubectl, which uses
sigs.k8s.io/yaml and sends JSON, reads the first as a number, the others as strings, and 1e1 or 10.0 as the
integer 10. Unlike with kubectl, `y` and `n` are strings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import yaml

_INT = re.compile(
    r"[-+]?(0[bB]_*[01][01_]*|0[xX]_*[0-9a-fA-F][0-9a-fA-F_]*|0[oO]?_*[0-7][0-7_]*|0|[1-9][0-9_]*)\Z"
)
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?\Z|[-+]?\.(inf|Inf|INF)\Z|\.(nan|NaN|NAN)\Z"
)


_LARGEST = 2**63
"""The limit of integers in Kubernetes' JSON."""


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

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node).replace("_", "").lower()
        digits = text.lstrip("+-")
        octal = digits.startswith("0") and digits[1:].isdecimal()
        return int(text, 8 if octal else 0)

    def construct_number(self, node: yaml.ScalarNode) -> float | int | str:
        number: float = self.construct_yaml_float(node)
        if math.isinf(number) and "inf" not in node.value.lower():
            text: str = node.value
            return text
        return int(number) if number.is_integer() and abs(number) < _LARGEST else number


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_number)


class _Dumper(yaml.SafeDumper):
    """Quotes strings that `_Loader` would read as another type."""


def _replace_resolvers() -> None:
    """Set which plain scalars are numbers. No scalar is a date unless it has a tag."""
    replaced = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp")}
    _Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in replaced]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
    _Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
    _Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


_replace_resolvers()


def read(text: str) -> Any:
    """Read a document.

    Raises:
        yaml.YAMLError: the text is not YAML. Its subclass DuplicateKey: a mapping has a key twice.
    """
    return yaml.load(text, _Loader)


def write(document: Mapping[str, Any]) -> str:
    """Write a document so that `read` reads it back. Keys keep their order."""
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False)
    return text
