"""Records in tar files, in webdataset's form."""

from __future__ import annotations

import io
import pickle
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import fsspec
import pytest
from torch.utils.data import DataLoader

from elastic_ps.data.files import BESIDE
from elastic_ps.data.tar import TarDataset
from elastic_ps.errors import UsageError
from tests.testing.ranges import PLACES_OF_FILES, file_at, serving


def write_tar(path: Path, members: dict[str, bytes], mode: Any = "w") -> None:
    with tarfile.open(path, mode) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def write_shards(folder: Path, shards: int = 3, records: int = 10) -> list[dict[str, Any]]:
    """Tar files `000.tar`, ...; returns what is in them."""
    written = []
    for shard in range(shards):
        members: dict[str, bytes] = {}
        for number in range(records):
            key = f"part/{shard}{number:03}"
            fields = {"txt": f"record {shard} {number}".encode() * (number + 1), "seg.cls": bytes([number])}
            members |= {f"{key}.{name}": content for name, content in fields.items()}
            written.append({"__key__": key, **fields})
        write_tar(folder / f"{shard:03}.tar", members)
    return written


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "elastic-ps" / "index"


@pytest.mark.parametrize("block_bytes", [1, 5000, 1 << 20])
def test_the_records_are_those_of_the_files(tmp_path: Path, block_bytes: int) -> None:
    written = write_shards(tmp_path)
    data = TarDataset(f"{tmp_path}/{{000..002}}.tar", block_bytes=block_bytes)
    assert len(data) == 30
    assert [data[index] for index in range(30)] == written
    chosen = [29, 3, 4, 11, 0, -1 % 30]
    assert data.__getitems__(chosen) == [written[index] for index in chosen]
    assert sum(data.block_sizes()) == 30
    assert len(data.block_sizes()) == {1: 30, 5000: 15, 1 << 20: 3}[block_bytes]


def test_files_are_found_by_a_pattern_in_memory_and_over_http(tmp_path: Path) -> None:
    written = write_shards(tmp_path)
    memory = fsspec.filesystem("memory")
    for path in tmp_path.glob("*.tar"):
        memory.pipe_file(f"/{tmp_path.name}/{path.name}", path.read_bytes())
    assert list(map(TarDataset(f"memory://{tmp_path.name}/*.tar").__getitem__, range(30))) == written
    with serving(tmp_path) as address:
        data = TarDataset(address + "/{000..002}.tar")
        assert data.__getitems__(range(30)) == written


def test_a_process_of_a_loader_reads_over_http(tmp_path: Path) -> None:
    written = write_shards(tmp_path)
    with serving(tmp_path) as address:
        data = TarDataset(address + "/{000..002}.tar")
        loader = DataLoader(data, batch_size=10, num_workers=1, collate_fn=list)
        assert [record for batch in loader for record in batch] == written


def test_a_server_without_ranges_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)
    with (
        serving(tmp_path, ranges=False) as address,
        pytest.raises(UsageError, match="Copy it to a file, or to"),
    ):
        TarDataset(f"{address}/000.tar")


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_a_compressed_tar_is_refused(tmp_path: Path, mode: str) -> None:
    write_tar(tmp_path / "a.tar", {"a.txt": b"1"}, mode)
    with pytest.raises(UsageError, match=r"a\.tar is compressed with .*Decompress it"):
        TarDataset(tmp_path / "a.tar")


def test_a_sparse_member_is_refused(tmp_path: Path) -> None:
    """A tar has only its parts that are not zero, so its bytes are not where its size says."""
    with (tmp_path / "a.npy").open("wb") as file:
        file.truncate(1 << 20)
        file.write(b"x")
    subprocess.run(["tar", "--sparse", "-cf", "a.tar", "a.npy"], cwd=tmp_path, check=True)
    with pytest.raises(UsageError, match=r"a\.npy in .*a\.tar is a sparse file"):
        TarDataset(tmp_path / "a.tar")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"nothing of the kind" * 100)
    with pytest.raises(UsageError, match="is not a readable tar file"):
        TarDataset(tmp_path / "a.tar")
    write_tar(tmp_path / "b.tar", {"a.txt": b"1" * 2000})
    (tmp_path / "b.tar").write_bytes((tmp_path / "b.tar").read_bytes()[:1500])
    with pytest.raises(UsageError, match="is not a readable tar file"):
        TarDataset(tmp_path / "b.tar")
    write_tar(tmp_path / "c.tar", {"README": b"1"})
    with pytest.raises(UsageError, match="there is no record in"):
        TarDataset(tmp_path / "c.tar")
    with pytest.raises(UsageError, match="no file matches"):
        TarDataset(tmp_path / "*.zip")


