"""Records in Parquet and Arrow files: rows."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.compute
import pyarrow.parquet
import pytest
from torch.utils.data import DataLoader

from elastic_ps.data.columnar import ArrowDataset, ParquetDataset
from elastic_ps.errors import UsageError
from tests.testing.ranges import PLACES_OF_FILES, file_at, serving

ROWS = 25
WIDE = 3000


def write(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Two files in parts of 10 rows; returns the rows. One column is far larger than the others."""
    rows: list[dict[str, Any]] = []
    for number in range(2):
        own = [
            {"id": 100 * number + i, "name": f"{number}/{i}", "wide": bytes([i, number]) * WIDE}
            for i in range(ROWS)
        ]
        table, path = pyarrow.Table.from_pylist(own), folder / f"{number}.{kind}"
        if kind == "parquet":
            pyarrow.parquet.write_table(
                table, path, row_group_size=10, compression="none", use_dictionary=False
            )
        else:
            with pyarrow.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=10)
        rows += own
    return rows


KINDS = pytest.mark.parametrize(("kind", "make"), [("parquet", ParquetDataset), ("arrow", ArrowDataset)])


@KINDS
def test_the_records_are_the_rows(tmp_path: Path, kind: str, make: Any) -> None:
    rows = write(tmp_path, kind)
    data = make(tmp_path / f"*.{kind}", index=tmp_path / "index")
    assert data.block_sizes() == [10, 10, 5, 10, 10, 5]
    assert data.__getitems__(range(50)) == rows
    assert data.__getitems__([49, 0, 26]) == [rows[49], rows[0], rows[26]]
    assert pickle.loads(pickle.dumps(data))[3] == rows[3]
    with serving(tmp_path) as address:
        there = make(f"{address}/{{0..1}}.{kind}", index=tmp_path / "index")
        assert there.block_digests() == data.block_digests()
        assert there[30] == rows[30]


@KINDS
def test_columns_and_rows_are_chosen(tmp_path: Path, kind: str, make: Any) -> None:
    rows = write(tmp_path, kind)
    wanted = [{"name": row["name"]} for row in rows if row["id"] % 100 > 18]
    for where in ([("id", ">", 18), ("id", "<", 100)], pyarrow.compute.field("id") > 118):
        data = make(tmp_path / f"*.{kind}", columns=["name"], where=where, index=tmp_path / "index")
        found = data.__getitems__(range(len(data)))
        assert found == wanted[:6] if isinstance(where, list) else wanted[6:]
        assert sum(data.block_sizes()) == 6
    with pytest.raises(UsageError, match="there is no record in"):
        make(tmp_path / f"*.{kind}", where=[("id", ">", 1000)], index=tmp_path / "index")


@KINDS
def test_the_order_of_a_set_of_wanted_values_changes_nothing(tmp_path: Path, kind: str, make: Any) -> None:
    """That of a set of strings is another one in each worker."""
    write(tmp_path, kind)
    ordered, reverse = {0, 8}, {8, 0}
    assert list(ordered) != list(reverse)
    data = [
        make(tmp_path / f"*.{kind}", where=[("id", "in", wanted)], index=tmp_path / "index")
        for wanted in (ordered, reverse)
    ]
    assert data[0].block_digests() == data[1].block_digests()
    assert len(data[0]) == 2


@KINDS
def test_only_the_columns_and_parts_that_are_wanted_are_read(tmp_path: Path, kind: str, make: Any) -> None:
    write(tmp_path, kind)
    make(tmp_path / f"*.{kind}", columns=["id"], index=tmp_path / "index")
    data = make(tmp_path / f"*.{kind}", columns=["id"], index=tmp_path / "index")
    assert data.__getitems__([0, 11]) == [{"id": 0}, {"id": 11}]
    narrow = data.bytes_read
    for _ in range(2):
        whole = make(tmp_path / f"*.{kind}", index=tmp_path / "index")
    whole[0]
    assert 10 * WIDE * 2 < whole.bytes_read < 25 * WIDE * 2
    if kind == "parquet":
        assert narrow < whole.bytes_read


@KINDS
def test_a_file_that_changes_is_refused(tmp_path: Path, kind: str, make: Any) -> None:
    write(tmp_path, kind)
    data = make(tmp_path / f"*.{kind}", columns=["id"], index=tmp_path / "index")
    data = pickle.loads(pickle.dumps(data))
    (tmp_path / f"0.{kind}").write_bytes((tmp_path / f"1.{kind}").read_bytes())
    with pytest.raises(UsageError, match="has changed since its index was made"):
        data[0]


@KINDS
@pytest.mark.parametrize("place", PLACES_OF_FILES)
def test_a_file_that_changes_after_its_first_row_is_refused(
    tmp_path: Path, kind: str, make: Any, place: str
) -> None:
    """Its layout stays, and so does its tail: the value of row 11 is none of the statistics there."""
    write(tmp_path, kind)
    path = tmp_path / f"0.{kind}"
    with file_at(path, place) as (url, rewrite):
        data = make(url, index=tmp_path / "index")
        row = data[0]
        copy = pickle.loads(pickle.dumps(data))
        content = path.read_bytes()
        at = content.index(bytes([11, 0]) * WIDE)
        changed = bytes([13, 0]) * WIDE
        rewrite(content[:at] + changed + content[at + len(changed) :])
        for each in (data, copy):
            with pytest.raises(UsageError, match="has changed since its index was made"):
                each[11]
        assert data[0] == row, "the block that was read stays in memory"
        again = make(url, index=tmp_path / "index")
        assert again[11]["wide"] == changed, "another index was made"


