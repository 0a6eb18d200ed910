"""An array of records is read record by record to the same values as by the standard library."""

import json
from pathlib import Path
from random import Random

import pytest

from treering.data.formats import record_files
from treering.data.formats.containers import document_records
from treering.data.formats.record_files import ReadPosition
from treering.errors import InputError

VALUES = (1, -2.5e3, 12345678901, 'aä😀\n"', "", "\ud800", True, None, [], {}, [[1, "]"]], {"ü": {"b": "x" * 50}})


def damaged(text: bytes, random: Random) -> bytes:
    cut = random.randrange(1, len(text))
    other = random.choice([b"", *(b"%c" % each for each in b'[]{},:"\\ 0\n')])
    return random.choice([text, text[:cut], text[:cut] + other + text[cut + random.randrange(2) :]])


def read_whole(text: bytes) -> list[object] | tuple[str, int, int]:
    """Return the records, or the broken rule with its line and column."""
    try:
        return list(json.loads(text))
    except json.JSONDecodeError as error:
        return error.msg, error.lineno, error.colno


def test_records_and_errors_are_those_of_the_whole_text_whatever_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, file = Random(0), tmp_path / "set.json"
    num_refused = 0
    for _ in range(1500):
        monkeypatch.setattr(record_files, "_PART_BYTES", random.choice([3, 4, 7, 16, 1000]))
        array = json.dumps(
            random.choices(VALUES, k=random.randrange(6)), ensure_ascii=False, indent=random.choice([None, 1])
        )
        text = damaged(array.encode("utf-8", "surrogatepass"), random)
        file.write_bytes(text)
        try:
            expected = read_whole(text)
        except UnicodeDecodeError:
            expected = "UTF-8", 0, 0
        if isinstance(expected, list):
            found = list(document_records(file))
            assert repr([record for _, record in found]) == repr(expected)
            assert [where for where, _ in found] == [f"{file}: record {n}" for n in range(1, len(found) + 1)]
            continue
        num_refused += 1
        rule, line, column = expected
        with pytest.raises(InputError) as refused:
            list(document_records(file))
        if rule == "UTF-8":
            assert str(file) in str(refused.value)
        elif rule == "Extra data":
            assert str(refused.value).startswith(f"{file}:{line}: a file is one JSON document or")
        else:
            assert str(refused.value).startswith(f"{file}:{line}: a JSON document holds")
            assert f"({rule}, column {column})" in str(refused.value)
    assert num_refused > 300


def test_records_are_given_before_the_rest_is_read(tmp_path: Path) -> None:
    file, position = tmp_path / "set.json", ReadPosition()
    file.write_text(json.dumps([{"text": "x" * 1000}] * 2000), encoding="utf-8")
    records = document_records(file, position=position)
    read = [position.num_read for _ in records]
    assert len(read) == 2000
    # A buffer of the file, a part, and the two that a record may span.
    assert max(read[n] - 1000 * n for n in range(2000)) < 5 * (1 << 16)
    assert position.num_read == file.stat().st_size


def test_a_record_far_longer_than_a_part_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_files, "_PART_BYTES", 64)
    file = tmp_path / "set.json"
    file.write_text(json.dumps([1, "y" * 300_000, 2.5], indent=1), encoding="utf-8")
    assert [record for _, record in document_records(file)] == [1, "y" * 300_000, 2.5]
