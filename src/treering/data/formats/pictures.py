"""Finds the pictures of a record, in the forms that datasets have, and puts each where its part stands.

Forms: parts of OpenAI (`image_url`), of the Responses API (`input_image`), of Anthropic (`source`) and of Qwen and
transformers (`{"type": "image", "image": ...}`), and TRL's columns `images` and `image` beside parts
`{"type": "image"}`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from treering.data.formats.fields import is_blank, show
from treering.data.pictures.source import PictureSource, base64_source, named_source
from treering.errors import InputError

PICTURE_PART = "picture"
"""The type of a part that holds a `PictureSource`; no file can write one."""
COLUMNS = ("images", "image")
"""Columns of pictures beside the messages."""
MAX_PICTURES = 1024
"""Of a record."""

BEFORE_TEXT = "pictures without a part of their own stand before the first user's text, as TRL puts them"
"""The note on records whose messages have no part for the pictures beside them."""

_MESSAGES = (("messages",), ("prompt", "completion"), ("prompt", "chosen"), ("prompt", "rejected"))
"""Keys of messages that are read in a row: each takes the pictures of the columns from the first one on."""
_TYPES = ("image", "image_url", "input_image")
_VALUES = ("image", "image_url", "url", "path", "base64", "source")
"""Keys of a part that has its own picture."""
_SIZES = ("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width")


def with_pictures(
    record: Mapping[str, Any], folder: Path, where: str, note: Callable[[str], None]
) -> Mapping[str, Any]:
    """The record with a part of type "picture" for each picture of its messages; the same record if it has none.

    Args:
        record: a record of messages; other formats have no pictures.
        folder: of the data file.
        where: place of the record, for errors.
        note: told where pictures of the columns have no part, and stand before the first user's text.

    Raises:
        InputError: an address of the network, another number of pictures than of parts for them, or a part that no
            rule reads.

    Example: of the text `<image>` nothing is made; of the part `{"type": "image_url", "image_url": {"url": "a.png"}}`
    it is `{"type": "picture", "picture": PictureSource(folder=folder, file="a.png")}`.
    """
    columns = [key for key in COLUMNS if not is_blank(record.get(key))]
    found = dict(record)
    is_read = False
    for keys in _MESSAGES:
        in_a_row = [key for key in keys if isinstance(record.get(key), list)]
        if not in_a_row or (keys[0] == "prompt" and not any(key in record for key in keys[1:])):
            continue
        taken = _Column(_of_columns(record, columns, folder, where), columns)
        messages = {key: record[key] for key in in_a_row}
        if columns and not any(_has_parts(one) for key in in_a_row for one in messages[key]):
            messages[in_a_row[0]] = _before_first_text(messages[in_a_row[0]], taken.num_left)
            note(BEFORE_TEXT)
        for key, given in messages.items():
            found[key] = [_message(one, taken, folder, f"{where}: {key}[{i}]") for i, one in enumerate(given)]
        taken.check_empty(where)
        is_read = True
    if not is_read:
        return record
    return {key: value for key, value in found.items() if key not in columns}


class _Column:
    """The pictures beside the messages, in order."""

    def __init__(self, sources: list[PictureSource], keys: Sequence[str]) -> None:
        self._sources = iter(sources)
        self.num_left = self._num = len(sources)
        self._keys = " and ".join(keys)

    def take(self, where: str) -> PictureSource:
        if not self.num_left:
            raise InputError(
                f"{where}: a part of a picture without its own has one in images, which has {self._num}; add it"
            )
        self.num_left -= 1
        return replace(next(self._sources), where=where)

    def check_empty(self, where: str) -> None:
        if self.num_left:
            raise InputError(
                f"{where}: {self._keys} has {self._num} pictures, and the messages have "
                f'{self._num - self.num_left} parts {{"type": "image"}} for them; add parts where the pictures stand'
            )


def _of_columns(record: Mapping[str, Any], columns: Sequence[str], folder: Path, where: str) -> list[PictureSource]:
    values = [one for key in columns for one in (record[key] if isinstance(record[key], list) else [record[key]])]
    if len(columns) > 1:
        raise InputError(f"{where}: pictures stand in images or in image, and this record has both; keep one of them")
    if len(values) > MAX_PICTURES:
        raise InputError(f"{where}: a record has at most {MAX_PICTURES} pictures, got {len(values)}; split it")
    return [_source(one, folder, f"{where}: {columns[0]}[{i}]") for i, one in enumerate(values)]


def _has_parts(record: object) -> bool:
    content = record.get("content") if isinstance(record, dict) else None
    return any(map(_is_picture, content)) if isinstance(content, list) else _is_picture(content)


def _before_first_text(messages: Sequence[Any], count: int) -> list[Any]:
    """Messages with parts for pictures before the first text of a user, which is what TRL makes of them."""
    changed = list(messages)
    for i, one in enumerate(changed):
        if isinstance(one, dict) and one.get("role") == "user" and isinstance(one.get("content"), str):
            changed[i] = {**one, "content": [*({"type": "image"} for _ in range(count)), one["content"]]}
            break
    return changed


def _message(record: object, column: _Column, folder: Path, where: str) -> object:
    if not isinstance(record, dict):
        return record
    content = [record["content"]] if isinstance(record.get("content"), dict) else record.get("content")
    if not isinstance(content, list) or not any(map(_is_picture, content)):
        return record
    if sum(map(_is_picture, content)) > MAX_PICTURES:
        raise InputError(f"{where}: a message has at most {MAX_PICTURES} pictures; split it")
    return {**record, "content": list(_parts(content, column, folder, f"{where}.content"))}


def _parts(content: Sequence[object], column: _Column, folder: Path, where: str) -> Iterator[object]:
    for i, part in enumerate(content):
        if not _is_picture(part):
            yield part
            continue
        assert isinstance(part, dict), "a picture's part is an object"
        yield {"type": PICTURE_PART, PICTURE_PART: _own(part, column, folder, f"{where}[{i}]")}


def _is_picture(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in _TYPES


def _own(part: Mapping[str, Any], column: _Column, folder: Path, where: str) -> PictureSource:
    if sizes := [key for key in _SIZES if not is_blank(part.get(key))]:
        raise InputError(
            f"{where}.{sizes[0]} changes what the processor sees and is not read, got {show(part[sizes[0]])}; set it "
            "in the model's preprocessor_config.json, for all pictures alike"
        )
    values = [key for key in _VALUES if not is_blank(part.get(key))]
    if len(values) > 1:
        raise InputError(f"{where} is one picture, and {' and '.join(values)} are two; keep one of them")
    if not values:
        return column.take(where)
    key = values[0]
    if key == "base64" and isinstance(part[key], str):
        return base64_source(part[key], where)
    return _source(part[key], folder, f"{where}.{key}")


def _source(value: object, folder: Path, where: str) -> PictureSource:
    if isinstance(value, bytes):
        return PictureSource(content=value, where=where)
    if isinstance(value, str):
        return named_source(value, folder, where)
    if isinstance(value, dict):
        if isinstance(value.get("bytes"), bytes):
            return PictureSource(content=value["bytes"], where=where)
        if value.get("type") == "base64" and isinstance(value.get("data"), str):
            return base64_source(value["data"], where)
        name = next((value[key] for key in ("url", "path") if isinstance(value.get(key), str)), None)
        if name is not None:
            return named_source(name, folder, where)
    raise InputError(
        f"{where} is a picture: a path, a data URI, or an object with bytes, path or url, got {show(value)}; write it "
        "so"
    )
