"""Find the images of a record, in the formats that datasets use, and put each at its part or tag.

Formats: parts of OpenAI (`image_url`), of the Responses API (`input_image`), of Anthropic (`source`) and of Qwen and
transformers (`{"type": "image", "image": ...}`), and TRL's columns `images` and `image` with parts
`{"type": "image"}` or tags `<image>` in the text.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from treering.data.formats.json_fields import is_blank, show
from treering.data.image import ImageSource, base64_source, named_source
from treering.errors import InputError, plural

IMAGE_PART = "image_source"
"""Type of a part that holds a `ImageSource`, which a file cannot contain."""
COLUMNS = ("images", "image")
"""Columns of images next to the messages."""
MAX_IMAGES = 1024
"""Most images of a record."""

TAG = "<image>"
"""Tag in a text for an image of the columns, as in LLaVA's data."""
_OTHER_TAG = re.compile(
    r"<\|?image[ _-]?\d+\|?>|<\|image\|>|<image_?(placeholder|here)>|<\s*(image|img)\s*/?>|\[(image|img)\]",
    re.IGNORECASE,
)
"""Tags of other tools, which differ in spelling, numbering and order, and `TAG` where it is not read."""
BEFORE_TEXT = "images without a part of their own stand before the first user's text, as TRL puts them"
"""Note on records whose messages have no parts for the images of the columns."""

_MESSAGES = (("messages",), ("prompt", "completion"), ("prompt", "chosen"), ("prompt", "rejected"))
"""Groups of keys whose messages are read in sequence; each group uses the images of the columns from the start."""
_SHOWN = ("content", "output")
"""Keys of a message that hold its text, or the text of a tool's result."""
_TYPES = ("image", "image_url", "input_image")
_TEXTS = ("text", "input_text", "output_text")
_VALUES = ("image", "image_url", "url", "path", "base64", "source")
"""Keys of a part that contains its image."""
_SIZES = ("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width")


def with_images(record: Mapping[str, Any], folder: Path, where: str, note: Callable[[str], None]) -> Mapping[str, Any]:
    """Return the record with a part of type `IMAGE_PART` for each image of its messages; without images, unchanged.

    Local images are in `folder` or below, and errors begin with `where`. A tag counts only in a record with images;
    other texts may mention `<image>`. Images of the columns without parts and tags are put before the first user's
    text, with a note.

    Raises:
        InputError: an image is a network address, images and placeholders differ in number, or a part is malformed.
    """
    columns = [key for key in COLUMNS if not is_blank(record.get(key))]
    found = dict(record)
    is_read = False
    for keys in _MESSAGES:
        in_a_row = [key for key in keys if isinstance(record.get(key), list)]
        if not in_a_row or (keys[0] == "prompt" and not any(key in record for key in keys[1:])):
            continue
        sources = _of_columns(record, columns, folder, where)
        messages = {key: record[key] for key in in_a_row}
        has_parts = any(_has_parts(one) for key in in_a_row for one in record[key])
        if sources or has_parts:
            messages = {key: [_with_tags(one) for one in given] for key, given in messages.items()}
        if sources and not has_parts:
            _check_other_tags(messages, where)
        if sources and not any(_has_parts(one) for given in messages.values() for one in given):
            messages[in_a_row[0]] = _before_first_text(messages[in_a_row[0]], len(sources))
            note(BEFORE_TEXT)
        _check_placeholders(messages, len(sources), where)
        taken = iter(sources)
        for key, given in messages.items():
            found[key] = [_message(one, taken, folder, f"{where}: {key}[{i}]") for i, one in enumerate(given)]
        is_read = True
    if not is_read:
        return record
    return {key: value for key, value in found.items() if key not in columns}


def _with_tags(message: object) -> object:
    """Return the message with a part for each tag in its text, between parts for the text around it."""
    if not isinstance(message, dict):
        return message
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    if not any(TAG in _text_of(part) for part in parts):
        return message
    return {**message, "content": [piece for part in parts for piece in _pieces(part)]}


def _pieces(part: object) -> list[object]:
    first, *rest = _text_of(part).split(TAG)
    if not rest:
        return [part]
    texts = [[{"type": "text", "text": text}] if text else [] for text in (first, *rest)]
    return [*texts[0], *(piece for text in texts[1:] for piece in ({"type": "image"}, *text))]


def _text_of(part: object) -> str:
    """Return the text of a content or a part; "" if it is not text."""
    if isinstance(part, dict) and part.get("type", "text") in _TEXTS:
        part = part.get("text")
    return part if isinstance(part, str) else ""


