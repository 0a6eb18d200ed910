"""Keeps stdout for a command's result, so that `--json` prints one object whatever user code prints."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


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
