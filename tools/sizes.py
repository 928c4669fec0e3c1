"""Checks that the packages of the worker and the server, and the documentation, stay small enough to be read.

Exits with 1 and says what is too large. What is generated, reports and news do not count.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

FILES: Mapping[str, int] = {"elastic_ps/worker": 28, "elastic_ps/server": 22}
"""The most modules of a package, in its sub-packages too. An `__init__.py` says what is in one."""

LINES = 15_500
"""The most lines of these packages together."""

LONGEST = 600
"""The most lines of a file."""

LOOSE = 6
"""The most modules of elastic_ps that are in no package."""

WORDS = 35_000
"""The most words of all Markdown pages together."""

PAGES = ("*.md", ".github/**/*.md", "charts/**/*.md", "docs/**/*.md")
NOT_COUNTED = ("CHANGELOG.md", "docs/news", "docs/reference", "docs/reports")


def excesses(root: Path) -> Iterator[str]:
    """What is too large in a checkout, one sentence each."""
    lines = 0
    for package, most in FILES.items():
        sizes = {path: _lines(path) for path in (root / package).glob("**/*.py")}
        lines += sum(sizes.values())
        if (modules := sum(path.name != "__init__.py" for path in sizes)) > most:
            yield f"{package} has {modules} modules; {most} are allowed"
    if lines > LINES:
        yield f"{' and '.join(FILES)} have {lines} lines; {LINES} are allowed"
    for path in sorted([*(root / "elastic_ps").glob("**/*.py"), *(root / "operator").glob("**/*.py")]):
        if not path.stem.endswith("_pb2") and (size := _lines(path)) > LONGEST:
            yield f"{path.relative_to(root)} has {size} lines; {LONGEST} are allowed"
    loose = sorted(path.name for path in (root / "elastic_ps").glob("*.py"))
    if len(loose) > LOOSE:
        yield f"elastic_ps has {len(loose)} modules in no package: {', '.join(loose)}; {LOOSE} are allowed"
    pages = (path for pattern in PAGES for path in root.glob(pattern))
    words = sum(len(path.read_text().split()) for path in pages if _counts(path.relative_to(root)))
    if words > WORDS:
        yield f"the documentation has {words} words; {WORDS} are allowed"


def _counts(page: Path) -> bool:
    return not any(page.is_relative_to(name) for name in NOT_COUNTED)


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def main() -> int:
    """The command."""
    found = list(excesses(ROOT))
    print(*found, sep="\n", end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
