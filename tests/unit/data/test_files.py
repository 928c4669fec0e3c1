"""Which files a data set has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_ps.data.columnar import ArrowDataset, ParquetDataset
from elastic_ps.data.files import BESIDE, files_of
from elastic_ps.data.tar import TarDataset
from elastic_ps.data.text import TextDataset
from elastic_ps.errors import UsageError
from tests.testing.ranges import serving


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.txt", ["a1", "a2", "b1"]),
        ("a?.txt", ["a1", "a2"]),
        ("[b]1.txt", ["b1"]),
        ("{b1,a2}.txt", ["b1", "a2"]),
        ("{b,a}{1..1}.txt", ["b1", "a1"]),
        ("a[x].txt.old", ["a[x]"]),
    ],
)
def test_the_files_of_a_pattern(tmp_path: Path, pattern: str, names: list[str]) -> None:
    for name in ("a1.txt", "a2.txt", "b1.txt", "a[x].txt.old"):
        (tmp_path / name).touch()
    assert [Path(file.url).name.split(".")[0] for file in files_of(f"{tmp_path}/{pattern}", {})] == names


def test_a_query_of_a_url_is_no_pattern(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    with serving(tmp_path) as address:
        assert TextDataset(f"{address}/a.txt?token=[x]")[0] == "one"


@pytest.mark.parametrize("query", ["", "?download=true"])
def test_an_index_beside_a_file_of_a_server_is_found(tmp_path: Path, query: str) -> None:
    """A server does not look at the query, so a suffix there would give the file itself."""
    (tmp_path / "a.txt").write_text("one\ntwo\n" * 1000)
    with serving(tmp_path) as address:
        url = f"{address}/a.txt{query}"
        [file] = files_of(url, {})
        assert not file.beside(".index").exists()
        TextDataset(tmp_path / "a.txt", index=BESIDE)
        data = TextDataset(url, index=tmp_path / "index")
        assert (len(data), data.bytes_read) == (2000, 0)


def test_an_index_beside_a_file_is_no_file_of_a_pattern(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("one\ntwo\n")
    for _ in range(2):
        assert len(TextDataset(tmp_path / "*.txt*", index=BESIDE)) == 4


def test_an_index_beside_a_file_is_replaced_at_once_and_made_again_if_it_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    TextDataset(tmp_path / "a.txt", index=BESIDE)
    [index] = tmp_path.glob("*.index")
    whole = index.read_bytes()
    index.write_bytes(whole[: len(whole) // 2])
    with index.open("rb") as half:  # another worker reads it meanwhile
        assert len(TextDataset(tmp_path / "a.txt", index=BESIDE)) == 2
        assert half.read() == whole[: len(whole) // 2]
    assert index.read_bytes() == whole
    assert index.stat().st_mode & 0o444 == 0o444


@pytest.mark.parametrize("make", [TextDataset, TarDataset, ParquetDataset, ArrowDataset])
@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("{folder}/none.tar", r"there is no file .*none\.tar.*Expected paths or URLs"),
        ("{folder}/a?.tar", r"no file matches .*a\?\.tar.*Expected"),
        ("{folder}/{{a,b}}.tar", r"there is no file .*/a\.tar.*Expected"),
        ("{folder}", r"is a folder\. Add a pattern, such as .*/\*"),
        ("pipe:cat a.tar", r"there is no file pipe:cat.*Commands \(pipe:\.\.\.\) are not run"),
        ("nothing://a/b.tar", r"there is no file nothing://.*Expected"),
        ("nothing://a/*.tar", r"is not a URL of files.*Expected"),
    ],
)
def test_what_is_no_file_is_refused(tmp_path: Path, make: Any, url: str, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        make(url.format(folder=tmp_path))


def test_a_pattern_without_a_file_is_refused_beside_others(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    with pytest.raises(UsageError, match=r"no file matches .*b\?\.txt.*Expected"):
        TextDataset([tmp_path / "a.txt", tmp_path / "b?.txt"])


def test_a_file_that_a_server_does_not_have_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as address, pytest.raises(UsageError, match=r"there is no file http://.*Expected"):
        TextDataset(f"{address}/none.txt")


def test_a_slice_is_a_list_of_records(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0\n1\n2\n")
    data = TextDataset(tmp_path / "a.txt", transform=int)
    assert (data[0:2], data[-1:], data[5:], data[-1]) == ([0, 1], [2], [], 2)
    with pytest.raises(IndexError):
        data[3]
