"""Fields of JSON records: typed reads whose errors name the field, its value and the rule."""

import json
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from treering.data.unicode import valid_text
from treering.errors import InputError


def text_field(record: Mapping[str, Any], key: str, where: str | None = None) -> str | None:
    """The text of a field, None if it is null or absent; `where` names it in errors.

    Raises:
        InputError: not text, or text with lone surrogates, which no tokenizer takes.

    Example: `text_field({"role": "user"}, "role")` is "user".
    """
    value = record.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        raise InputError(f"{where or key} must be text, got {show(value)}; quote it or drop it")
    return valid_text(value, where or key)


def integer_field(record: Mapping[str, Any], key: str) -> int | None:
    """The whole number of a field, None if it is null or absent; 3.0 counts as 3.

    Raises:
        InputError: not a whole number.
    """
    value = record.get(key)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if value is not None and type(value) is not int:
        raise InputError(f"{key} must be an integer, got {show(value)}; correct it or drop it")
    return value


def number_field(record: Mapping[str, Any], key: str) -> float | None:
    """The number of a field as float, None if it is null or absent.

    Raises:
        InputError: not a number.
    """
    value = record.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{key} must be a number, got {show(value)}; correct it or drop it")
    return float(value)


@contextmanager
def placed(where: str) -> Iterator[None]:
    """Begins what is refused in the block with its place, unless it names it itself as errors of pictures do.

    Raises:
        InputError: what is refused; also a value that is nested too deep or a number too large for Python.
    """
    try:
        yield
    except InputError as error:
        if str(error).startswith(f"{where}: "):
            raise
        raise InputError(f"{where}: {error}") from error
    except (RecursionError, OverflowError) as error:
        raise InputError(f"{where}: a record that cannot be read ({error}); repair it") from error


def parsed(value: object, where: str) -> Any:
    """The value of a JSON text, as tables and some tools store lists and objects; any other value as it is.

    Raises:
        InputError: text that is no JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} must be JSON where it is text, got {show(value)} ({error}); repair it") from error


def array(name: str, value: object) -> list[Any]:
    """The list itself.

    Raises:
        InputError: not a list.
    """
    if not isinstance(value, list):
        raise InputError(f"{name} must be a list, got {show(value)}; wrap it in one")
    return value


def is_blank(value: object) -> bool:
    """Whether a value says nothing: null, or empty text, list or object.

    Example: None, "", [] and {} are blank; False and 0 are not.
    """
    return value is None or (isinstance(value, str | list | dict) and not value)


def filled(record: Mapping[str, Any], keys: Container[str]) -> list[str]:
    """The keys of a record that are among `keys` and whose values say something, in the record's order.

    Example: of `{"a": 1, "b": None, "c": 2}` and the keys a and b it is a alone.
    """
    return [key for key, value in record.items() if key in keys and not is_blank(value)]


def show(value: object) -> str:
    """A value for an error message, in at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
