"""Writes `elastic_ps.__version__` to the files that repeat it; `--check` fails where one differs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from elastic_operator.crd import flags, write_or_check
from elastic_ps import __version__

ROOT = Path(__file__).parents[1]
FILES = (
    "Dockerfile",
    "operator/Dockerfile",
    "charts/*/Chart.yaml",
    "manifests/**/*.yaml",
    "examples/**/*.yaml",
    "docs/**/*.md",
    "*.md",
    "CITATION.cff",
)
_REPEATED = re.compile(
    r"""((?:localhost|REGISTRY)/elastic-ps(?:-operator)?:|^version: |^appVersion: "|^ARG VERSION=)"""
    r"""\d+\.\d+\.\d+(?:[-.]?(?:a|b|rc|dev|post)\.?\d+)*""",
    re.MULTILINE,
)


def files(version: str, root: Path = ROOT) -> dict[Path, str]:
    """Every file that repeats the version, and its content with this one."""
    paths = sorted(path for pattern in FILES for path in root.glob(pattern))
    texts = {path: path.read_text() for path in paths}
    return {
        path: _REPEATED.sub(rf"\g<1>{version}", text)
        for path, text in texts.items()
        if _REPEATED.search(text)
    }


def main(arguments: list[str] | None = None) -> int:
    given = flags(__doc__).parse_args(arguments)
    return write_or_check(files(__version__), write=given.write, command="python tools/version.py")


if __name__ == "__main__":
    sys.exit(main())
