"""What a command prints: results alone on stdout, notes and errors in the user's words."""

import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TextIO

from treering.errors import DataWarning


@contextmanager
def notes_on_stderr() -> Iterator[None]:
    """Prints each `DataWarning` of the block as one line on stderr, equal ones once; stdout stays clean."""
    said: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", DataWarning)
        shown = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if not issubclass(category, DataWarning):
                shown(message, category, *place, **more)
                return
            text = " ".join(str(message).split())
            if text not in said:
                said.add(text)
                print(f"treering: note: {text}", file=sys.stderr)

        warnings.showwarning = show
        yield


_SETTINGS: Mapping[str, str] = MappingProxyType(
    {"inspect": r"--\1 \3", "sft": r'data.\1 = "\3"', "train": r'task.\1 = "\3"'}
)
_ARGUMENT = re.compile(r'\b(template|tokenizer)=("?)(\w+)\2')


def in_words_of(command: str, message: str) -> str:
    """The message with the names that settings have in a command; unchanged for commands without them.

    Example: 'use template="plain"' is "use --template plain" for inspect, and 'use data.template = "plain"' for sft.
    """
    form = _SETTINGS.get(command)
    return message if form is None else _ARGUMENT.sub(form, message)


@contextmanager
def only_results_on_stdout() -> Iterator[TextIO]:
    """Sends to stderr all that this process and those that it starts in the block write to stdout.

    Yields:
        The stream of the result, which is stdout as it was.

    Example: `with only_results_on_stdout() as results: print("log"); print("{}", file=results)` prints only {} on
    stdout.
    """
    before = sys.stdout
    if before is None or _descriptor(before) != 1:
        # Closed, or replaced by an object in this process, as tests do.
        sys.stdout = sys.stderr
        try:
            yield before
        finally:
            sys.stdout = before
        return
    before.flush()
    # Not inherited by processes that user code starts.
    descriptor = os.dup(1)
    os.dup2(2, 1)
    # A stream of its own: user code may close it.
    sys.stdout = open(1, "w", encoding=before.encoding, errors="replace", buffering=1, closefd=False)  # noqa: SIM115
    try:
        with open(descriptor, "w", encoding=before.encoding, errors=before.errors, closefd=False) as results:
            yield results
    finally:
        os.dup2(descriptor, 1)
        os.close(descriptor)
        sys.stdout = before


def _descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (AttributeError, OSError, ValueError):
        return None