@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.parametrize("columns", [None, ["id", "kind"]])
def test_other_values_in_an_arrow_file_of_another_host_are_refused(
    tmp_path: Path, columns: Any, compression: Any
) -> None:
    """No time of writing is known of it: each record batch has a sum."""

    def written(last: int) -> str:
        kinds = pyarrow.array(["a", "b", "a", "b"]).dictionary_encode()
        table = pyarrow.table({"id": [7, 1, 2, last], "kind": kinds, "other": [1, 2, 3, 4]})
        options = pyarrow.ipc.IpcWriteOptions(compression=compression)
        with pyarrow.ipc.new_file(tmp_path / "a", table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=2)
        url = f"memory://{tmp_path.name}/a"
        fsspec.filesystem("memory").pipe_file(url, (tmp_path / "a").read_bytes())
        return url

    before = ArrowDataset(written(3), columns=columns, index=tmp_path / "index")
    assert before[0]["id"] == 7
    after = ArrowDataset(written(4), columns=columns, index=tmp_path / "anew")
    with pytest.raises(UsageError, match="has changed since its index was made"):
        before[3]
    assert after.block_digests() != before.block_digests(), "a worker that comes later is refused"


def test_a_stream_of_arrow_is_refused(tmp_path: Path) -> None:
    table = pyarrow.table({"id": [1, 2]})
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(UsageError, match="is not an Arrow file with an index"):
        ArrowDataset(tmp_path / "a.arrow", index=tmp_path / "index")


@KINDS
def test_a_column_that_there_is_not_is_refused_at_once(tmp_path: Path, kind: str, make: Any) -> None:
    """The second time, the files have an index."""
    write(tmp_path, kind)
    for _ in range(2):
        with pytest.raises(
            UsageError, match=r"there is no column 'nmae' in .*; its columns are id, name, wide"
        ):
            make(tmp_path / f"*.{kind}", columns=["id", "nmae"], index=tmp_path / "index")
        with pytest.raises(UsageError, match="columns is empty; expected names"):
            make(tmp_path / f"*.{kind}", columns=[], index=tmp_path / "index")
        make(tmp_path / f"*.{kind}", columns=["id"], index=tmp_path / "index")


@KINDS
def test_long_conditions_that_differ_have_an_index_each(tmp_path: Path, kind: str, make: Any) -> None:
    write(tmp_path, kind)
    found = []
    for ids in (range(20), [*range(9), 104, *range(10, 20)]):
        data = make(tmp_path / f"*.{kind}", where=[("id", "in", [*ids])], index=tmp_path / "index")
        assert [row["id"] for row in data.__getitems__(range(20))] == sorted(ids)
        found.append(data.block_digests())
    assert found[0] != found[1]


@KINDS
@pytest.mark.parametrize("where", [[("nmae", ">", 1)], [("name", ">", 1)]])
def test_a_condition_that_does_not_fit_is_refused(tmp_path: Path, kind: str, make: Any, where: Any) -> None:
    write(tmp_path, kind)
    with pytest.raises(UsageError, match=r"where=.* does not fit .*columns are id, name, wide"):
        make(tmp_path / f"*.{kind}", where=where, index=tmp_path / "index")


@KINDS
@pytest.mark.parametrize("content", [b"", b"no such file" * 100, b"x"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, kind: str, make: Any, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(UsageError, match=f"/a is not an? {kind.title()} file"):
        make(tmp_path / "a", index=tmp_path / "index")


@KINDS
def test_files_are_found_in_memory(tmp_path: Path, kind: str, make: Any) -> None:
    rows = write(tmp_path, kind)
    memory = fsspec.filesystem("memory")
    for path in tmp_path.glob(f"*.{kind}"):
        memory.pipe_file(f"/{tmp_path.name}/{path.name}", path.read_bytes())
    data = make(f"memory://{tmp_path.name}/*.{kind}", columns=["id", "name"], index=tmp_path / "index")
    assert data.__getitems__(range(50)) == [{"id": row["id"], "name": row["name"]} for row in rows]


@pytest.mark.parametrize("version", ["ETag", ""])
def test_a_block_takes_two_requests(tmp_path: Path, version: str) -> None:
    """The second one asks for the version, or reads the file's tail if the server does not tell a version."""
    rows, asked = write(tmp_path, "parquet"), list[str]()
    with serving(tmp_path, asked=asked, version=version) as address:
        data = ParquetDataset(f"{address}/0.parquet", index=tmp_path / "index")
        data[0]
        asked.clear()
        assert data[11] == rows[11]
        assert asked == ["GET", "HEAD" if version else "GET"]


@KINDS
def test_a_process_of_a_loader_reads_over_http(tmp_path: Path, kind: str, make: Any) -> None:
    rows = write(tmp_path, kind)
    with serving(tmp_path) as address:
        data = make(f"{address}/{{0..1}}.{kind}", index=tmp_path / "index")
        loader = DataLoader(data, batch_size=10, num_workers=1, collate_fn=list)
        assert [row for batch in loader for row in batch] == rows


def test_a_part_of_a_column_is_read(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"s": [{"x": 1, "y": 2}]}), tmp_path / "a")
    assert ParquetDataset(tmp_path / "a", columns=["s.x"], index=tmp_path / "index")[0] == {"x": 1}
