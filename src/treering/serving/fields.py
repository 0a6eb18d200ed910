"""Reads typed fields of a JSON body, and refuses by name what is left: a setting that is ignored changes results."""

from collections.abc import Collection, Mapping
from sys import float_info
from typing import Any, TypeVar

from treering.data.formats.fields import show
from treering.errors import InputError, UnsupportedError

T = TypeVar("T")

_NAMES = {bool: "bool", int: "integer", float: "number", str: "text", list: "list", dict: "object"}


class Fields:
    """A JSON object whose fields are taken one by one.

    Example:
        >>> fields = Fields({"n": 2}, "the body")
        >>> fields.take("n", int, 1), fields.take("top_k", int, 0)
        (2, 0)
    """

    def __init__(self, values: object, where: str) -> None:
        """Holds the object.

        Raises:
            InputError: `values` is no object.
        """
        if not isinstance(values, Mapping):
            raise InputError(f"{where} is a JSON object, got {show(values)}; send one")
        self._left: dict[str, Any] = dict(values)
        self._where = where

    def take(self, name: str, kind: type[T], default: T) -> T:
        """The field, or its default where it is absent or null; an integer will do for a float.

        Raises:
            InputError: a value of another type, or one that a float does not hold.
        """
        value: Any = self.take_any(name, (int, float) if kind is float else (kind,), default)
        if kind is float and abs(value) > float_info.max:
            raise InputError(f"{name} of {self._where} is a number that a float holds, got {show(value)}; correct it")
        return kind(value) if kind is float else value  # type: ignore[call-arg]

    def take_any(self, name: str, kinds: tuple[type, ...], default: Any) -> Any:
        """The field of any of these types, or its default where it is absent or null.

        Raises:
            InputError: a value of another type.
        """
        value = self._left.pop(name, None)
        if value is None:
            return default
        if type(value) not in kinds:
            names = " or ".join(_NAMES[each] for each in kinds)
            raise InputError(f"{name} of {self._where} is of the type {names}, got {show(value)}; correct it")
        return value

    def need(self, name: str, kind: type[T]) -> T:
        """The field.

        Raises:
            InputError: it is absent, or of another type.
        """
        if self._left.get(name) is None:
            raise InputError(f"{self._where} has no {name}; send it")
        return self.take(name, kind, kind())

    def refuse_unless(self, name: str, neutral: Collection[object], why: str) -> None:
        """Takes a field that may only have values that change nothing.

        Raises:
            UnsupportedError: another value.
        """
        value = self._left.pop(name, None)
        if value is None or any(value == each and isinstance(value, type(each)) for each in neutral):
            return
        raise UnsupportedError(f"{name} of {self._where} {why}, got {show(value)}; leave it out")

    def ignore(self, *names: str) -> None:
        """Drops fields that change no token."""
        for name in names:
            self._left.pop(name, None)

    def end(self) -> None:
        """Refuses what is left.

        Raises:
            UnsupportedError: a field that nobody took and that is not null.
        """
        left = sorted(name for name, value in self._left.items() if value is not None)
        if left:
            raise UnsupportedError(
                f"{self._where} has {', '.join(left)}, which this server does not know and will not ignore; leave "
                f"{'it' if len(left) == 1 else 'them'} out"
            )