@pytest.mark.parametrize("names", [("a.txt", "a.txt"), ("a.TXT", "a.txt")])
def test_two_fields_of_one_name_are_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name))
    with pytest.raises(UsageError, match="the record a has two files for the field txt"):
        TarDataset(tmp_path / "a.tar")


def test_what_macos_adds_to_a_tar_is_no_record(tmp_path: Path) -> None:
    members = {"d/.DS_Store": b"x"}
    for key in ("d/1", "d/2"):
        for field in ("txt", "cls"):
            folder, _, name = key.partition("/")
            members |= {f"{folder}/._{name}.{field}": b"Mac OS X", f"{key}.{field}": field.encode()}
    write_tar(tmp_path / "a.tar", members)
    expected = [{"__key__": key, "txt": b"txt", "cls": b"cls"} for key in ("d/1", "d/2")]
    data = TarDataset(tmp_path / "a.tar")
    assert [data[index] for index in range(len(data))] == expected


def test_the_index_is_made_once(tmp_path: Path, cache: Path) -> None:
    write_shards(tmp_path, shards=1, records=200)
    first = TarDataset(tmp_path / "000.tar")
    assert first.bytes_read > 200 * 2 * 512
    again = TarDataset(tmp_path / "000.tar")
    assert again.bytes_read == 0
    assert again.block_digests() == first.block_digests()
    assert len(list(cache.iterdir())) == 1


def test_an_index_beside_the_file_is_for_all_hosts(tmp_path: Path, cache: Path) -> None:
    written = write_shards(tmp_path, shards=1)
    TarDataset(tmp_path / "000.tar", index=BESIDE)
    assert not cache.exists()
    there = tmp_path / "there"
    there.mkdir()
    for path in tmp_path.glob("000.tar*"):
        (there / path.name).write_bytes(path.read_bytes())
    data = TarDataset(there / "000.tar")
    assert data.bytes_read == 0
    assert data[5] == written[5]


def test_a_file_that_changes_is_refused(tmp_path: Path) -> None:
    """Even if it has the length that it had."""
    write_shards(tmp_path, shards=1)
    before = TarDataset(tmp_path / "000.tar")
    content = (tmp_path / "000.tar").read_bytes()
    (tmp_path / "000.tar").write_bytes(content.replace(b"part/0004", b"part/0XXX"))
    with pytest.raises(UsageError, match=r"000\.tar has changed since its index was made"):
        before[4]
    assert TarDataset(tmp_path / "000.tar", index=tmp_path / "anew").block_digests() != before.block_digests()
    (tmp_path / "000.tar").write_bytes(content[:2000])
    with pytest.raises(UsageError, match=r"000\.tar has changed since its index was made"):
        before[4]


def test_other_content_under_the_same_headers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, {"0.jpg": b"j" * 5000, "0.cls": b"3"})
    before = TarDataset(path)
    write_tar(path, {"0.jpg": b"j" * 5000, "0.cls": b"4"})
    with pytest.raises(UsageError, match=r"a\.tar has changed since its index was made"):
        before[0]
    assert TarDataset(path, index=tmp_path / "anew").block_digests() != before.block_digests()


@pytest.mark.parametrize("place", PLACES_OF_FILES)
@pytest.mark.parametrize("size", [6000, 3 << 20])
def test_a_change_far_behind_a_members_first_bytes_is_refused(tmp_path: Path, size: int, place: str) -> None:
    path, large = tmp_path / "a.tar", bytes(size)
    write_tar(path, {"0.jpg": large, "0.cls": b"3", "1.jpg": large, "1.cls": b"4"})
    with file_at(path, place) as (url, rewrite):
        data = TarDataset(url, block_bytes=1)
        assert data[0]["jpg"] == large
        content = bytearray(path.read_bytes())
        content[-(1 << 14)] = 1  # tarfile fills up to 10,240 bytes
        content[content.rindex(b"1.cls") - 1000] = 1
        rewrite(bytes(content))
        with pytest.raises(UsageError, match=r"a\.tar has changed since its index was made"):
            data[1]


def test_a_block_is_read_once_while_it_is_kept(tmp_path: Path) -> None:
    write_shards(tmp_path)
    TarDataset(tmp_path / "*.tar")
    data = TarDataset(tmp_path / "*.tar")
    total = sum(path.stat().st_size for path in tmp_path.glob("*.tar"))
    for index in [*range(0, 20, 3), *range(19, -1, -1)]:
        data[index]
    two = data.bytes_read
    assert two <= total * 2 / 3
    data.keep_blocks(1)
    data[25], data[0]
    assert data.bytes_read > two


def test_a_copy_for_another_process_reads_by_itself(tmp_path: Path) -> None:
    written = write_shards(tmp_path, shards=1)
    data = TarDataset(tmp_path / "000.tar", transform=str)
    data[0]
    assert pickle.loads(pickle.dumps(data))[9] == str(written[9])
