"""How the YAML of a job is read: numbers as kubectl reads them, so that a file means the same everywhere.

PyYAML takes 1e-3 for a text, 2026-01-31 for a date and 12:30:45 for a number in base 60. kubectl, which reads
with sigs.k8s.io/yaml and sends JSON, takes the first for a number, the others for texts, and 1e1 or 10.0 for
the integer 10. Unlike there, `y` and `n` are texts.
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
"""Integers of JSON are below it, for Kubernetes."""


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
    """Puts texts in quotes that `_Loader` would take for something else."""


def _replace_resolvers() -> None:
    """Which plain scalars are numbers; no scalar is a date, unless a tag says so."""
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
    """The document in a text.

    Raises:
        yaml.YAMLError: it is not YAML. DuplicateKey, which is one: a mapping has a key twice.
    """
    return yaml.load(text, _Loader)


def write(document: Mapping[str, Any]) -> str:
    """The text that `read` makes this document of. Its keys keep their order."""
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False)
    return text
