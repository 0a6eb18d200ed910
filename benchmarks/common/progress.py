"""How far a benchmark is."""

from collections.abc import Callable

OnProgress = Callable[..., None]
"""A function that takes what is being measured and, where known, the share of the whole that is done."""


def silent(words: str, done: float | None = None) -> None:
    """Tells nobody."""
