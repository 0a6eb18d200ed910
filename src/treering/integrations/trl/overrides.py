"""Methods of one trainer object replaced, and restored."""

from collections.abc import Callable
from functools import wraps
from typing import Any


class Overrides:
    """Replaced methods of one object; its class is not touched."""

    def __init__(self, owner: Any) -> None:
        """Replaces nothing yet."""
        self._owner = owner
        self._undo: list[Callable[[], None]] = []

    def replace(self, name: str, run: Callable[..., Any]) -> None:
        """Replaces the method `name`; `run` gets the original, then the arguments of each call."""
        owner = self._owner
        original, own = getattr(owner, name), owner.__dict__.get(name)

        @wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            return run(original, *args, **kwargs)

        def restore() -> None:
            if own is None:
                owner.__dict__.pop(name, None)
            else:
                owner.__dict__[name] = own

        owner.__dict__[name] = method
        self._undo.append(restore)

    def undo(self) -> None:
        """Restores the methods, the last first; a second call does nothing."""
        while self._undo:
            self._undo.pop()()
