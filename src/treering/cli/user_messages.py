"""Keep stdout for results, and print notes and errors in the user's words on stderr."""

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
    """Print each `DataWarning` of the block as one line on stderr, equal ones once; keep stdout clean."""
    printed: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", DataWarning)
        shown = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *location: Any, **more: Any) -> None:
            if not issubclass(category, DataWarning):
                shown(message, category, *location, **more)
                return
            text = " ".join(str(message).split())
            if text not in printed:
                printed.add(text)
                print(f"treering: note: {text}", file=sys.stderr)

        warnings.showwarning = show
        yield


_SETTINGS: Mapping[str, str] = MappingProxyType(
    {"inspect": r"--\1 \3", "init": r"--\1 \3", "sft": r'data.\1 = "\3"', "train": r'task.\1 = "\3"'}
)
_ARGUMENT = re.compile(r'\b(template|tokenizer)=("?)(\w+)\2')


def in_words_of(command: str, message: str) -> str:
    """Return the message with settings named as in a command; unchanged for commands without them.

    Example: 'use template="plain"' is "use --template plain" for inspect, and 'use data.template = "plain"' for sft.
    """
    pattern = _SETTINGS.get(command)
    if pattern is None:
        return message
    named = _ARGUMENT.sub(pattern, message)
    # The model that `init` is given has the tokenizer.
    return named.replace("--tokenizer", "--model") if command == "init" else named


@contextmanager
def only_results_on_stdout() -> Iterator[TextIO]:
    """Send to stderr everything that this process and its children write to stdout in the block.

    Yields:
        The stream for the result, the original stdout.

    Example: `with only_results_on_stdout() as results: print("log"); print("{}", file=results)` prints only {} on
    stdout.
    """
    before = sys.stdout
    if before is None or _descriptor(before) != 1:
        # Closed, or replaced by an object in this process, as in tests.
        sys.stdout = sys.stderr
        try:
            yield before
        finally:
            sys.stdout = before
        return
    before.flush()
    # Processes that user code starts do not inherit the descriptor.
    descriptor = os.dup(1)
    os.dup2(2, 1)
    # Use a separate stream, which user code may close.
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
