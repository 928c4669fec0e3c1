"""Checks the links of every Markdown file: the file that a link names exists, and so does the heading.

Also checks that each page of `docs` that the code names, as messages and docstrings do, exists. Web addresses
are not looked up. Exits with 1 and names what is missing.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PAGE = re.compile(r"\bdocs/[\w/-]+\.md\b")


def slugs(text: str) -> set[str]:
    """The anchors that GitHub and MyST give to the headings of a page."""
    found = Counter[str]()
    for heading in re.findall(r"^#+ +(.+?) *$", _FENCE.sub("", text), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        if found[slug]:
            found[f"{slug}-{found[slug]}"] += 1
        found[slug] += 1
    return set(found)


def broken_links(page: Path) -> Iterator[str]:
    """What the links of a page name that is not there."""
    text = _CODE.sub("", _FENCE.sub("", page.read_text()))
    for link in _LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists():
            yield f"{link}: there is no such file"
        elif anchor and anchor not in slugs(target.read_text()):
            yield f"{link}: there is no such heading"


def main() -> int:
    """The command."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]
    pages = (path for path in files if path.suffix == ".md")
    broken = [f"{path.relative_to(ROOT)}: {found}" for path in pages for found in broken_links(path)]
    for path in files:
        if path.suffix in (".py", ".yaml", ".proto", ".txt") and "tests" not in path.parts:
            for name in sorted(set(_PAGE.findall(path.read_text()))):
                if not (ROOT / name).is_file():
                    broken.append(f"{path.relative_to(ROOT)}: there is no {name}")
    print(*broken, sep="\n", end="\n" if broken else "", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
