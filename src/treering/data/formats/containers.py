"""Records of a file or folder: JSON Lines, one JSON document, or a table."""

import codecs
import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import MappingProxyType

from treering.data.formats.arrow import (
    check_parts,
    folder_records,
    is_dataset_folder,
    is_table,
    table_records,
    warn_missing_parts,
)
from treering.data.formats.record_files import (
    ReadPosition,
    content_parts,
    first_bytes,
    is_json,
    numbered_lines,
    whole_lines,
)
from treering.errors import InputError

_BLANK = " \t\n\r"
_NEAR_END = 16
"""Characters at the end of a buffer in which a literal, an escape or a number may be incomplete."""


def document_records(
    path: Path, parse_float: Callable[[str], float] | None = None, position: ReadPosition | None = None
) -> Iterator[tuple[str, object]]:
    """Yield the records of an array with their locations, "FILE: record N", or the one record of another document."""
    try:
        if next((part.lstrip()[:1] for part in content_parts(path) if part.strip()), b"") != b"[":
            yield str(path), json.loads(b"".join(content_parts(path, position)), parse_float=parse_float)
            return
        text = _Text(content_parts(path, position), json.JSONDecoder(parse_float=parse_float))
        for number, record in enumerate(_elements(text), start=1):
            yield f"{path}: record {number}", record
    except json.JSONDecodeError as error:
        rule = f"a JSON document holds one record or an array of them ({error.msg}, column {error.colno}); repair it"
        if error.msg == "Extra data":
            rule = (
                "a file is one JSON document or one JSON object per line, got another value here; jq -c . writes lines"
            )
        raise InputError(f"{path}:{error.lineno}: {rule}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: a JSON document must be UTF-8, got {error}; convert the file") from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: a JSON document holds one record or an array of them ({error}); repair it"
        ) from error


class _Text:
    """Buffer over the text of a file; errors count lines and columns from the start of the file."""

    def __init__(self, parts: Iterator[bytes], decoder: json.JSONDecoder) -> None:
        self._parts, self._decoder = parts, decoder
        self._utf8 = codecs.getincrementaldecoder("utf-8")("surrogatepass")
        self._text, self._start, self._is_whole = "", 0, False
        self._num_lines = self._num_columns = 0

    def peek(self) -> str:
        """Skip blanks and return the next character; "" at the end."""
        while True:
            size = len(self._text)
            while self._start < size and self._text[self._start] in _BLANK:
                self._start += 1
            if self._start < size or self._is_whole:
                return self._text[self._start : self._start + 1]
            self._read()

    def skip(self) -> None:
        self._start += 1

    def value(self) -> object:
        """Read a JSON value."""
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._start)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string") or error.pos > len(self._text) - _NEAR_END
                if self._is_whole or not is_cut:
                    raise self.error(error.msg, error.pos) from None
            else:
                # A number near the end of the buffer may be incomplete.
                if self._is_whole or end < len(self._text) - _NEAR_END:
                    self._start = end
                    return value
            self._read()

    def error(self, rule: str, position: int | None = None) -> json.JSONDecodeError:
        """Return an error at an index of the buffer, by default at the next character."""
        error = json.JSONDecodeError(rule, self._text, self._start if position is None else position)
        error.colno += self._num_columns if error.lineno == 1 else 0
        error.lineno += self._num_lines
        return error

    def _read(self) -> None:
        """Drop what was parsed and at least double the rest, so that a long record is not parsed often."""
        passed, left = self._text[: self._start], self._text[self._start :]
        lines = passed.count("\n")
        self._num_lines += lines
        self._num_columns = len(passed) - passed.rfind("\n") - 1 + (0 if lines else self._num_columns)
        read, num_read = [left], 0
        while num_read <= len(left) and not self._is_whole:
            part = next(self._parts, b"")
            self._is_whole = not part
            read.append(self._utf8.decode(part, final=self._is_whole))
            num_read += len(part)
        self._text, self._start = "".join(read), 0


def _elements(text: _Text) -> Iterator[object]:
    """Yield the elements of the array that is the text."""
    if text.peek() != "[":
        raise text.error("Expecting value")
    text.skip()
    if text.peek() == "]":
        text.skip()
    else:
        yield text.value()
        while text.peek() == ",":
            text.skip()
            yield text.value()
        if text.peek() != "]":
            raise text.error("Expecting ',' delimiter")
        text.skip()
    if text.peek():
        raise text.error("Extra data")


_UNREAD = MappingProxyType(
    {
        b"\xff\xfe": "a text in UTF-16; convert it to UTF-8",
        b"\xfe\xff": "a text in UTF-16; convert it to UTF-8",
        b"PK\x03\x04": "a zip archive; unpack it",
        b"BZh": "a bzip2 file; decompress it with bunzip2",
        b"\xfd7zXZ": "an xz file; decompress it with unxz",
        b"version https://git-lfs": "a pointer of Git LFS and not the file itself; fetch it with git lfs pull",
    }
)
"""First bytes of files that cannot be read, each with its kind and the fix."""

_ENDING = re.compile(r"^[^.].*\.(jsonl|ndjson|json)(\.(gz|zst))?$")
"""Names of record files in a folder."""
_HEADER = re.compile(rb'"?[A-Za-z_][\w .]*"?([,;\t]"?[A-Za-z_][\w .]*"?)+')
"""First line of a CSV or TSV file."""


