"""The check of sizes names what is too large, and nothing else."""

from __future__ import annotations

from pathlib import Path

from tools import sizes


def test_what_is_too_large_is_named(tmp_path: Path) -> None:
    for package, files in sizes.FILES.items():
        (tmp_path / package).mkdir(parents=True)
        for number in range(files):
            (tmp_path / package / f"{number}.py").touch()
    longest = tmp_path / "elastic_ps" / "worker" / "0.py"
    longest.write_text("\n" * sizes.LONGEST)
    for number in range(sizes.LOOSE):
        (tmp_path / "elastic_ps" / f"{number}.py").touch()
    for name in ("README.md", "CHANGELOG.md", "docs/reports/one.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("word " * sizes.WORDS)
    assert list(sizes.excesses(tmp_path)) == []
    (tmp_path / "docs" / "index.md").write_text("more")
    longest.write_text("\n" * (sizes.LINES + 1))
    (tmp_path / "elastic_ps" / "server" / "more.py").touch()
    (tmp_path / "elastic_ps" / "more.py").touch()
    assert [text.partition(" ha")[0] for text in sizes.excesses(tmp_path)] == [
        "elastic_ps/server",
        "elastic_ps/worker and elastic_ps/server",
        "elastic_ps/worker/0.py",
        "elastic_ps",
        "the documentation",
    ]
