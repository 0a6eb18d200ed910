import gzip
import json
from pathlib import Path

import pytest

from treering.data.formats.containers import read_records, record_files
from treering.data.formats.record_files import ReadPosition
from treering.errors import InputError

ROWS = [{"task_id": i, "tokens": [i, 5]} for i in range(5)]


def lines(rows: list[dict[str, object]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def records(path: Path) -> list[object]:
    return [record for _, record in read_records(path)]


def zstd(content: bytes) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


def test_a_folder_of_files_is_one_set_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines(ROWS[2:4])))
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS[:2]))
    (tmp_path / "c.json").write_text(json.dumps(ROWS[4:]))
    (tmp_path / "README.md").write_text("no record")
    (tmp_path / ".hidden.jsonl").write_text("no record")
    assert records(tmp_path) == ROWS
    assert [file.name for file in record_files(tmp_path)] == ["a.jsonl", "b.jsonl.gz", "c.json"]
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"{}\nbroken\n"))
    with pytest.raises(InputError, match=r"b\.jsonl\.gz:2: a line must be one JSON object"):
        records(tmp_path)


@pytest.mark.parametrize("document", [False, True])
def test_zstandard_is_read_by_its_content(tmp_path: Path, *, document: bool) -> None:
    file = tmp_path / "set.data"
    file.write_bytes(zstd(json.dumps(ROWS).encode() if document else lines(ROWS)))
    assert records(file) == ROWS
    whole = zstd(lines(ROWS * 500))
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"set\.data"):
        records(file)


@pytest.mark.parametrize("kind", ["plain", "gzip", "zstd", "document", "folder", "parquet"])
def test_the_position_ends_at_the_size_of_what_is_stored(tmp_path: Path, kind: str) -> None:
    rows = ROWS * 400
    file = tmp_path / "set.jsonl"
    if kind == "parquet":
        table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
        pytest.importorskip("pyarrow.parquet").write_table(table, file, row_group_size=300)
    else:
        contents = {"gzip": gzip.compress(lines(rows)), "document": json.dumps(rows).encode()}
        file.write_bytes(zstd(lines(rows)) if kind == "zstd" else contents.get(kind, lines(rows)))
    position, seen = ReadPosition(), []
    for _ in read_records(tmp_path if kind == "folder" else file, position=position):
        seen.append(position.num_read)
    assert seen == sorted(seen)
    assert position.num_read == file.stat().st_size


@pytest.mark.parametrize(
    ("name", "header"),
    [
        *(("set.txt", header) for header in (b"prompt,response,reward", b"task_id\tmessages", b'"id";"text"')),
        ("set.CSV.gz", b"rank,time (s)"),
    ],
)
def test_a_table_as_text_is_refused_by_its_look_or_its_name(tmp_path: Path, name: str, header: bytes) -> None:
    file = tmp_path / name
    content = header + b"\n1,2,3\n"
    file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(InputError, match="a table as text"):
        records(file)
