"""The check of links finds what is not there, and gives headings the anchors that GitHub gives them."""

from __future__ import annotations

from pathlib import Path

from tools import links


def test_anchors_are_those_of_github() -> None:
    text = "# A job's `spec.worker`\n## See [the guide](a.md)\n## Twice\n### Twice\n```sh\n# a comment\n```\n"
    assert links.slugs(text) == {"a-jobs-specworker", "see-the-guide", "twice", "twice-1"}


def test_a_missing_file_or_heading_is_named(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Here\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[1](other.md#here) [2](https://example.org/x#y) `[3](gone.md)` [4](gone.md) [5](other.md#there)"
        " [6](#own)\n"
    )
    assert list(links.broken_links(page)) == [
        "gone.md: there is no such file",
        "other.md#there: there is no such heading",
        "#own: there is no such heading",
    ]
