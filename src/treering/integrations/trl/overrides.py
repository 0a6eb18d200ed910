"""Attributes of an object, a class or a module replaced by functions around them, and restored."""

from collections.abc import Callable
from functools import wraps
from typing import Any


class Overrides:
    """What is replaced of one owner; the class of an object is not touched."""

    def __init__(self, owner: Any) -> None:
        """Replaces nothing yet."""
        self._owner = owner
        self._undo: list[Callable[[], None]] = []

    def replace(self, name: str, run: Callable[..., Any]) -> None:
        """Replaces what `name` calls; `run` gets the original, then the arguments of each call."""
        owner = self._owner
        original, own = getattr(owner, name), vars(owner).get(name)

        # Only what a function has: of a class, its attributes would follow.
        @wraps(original, updated=())
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return run(original, *args, **kwargs)

        def restore() -> None:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

        setattr(owner, name, replaced)
        self._undo.append(restore)

    def undo(self) -> None:
        """Restores everything, the last first; a second call does nothing."""
        while self._undo:
            self._undo.pop()()
