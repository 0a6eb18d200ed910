"""Rows of Parquet and Arrow files and of Hugging Face datasets on disk, through pyarrow; datasets in parts."""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from treering.data.formats.record_files import ReadPosition
from treering.errors import DataWarning, InputError
from treering.extras import require
from treering.files.writing import read_object

_PART = re.compile(r"(?P<begin>.*\D)(?P<number>\d{1,5})(?P<of>[-_.]of[-_.])(?P<count>\d{1,5})(?P<end>\D.*)?")
_DIGEST = re.compile(r"-[0-9a-f]{16}(?=\.)")
"""Digest of a part that older names on the Hugging Face Hub have after the count."""


def missing_parts(file: Path) -> list[str]:
    """Return the names of the missing parts of a file's dataset; an empty list if the file is not a part.

    Example: with only train-00000-of-00002.parquet, train-00001-of-00002.parquet is missing.
    """
    match = _PART.fullmatch(_DIGEST.sub("", file.name))
    if match is None:
        return []
    found = {_DIGEST.sub("", path.name) for path in file.parent.iterdir() if path.is_file()}
    count, width = int(match["count"]), len(match["number"])
    # Parts are counted from 0, in some datasets from 1.
    names = [f"{match['begin']}{i:0{width}}{match['of']}{match['count']}{match['end'] or ''}" for i in range(count + 1)]
    there = [name for name in names if name in found]
    expected = names[1:] if names[-1] in there and names[0] not in there else names[:-1]
    return [name for name in expected if name not in there]


def check_parts(folder: Path, files: Iterable[Path]) -> None:
    """Check that no part of a dataset is missing."""
    missing = sorted({name for file in files for name in missing_parts(file)})
    if missing:
        raise InputError(
            f"{folder}: the parts of a dataset are read together, and {_listed(missing)}; fetch the folder again, or "
            "name the files that are to be read"
        )


def warn_missing_parts(file: Path) -> None:
    """Warn if the file is a part of a dataset and other parts are missing."""
    if missing := missing_parts(file):
        warnings.warn(f"{file}: this is a part of a dataset, and {_listed(missing)}", DataWarning, stacklevel=3)


def _listed(missing: list[str]) -> str:
    more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
    return f"{missing[0]}{more} missing"


_PARQUET = b"PAR1"
_ARROW_FILE = b"ARROW1"
_ARROW_STREAM = b"\xff\xff\xff\xff"
_SHARD = re.compile(r"(?P<split>.+)-\d{5}-of-\d{5}(-[0-9a-f]{16})?\.parquet")
"""Name of a Parquet file on the Hugging Face Hub; older names end in a digest."""
_DEFAULT_SPLIT = "train"
_AGAIN = "save the dataset again"
_VALUES = ("arguments", "args", "input", "parameters")
"""Columns of objects whose keys are data; a table stores the keys of all rows in each row."""


def is_table(head: bytes) -> bool:
    """Return whether a file with these first bytes is a Parquet file or Arrow data."""
    return head.startswith((_PARQUET, _ARROW_FILE, _ARROW_STREAM))


def is_dataset_folder(folder: Path) -> bool:
    """Return whether a folder holds a dataset: saved by `save_to_disk`, or as Parquet files."""
    return _is_saved(folder) or (folder / "dataset_dict.json").is_file() or bool(_parquet_files(folder))


def table_records(file: Path, position: ReadPosition | None = None) -> Iterator[tuple[str, object]]:
    """Yield each row of a table with its location; keys with null values inside objects are dropped."""
    require(f"{file.name}, a table of Parquet or Arrow,", "pyarrow")
    import pyarrow

    has_warned = False
    try:
        for number, row in enumerate(_rows(file, position or ReadPosition()), start=1):
            record, has_nulls = _without_nulls(row)
            if has_nulls and not has_warned:
                has_warned = True
                warnings.warn(
                    f"{file}: null values in the arguments of calls or in schemas are read as absent keys, because a "
                    "table cannot tell the two apart; store such objects as JSON text to keep them",
                    DataWarning,
                    stacklevel=2,
                )
            yield f"{file}: row {number}", record
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{file}: a table cannot be read ({' '.join(str(error).split())}); fetch it again") from error


