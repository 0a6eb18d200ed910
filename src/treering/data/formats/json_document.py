"""The records of one JSON document: an array is read record by record, so that memory holds one of them."""

import codecs
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from treering.data.formats.files import ReadPosition, content_parts
from treering.errors import InputError

_BLANK = " \t\n\r"
_NEAR_END = 16
"""Characters at the end of a text in which a literal, an escape or a number may go on."""


def document_records(
    path: Path, parse_float: Callable[[str], float] | None = None, position: ReadPosition | None = None
) -> Iterator[tuple[str, object]]:
    """Each record of an array with its place, "FILE: record N", or the one record of another document, with "FILE".

    Raises:
        InputError: broken JSON, as "FILE:LINE: rule, value, fix"; the records before it have been given.

    Example: a file with `[{"a": 1}, {"a": 2}]` gives ("FILE: record 1", {"a": 1}) and ("FILE: record 2", {"a": 2}).
    """
    try:
        if next((part.lstrip()[:1] for part in content_parts(path) if part.strip()), b"") != b"[":
            yield str(path), json.loads(b"".join(content_parts(path, position)), parse_float=parse_float)
            return
        text = _Text(content_parts(path, position), json.JSONDecoder(parse_float=parse_float))
        for number, record in enumerate(_elements(text), start=1):
            yield f"{path}: record {number}", record
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: {_in_words(error)}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: a JSON document must be UTF-8, got {error}; convert the file") from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: a JSON document holds one record or an array of them ({error}); repair it"
        ) from error


class _Text:
    """The text of a file from some place on, as much as is needed; errors count from the begin of the file."""

    def __init__(self, parts: Iterator[bytes], decoder: json.JSONDecoder) -> None:
        self._parts, self._decoder = parts, decoder
        self._utf8 = codecs.getincrementaldecoder("utf-8")("surrogatepass")
        self._text, self._start, self._is_whole = "", 0, False
        self._num_lines = self._num_columns = 0

    def peek(self) -> str:
        """The next character that is not blank; "" at the end."""
        while True:
            size = len(self._text)
            while self._start < size and self._text[self._start] in _BLANK:
                self._start += 1
            if self._start < size or self._is_whole:
                return self._text[self._start : self._start + 1]
            self._read()

    def skip(self) -> None:
        """Goes on by a character."""
        self._start += 1

    def value(self) -> object:
        """The JSON value that begins at the next character that is not blank."""
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._start)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string") or error.pos > len(self._text) - _NEAR_END
                if self._is_whole or not is_cut:
                    raise self.error(error.msg, error.pos) from None
            else:
                # A number near the end of the text may go on.
                if self._is_whole or end < len(self._text) - _NEAR_END:
                    self._start = end
                    return value
            self._read()

    def error(self, rule: str, place: int | None = None) -> json.JSONDecodeError:
        """What is wrong at a place of the text, by default the next character."""
        error = json.JSONDecodeError(rule, self._text, self._start if place is None else place)
        error.colno += self._num_columns if error.lineno == 1 else 0
        error.lineno += self._num_lines
        return error

    def _read(self) -> None:
        """Forgets what is read, and reads as much again as is left, so that a long record is not read often."""
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
    """The elements of an array, with which the text begins, up to its end."""
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


def _in_words(error: json.JSONDecodeError) -> str:
    if error.msg == "Extra data":
        return "a file is one JSON document or one JSON object per line, got another value here; jq -c . writes lines"
    return f"a JSON document holds one record or an array of them ({error.msg}, column {error.colno}); repair it"