def _check_other_tags(messages: Mapping[str, Sequence[Any]], where: str) -> None:
    """Refuse tags in other spellings, and tags in results of tools, whose images are not read."""
    shown = (one.get(key) for given in messages.values() for one in given if isinstance(one, dict) for key in _SHOWN)
    tag = next((found for text in _texts_in(list(shown)) if (found := _OTHER_TAG.search(text))), None)
    if tag is not None:
        raise InputError(
            f"{where}: the position of an image is written {TAG} in the text of a message, in the order of images, got "
            f"{tag[0]} in another spelling or in a tool's result; replace it"
        )


def _texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(inner)


def _check_placeholders(messages: Mapping[str, Sequence[Any]], num_sources: int, where: str) -> None:
    contents = [one.get("content") for given in messages.values() for one in given if isinstance(one, dict)]
    parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
    num_placeholders = sum(_is_image(part) and not _values_of(part) for part in parts)
    if num_placeholders != num_sources:
        raise InputError(
            f'{where}: each image needs one placeholder in the chat, a tag {TAG} or a part {{"type": "image"}}, got '
            f"{plural(num_sources, 'image')} and {plural(num_placeholders, 'placeholder')}; make the counts agree"
        )


def _of_columns(record: Mapping[str, Any], columns: Sequence[str], folder: Path, where: str) -> list[ImageSource]:
    values = [one for key in columns for one in (record[key] if isinstance(record[key], list) else [record[key]])]
    if len(columns) > 1:
        raise InputError(f"{where}: images stand in images or in image, and this record has both; keep one of them")
    if len(values) > MAX_IMAGES:
        raise InputError(f"{where}: a record has at most {MAX_IMAGES} images, got {len(values)}; split it")
    return [_source(one, folder, f"{where}: {columns[0]}[{i}]") for i, one in enumerate(values)]


def _has_parts(record: object) -> bool:
    content = record.get("content") if isinstance(record, dict) else None
    return any(map(_is_image, content)) if isinstance(content, list) else _is_image(content)


def _before_first_text(messages: Sequence[Any], count: int) -> list[Any]:
    """Return the messages with parts for images before the first text of a user, as in TRL."""
    changed = list(messages)
    for i, one in enumerate(changed):
        if isinstance(one, dict) and one.get("role") == "user" and isinstance(one.get("content"), str):
            changed[i] = {**one, "content": [*({"type": "image"} for _ in range(count)), one["content"]]}
            break
    return changed


def _message(record: object, column: Iterator[ImageSource], folder: Path, where: str) -> object:
    if not isinstance(record, dict):
        return record
    content = [record["content"]] if isinstance(record.get("content"), dict) else record.get("content")
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return record
    if sum(map(_is_image, content)) > MAX_IMAGES:
        raise InputError(f"{where}: a message has at most {MAX_IMAGES} images; split it")
    parts = [
        {"type": IMAGE_PART, IMAGE_PART: _own(part, column, folder, f"{where}.content[{i}]")}
        if _is_image(part)
        else part
        for i, part in enumerate(content)
    ]
    return {**record, "content": parts}


def _is_image(part: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(part, dict) and part.get("type") in _TYPES


def _values_of(part: Mapping[str, Any]) -> list[str]:
    """Return the keys of a part that contain an image; empty if the part stands for an image of the columns."""
    return [key for key in _VALUES if not is_blank(part.get(key))]


def _own(part: Mapping[str, Any], column: Iterator[ImageSource], folder: Path, where: str) -> ImageSource:
    if sizes := [key for key in _SIZES if not is_blank(part.get(key))]:
        raise InputError(
            f"{where}.{sizes[0]} changes what the processor sees and is not read, got {show(part[sizes[0]])}; set it "
            "in the model's preprocessor_config.json, for all images alike"
        )
    values = _values_of(part)
    if len(values) > 1:
        raise InputError(f"{where} is one image, and {' and '.join(values)} are two; keep one of them")
    if not values:
        return replace(next(column), where=where)
    key = values[0]
    if key == "base64" and isinstance(part[key], str):
        return base64_source(part[key], where)
    return _source(part[key], folder, f"{where}.{key}")


def _source(value: object, folder: Path, where: str) -> ImageSource:
    if isinstance(value, bytes):
        return ImageSource(content=value, where=where)
    if isinstance(value, str):
        return named_source(value, folder, where)
    if isinstance(value, dict):
        if isinstance(value.get("bytes"), bytes):
            return ImageSource(content=value["bytes"], where=where)
        if value.get("type") == "base64" and isinstance(value.get("data"), str):
            return base64_source(value["data"], where)
        name = next((value[key] for key in ("url", "path") if isinstance(value.get(key), str)), None)
        if name is not None:
            return named_source(name, folder, where)
    raise InputError(
        f"{where} is an image: a path, a data URI, or an object with bytes, path or url, got {show(value)}; write it so"
    )
