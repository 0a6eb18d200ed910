"""The records of a file or folder, whatever holds them: JSON Lines, one JSON document, or a table."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import MappingProxyType

from treering.data.formats.files import (
    ReadPosition,
    content_parts,
    first_bytes,
    is_json,
    numbered_lines,
    whole_lines,
)
from treering.data.formats.json_document import document_records
from treering.data.formats.parts import check_parts, say_missing_parts
from treering.data.formats.tables import folder_records, is_dataset_folder, is_table, table_records
from treering.data.locate import did_you_mean
from treering.errors import InputError

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
"""The first bytes of files that people have and that hold no records as they are, with what to do."""

_ENDING = re.compile(r"^[^.].*\.(jsonl|ndjson|json)(\.(gz|zst))?$")
"""The names of files of records in a folder."""
_HEADER = re.compile(rb'"?[A-Za-z_][\w .]*"?([,;\t]"?[A-Za-z_][\w .]*"?)+')
"""The first line of a table as text."""


def read_records(
    path: Path,
    *,
    may_be_torn: bool = False,
    parse_float: Callable[[str], float] | None = None,
    position: ReadPosition | None = None,
) -> Iterator[tuple[str, object]]:
    """Each record of a path with its place for errors: "FILE:LINE", "FILE: record N", "FILE: row N" or "FILE".

    Read are JSON Lines and JSON documents (an array of records, or one record), plain or compressed by gzip or
    zstandard, Parquet and Arrow files, and folders of such files, also as Hugging Face's `save_to_disk` and the Hub
    write them. The content decides, not the name.

    Args:
        path: of a file or folder.
        may_be_torn: a run wrote the file, and a kill may have cut its last line; see `whole_lines`.
        parse_float: makes the value of a number with a fraction from its text in JSON; None takes Python's float.
        position: counts the bytes that are read.

    Raises:
        InputError: a path that cannot be read, or broken JSON, as "FILE:LINE: rule, value, fix".
        MissingExtraError: a table without pyarrow.

    Example: a file with the two lines `{"a": 1}` and `{"a": 2}` gives ("FILE:1", {"a": 1}) and ("FILE:2", {"a": 2}).
    """
    if not path.exists():
        raise InputError(f"{path}: cannot be read (No such file or directory); {did_you_mean([path])}check the path")
    if path.is_dir() and (files := record_files(path)):
        check_parts(path, files)
        return (one for file in files for one in _file_records(file, may_be_torn, parse_float, position))
    if path.is_dir():
        return folder_records(path, position)
    say_missing_parts(path)
    return _file_records(path, may_be_torn, parse_float, position)


def record_files(folder: Path) -> list[Path]:
    """The files of records in a folder that holds no table, by name; empty if there is none.

    Example: of `b.jsonl.gz`, `a.jsonl` and `README.md` they are the first two, `a.jsonl` first.
    """
    if is_dataset_folder(folder):
        return []
    return sorted(file for file in folder.iterdir() if _ENDING.search(file.name.lower()) and file.is_file())


def source_files(path: Path) -> list[Path]:
    """The files that the records of a path are read from, links followed: itself, or those of a folder.

    Of a dataset they are all files of its folder and of those in it, hidden ones left out; of a folder without records
    there are none.

    Example: of a folder with `data/train-00000-of-00001.parquet` and `README.md` they are these two.
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
    # An array may be one line.
    if begin.startswith(b"["):
        return document_records(path, parse_float, position)
    first = next(numbered_lines(path), None)
    if first is None:
        return iter(())
    if _is_object(first[1].strip(), path):
        return document_records(path, parse_float, position)
    _check_no_csv(path, first[1])
    lines = whole_lines(path, position) if may_be_torn else numbered_lines(path, position)
    return _line_records(path, lines, parse_float)


def _check_no_csv(path: Path, line: bytes) -> None:
    is_likely = _name(path).endswith((".csv", ".tsv")) or _HEADER.fullmatch(line.strip())
    if not is_likely or is_json(line.strip()):
        return
    raise InputError(
        f"{path}: this is a table as text, in which lists and numbers have no certain form; convert it to JSON "
        f"Lines, such as by pandas.read_csv({path.name!r}).to_json('set.jsonl', orient='records', lines=True)"
    )


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


def _is_object(text: bytes, path: Path) -> bool:
    """Whether a file with this first line is one JSON object, over several lines."""
    # Only an object that is written over several lines ends its first line so; a cut line of JSON Lines does not.
    return text == b"{" or (_name(path).endswith((".json", ".traj")) and not is_json(text))


def _name(path: Path) -> str:
    """The name of a file in lower case, without the ending of its compression."""
    return path.name.lower().removesuffix(".gz").removesuffix(".zst")