def read_records(
    path: Path,
    *,
    may_be_torn: bool = False,
    parse_float: Callable[[str], float] | None = None,
    position: ReadPosition | None = None,
) -> Iterator[tuple[str, object]]:
    """Return an iterator over the records of a path, each with its location for errors.

    A location is "FILE:LINE", "FILE: record N", "FILE: row N" or "FILE".

    The path is a file of JSON Lines, a JSON document (an array of records, or one record), plain or compressed by gzip
    or zstandard, a Parquet or Arrow file, or a folder of such files, also one that Hugging Face's `save_to_disk` or the
    Hub writes. The content decides the type, not the name.

    If a kill may have cut the last line of the file, `may_be_torn` skips it; see `whole_lines`. `parse_float` converts
    the text of a JSON number with a fraction, and `position` counts the bytes that are read.

    Raises:
        InputError: the path cannot be read, or JSON is broken, as "FILE:LINE: rule, value, fix".
        MissingExtraError: the file is a table, and pyarrow is missing.

    Example: a file with the two lines `{"a": 1}` and `{"a": 2}` yields ("FILE:1", {"a": 1}) and ("FILE:2", {"a": 2}).
    """
    if not path.exists():
        raise InputError(f"{path}: cannot be read (No such file or directory); {did_you_mean([path])}check the path")
    if path.is_dir() and (files := record_files(path)):
        check_parts(path, files)
        return (one for file in files for one in _file_records(file, may_be_torn, parse_float, position))
    if path.is_dir():
        return folder_records(path, position)
    warn_missing_parts(path)
    return _file_records(path, may_be_torn, parse_float, position)


def record_files(folder: Path) -> list[Path]:
    """Return the record files in a folder, sorted by name; an empty list for a folder with a table dataset."""
    if is_dataset_folder(folder):
        return []
    return sorted(file for file in folder.iterdir() if _ENDING.search(file.name.lower()) and file.is_file())


def source_files(path: Path) -> list[Path]:
    """Return the files from which the records of a path are read: the path itself, or files of the folder.

    A dataset has all files of its folder and its subfolders, except hidden files. A folder without records has none.
    Links are followed.
    """
    if not path.is_dir():
        return [path]
    if not is_dataset_folder(path):
        return record_files(path)
    found = (file for pattern in ("[!.]*", "[!.]*/[!.]*") for file in path.glob(pattern))
    return sorted(file for file in found if file.is_file())


def _file_records(
    path: Path, may_be_torn: bool, parse_float: Callable[[str], float] | None, position: ReadPosition | None
) -> Iterator[tuple[str, object]]:
    head = first_bytes(path, 64)
    if advice := next((advice for magic, advice in _UNREAD.items() if head.startswith(magic)), None):
        raise InputError(f"{path}: this is {advice}")
    if is_table(head):
        return table_records(path, position=position)
    begin = next((part.lstrip() for part in content_parts(path) if part.strip()), b"")
    # A JSON array may be on one line.
    if begin.startswith(b"["):
        return document_records(path, parse_float, position)
    first = next(numbered_lines(path), None)
    if first is None:
        return iter(())
    # An object over several lines; a line of JSON Lines that was cut is longer than "{".
    text, name = first[1].strip(), path.name.lower().removesuffix(".gz").removesuffix(".zst")
    if text == b"{" or (name.endswith((".json", ".traj")) and not is_json(text)):
        return document_records(path, parse_float, position)
    if (name.endswith((".csv", ".tsv")) or _HEADER.fullmatch(text)) and not is_json(text):
        raise InputError(
            f"{path}: this is a table as text, in which lists and numbers have no certain format; convert it to JSON "
            f"Lines, such as by pandas.read_csv({path.name!r}).to_json('set.jsonl', orient='records', lines=True)"
        )
    lines = whole_lines(path, position) if may_be_torn else numbered_lines(path, position)
    return _line_records(path, lines, parse_float)


def _line_records(
    path: Path, lines: Iterable[tuple[int, bytes]], parse_float: Callable[[str], float] | None
) -> Iterator[tuple[str, object]]:
    for number, line in lines:
        where = f"{path}:{number}"
        try:
            record = json.loads(line, parse_float=parse_float)
        except UnicodeDecodeError as error:
            raise InputError(f"{where}: a line must be UTF-8, got {error}; convert the file") from error
        except (ValueError, RecursionError, OverflowError) as error:
            raise InputError(f"{where}: a line must be one JSON object ({error}); repair the line") from error
        yield where, record


def did_you_mean(missing: Iterable[Path]) -> str:
    """Return a question with the existing paths whose names are nearest to the missing ones; "" if there are none.

    Example: for `runs/trace.jsonl` next to `runs/traces.jsonl` it is "did you mean runs/traces.jsonl? ".
    """
    found = []
    for path in missing:
        names = os.listdir(path.parent) if path.parent.is_dir() else []
        found += [path.parent / name for name in difflib.get_close_matches(path.name, names, n=2)]
    return f"did you mean {' or '.join(str(path) for path in found[:3])}? " if found else ""
