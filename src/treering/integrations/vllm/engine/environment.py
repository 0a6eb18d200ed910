"""The environment that vLLM's workers read when they start."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment_with(changes: Mapping[str, str]) -> Iterator[None]:
    """Inside, variables have the values of `changes`; then what they had before."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
