"""Public names of a host's package, imported on first use: their files need the host, or libraries it must not meet."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from treering.extras import require


def names_from(package: str, homes: Mapping[str, str], *needs: str) -> Callable[[str], Any]:
    """A package's `__getattr__` for names that stand in its files.

    Args:
        package: its dotted name.
        homes: the file of each name, relative to the package.
        needs: libraries that every name needs.

    Example: `__getattr__ = names_from(__name__, {"TreeEngine": "engine"})`.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; public names: {', '.join(homes)}")
        if needs:
            require(f"{package}.{name}", *needs)
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return find
