"""What is to be said about data, as lines on stderr."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
