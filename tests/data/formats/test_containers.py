import codecs
import gzip
import json
import os

import pytest

from tests.data.formats.reading import ANSWER, QUESTION
from treering.data import read_trajectories
from treering.data.formats.containers import read_records
from treering.errors import InputError

RECORDS = [{"task_id": number, "messages": [QUESTION, ANSWER]} for number in (1, 2)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()


@pytest.mark.parametrize(
    "content",
    [
        LINES,
        codecs.BOM_UTF8 + LINES,
        gzip.compress(LINES),
        gzip.compress(codecs.BOM_UTF8 + LINES),
        json.dumps(RECORDS).encode(),
        json.dumps(RECORDS, indent=2).encode(),
        gzip.compress(codecs.BOM_UTF8 + b"\n" + json.dumps(RECORDS, indent=2).encode()),
    ],
    ids=["lines", "BOM", "gzip", "gzip BOM", "array", "indented array", "gzip BOM array"],
)
def test_the_content_decides_how_a_file_is_read_and_not_its_name(tmp_path, content):
    for name in ("set.jsonl", "set.json", "set.txt"):
        (tmp_path / name).write_bytes(content)
        assert [one.task_id for one in read_trajectories(tmp_path / name)] == [1, 2]


def test_an_object_over_many_lines_is_one_record(tmp_path):
    text = json.dumps(RECORDS[0], indent=1).encode()
    for name, content in (("one.json", text), ("one.JSON", text[:1] + text[2:]), ("one.json.gz", text[:1] + text[2:])):
        file = tmp_path / name
        file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        assert list(read_records(file)) == [(str(file), RECORDS[0])]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{\n "a": 1,\n "b" 2}', r"set\.json:3: a JSON document holds one record"),
        (b'{\n "a": 1}\n{\n "a": 2}', r"set\.json:3: a file is one JSON document or one JSON object per line"),
        (b'[{"task_id": 1, "tokens": [1]}', r"set\.json:1: a JSON document holds"),
        (b'[{"task_id": 1, "tokens": [1]}, 3]', r"set\.json: record 2: a trajectory is a JSON object, got 3"),
        (b"\x28\xb5\x2f\xfd....", r"set\.json: cannot be read \(ZSTD decompress failed.*; fetch or compress it again"),
        (b"PK\x03\x04....", r"set\.json: this is a zip archive"),
        (b"version https://git-lfs.github.com/spec/v1\n", r"set\.json: this is a pointer of Git LFS"),
        ("{}".encode("utf-16"), "a text in UTF-16; convert it to UTF-8"),
    ],
)
def test_invalid_json_is_refused_with_its_location(tmp_path, content, message):
    file = tmp_path / "set.json"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_trajectories(file)


def test_a_cut_line_of_json_lines_is_named_and_does_not_make_a_document(tmp_path):
    file = tmp_path / "set.jsonl"
    file.write_bytes(LINES[:30] + b"\n" + LINES)
    with pytest.raises(InputError, match=r"set\.jsonl:1: a line must be one JSON object"):
        read_trajectories(file)


def test_pipes_and_plain_folders_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="only regular files are read"):
        read_trajectories(tmp_path / "pipe")
    with pytest.raises(InputError, match="a folder is read if it holds a dataset"):
        read_trajectories(tmp_path)
