"""Records in text files: lines."""

from __future__ import annotations

import gzip
import json
import uuid
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from elastic_ps.data.text import TextDataset
from elastic_ps.errors import UsageError
from tests.testing.ranges import serving

LINES = st.lists(st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), max_size=9), min_size=1)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("index")


@given(LINES, st.booleans(), st.sampled_from(["\n", "\r\n"]), st.integers(1, 30))
def test_the_records_are_the_lines(
    index: Path, lines: list[str], ended: bool, end: str, block_bytes: int
) -> None:
    content = end.join(lines) + (end if ended or not lines[-1] else "")
    name = uuid.uuid4()
    fsspec.filesystem("memory").pipe_file(f"/lines/{name}", content.encode())
    data = TextDataset(f"memory://lines/{name}", block_bytes=block_bytes, index=index)
    assert data.__getitems__(range(len(data))) == lines
    assert sum(data.block_sizes()) == len(lines)


def test_lines_of_several_files_are_made_records(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_text("".join(f'{{"at": [{number}, {i}]}}\n' for i in range(5)))
    data = TextDataset(tmp_path / "*.jsonl", transform=json.loads, block_bytes=30, index=tmp_path / "index")
    assert [data[i]["at"] for i in (14, 0, 7)] == [[2, 4], [0, 0], [1, 2]]
    again = TextDataset(tmp_path / "*.jsonl", block_bytes=30, index=tmp_path / "index")
    assert again.bytes_read == 0
    again[7]
    assert again.bytes_read <= 30


def test_lines_are_read_over_http(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text("".join(f"{number} {i}\n" for i in range(50)))
    lines = [f"{number} {i}" for number in range(2) for i in range(50)]
    with serving(tmp_path) as address:
        data = TextDataset(f"{address}/{{0..1}}.txt", block_bytes=30, index=tmp_path / "index")
        loader = DataLoader(data, batch_size=10, num_workers=1, collate_fn=list)
        assert [line for batch in loader for line in batch] == lines
    with serving(tmp_path, ranges=False) as address, pytest.raises(UsageError, match="Copy it to a file"):
        TextDataset(f"{address}/0.txt", block_bytes=30, index=tmp_path / "index")


def test_a_file_that_changes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n")
    data = TextDataset(path, index=tmp_path)
    path.write_text("one\ntoo\n")
    with pytest.raises(UsageError, match=r"a\.txt has changed since its index was made"):
        data[0]


def test_compressed_and_empty_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"one\n"))
    with pytest.raises(UsageError, match="is compressed with gzip"):
        TextDataset(tmp_path / "a.gz", index=tmp_path)
    (tmp_path / "b").touch()
    with pytest.raises(UsageError, match="there is no record in"):
        TextDataset(tmp_path / "b", index=tmp_path)
    with pytest.raises(UsageError, match="names no file: 9 is more than 0"):
        TextDataset(f"{tmp_path}/{{9..0}}.txt", index=tmp_path)


def test_a_line_in_another_encoding_is_refused_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("a\nBär\n".encode("latin-1"))
    data = TextDataset(tmp_path / "a.txt", index=tmp_path / "index")
    assert data[0] == "a"
    with pytest.raises(UsageError, match=r"a\.txt has a line that is not in UTF-8"):
        data[1]
