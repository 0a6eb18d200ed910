"""A run's own files: a torn last line is left out and named, every other line is given."""

import pytest

from treering.errors import InputError
from treering.schedule.traces.run_lines import whole_lines


@pytest.mark.parametrize("whole", [b"", b'{"a": 1}\n', b'{"a": 1}\n\n{\n'])
@pytest.mark.parametrize("torn", [b"{", b'{"a": "\xc3', b'{"a": 1', b"[" * 100_000])
def test_a_torn_last_line_is_left_out_with_one_note(tmp_path, whole, torn):
    file = tmp_path / "log.jsonl"
    file.write_bytes(whole + torn)
    notes = []
    assert b"".join(line for _, line in whole_lines(file, notes.append)) == whole.replace(b"\n\n", b"\n")
    (note,) = notes
    line = whole.count(b"\n") + 1
    assert note == f"{file}:{line}: the last line is torn, as by a kill while it was written, and is left out"


@pytest.mark.parametrize("text", [b"", b'{"a": 1}', b'{"a": 1}\n', b"{\n", b"{\n{}\n"])
def test_a_line_that_was_written_whole_is_given(tmp_path, text):
    file = tmp_path / "log.jsonl"
    file.write_bytes(text)
    notes = []
    assert b"".join(line for _, line in whole_lines(file, notes.append)) == text
    assert notes == []


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        list(whole_lines(tmp_path / "absent.jsonl", print))
