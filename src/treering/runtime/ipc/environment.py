"""Environment variables for processes that start meanwhile. Imports nothing heavy."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment_with(changes: Mapping[str, str]) -> Iterator[None]:
    """Inside, variables that processes read at their start have the values of `changes`; then what they had."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