def folder_records(folder: Path, position: ReadPosition | None = None) -> Iterator[tuple[str, object]]:
    """Yield each row of a dataset in a folder; if it has several splits, of the split "train".

    Raises:
        InputError: the folder has no dataset, parts are missing, or none of several splits is "train".
        MissingExtraError: pyarrow is missing.
    """
    if _is_saved(folder):
        yield from _saved_records(folder, position)
        return
    if (folder / "dataset_dict.json").is_file():
        splits = read_object(folder / "dataset_dict.json", fix=_AGAIN).get("splits")
        names = [str(name) for name in splits] if isinstance(splits, list) else []
        yield from _saved_records(folder / _split(folder, names, f"name {folder}/SPLIT"), position)
        return
    files = _parquet_files(folder)
    if not files:
        raise InputError(
            f"{folder}: a folder is read if it holds a dataset saved to disk, Parquet files or files of JSON, and it "
            "has none; name its files"
        )
    names = sorted({match["split"] for file in files if (match := _SHARD.fullmatch(file.name))})
    if len(names) > 1:
        chosen = _split(folder, names, "name its files")
        files = [file for file in files if (match := _SHARD.fullmatch(file.name)) and match["split"] == chosen]
    check_parts(folder, files)
    for file in files:
        yield from table_records(file, position=position)


def _is_saved(folder: Path) -> bool:
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def _parquet_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.parquet")) or sorted((folder / "data").glob("*.parquet"))


def _split(folder: Path, names: list[str], advice: str) -> str:
    if len(names) == 1:
        return names[0]
    if _DEFAULT_SPLIT not in names:
        raise InputError(f"{folder}: one split of a dataset is read, got {', '.join(names) or 'none'}; {advice}")
    warnings.warn(
        f"{folder}: of the splits {', '.join(names)}, {_DEFAULT_SPLIT} is read; {advice} for another",
        DataWarning,
        stacklevel=2,
    )
    return _DEFAULT_SPLIT


def _saved_records(folder: Path, position: ReadPosition | None) -> Iterator[tuple[str, object]]:
    state = read_object(folder / "state.json", fix=_AGAIN)
    if state.get("_indices_data_files"):
        raise InputError(f"{folder}: a dataset with an index of its rows is not read; save it again, or as Parquet")
    files = state.get("_data_files")
    if not isinstance(files, list) or not all(isinstance(one, dict) and "filename" in one for one in files):
        raise InputError(f"{folder / 'state.json'}: it lists the dataset's files, and has none; save the dataset again")
    for one in files:
        file = folder / str(one["filename"])
        if not file.is_file():
            raise InputError(
                f"{folder}: the parts of a dataset are read together, and {file.name} is missing; fetch it"
            )
        yield from table_records(file, position=position)


def _rows(file: Path, position: ReadPosition) -> Iterator[Mapping[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    before, size = position.num_read, file.stat().st_size
    num_rows = num_done = 0
    with pyarrow.OSFile(str(file), "rb") as source:
        head = source.read(6)
        source.seek(0)
        if head.startswith(_PARQUET):
            table = parquet.ParquetFile(source)
            num_rows, batches = table.metadata.num_rows, table.iter_batches(batch_size=256)
        elif head.startswith(_ARROW_FILE):
            reader = pyarrow.ipc.open_file(source)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            batches = pyarrow.ipc.open_stream(source)
        for batch in batches:
            # Parquet files are not read sequentially.
            num_done += batch.num_rows
            position.num_read = before + (size * num_done // num_rows if num_rows else source.tell())
            yield from batch.to_pylist()


def _without_nulls(row: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the row without null values in objects, and whether an object whose keys are data had one."""
    has_nulls = False

    def clean(value: object, *, is_data: bool) -> object:
        nonlocal has_nulls
        if isinstance(value, list) and value and all(isinstance(one, tuple) for one in value):
            # The value is of a column of maps.
            value = dict(value)
        if isinstance(value, list):
            return [clean(one, is_data=is_data) for one in value]
        if not isinstance(value, dict):
            return value
        has_nulls |= is_data and None in value.values()
        return {
            key: clean(one, is_data=is_data or (key in _VALUES and isinstance(one, dict)))
            for key, one in value.items()
            if one is not None
        }

    record = clean(dict(row), is_data=False)
    assert isinstance(record, dict), "a row is an object"
    return record, has_nulls
