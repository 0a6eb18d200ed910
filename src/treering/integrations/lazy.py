"""Import the public names of a host's package on first use, so that importing the package does not need the host."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from treering.extras import require


def names_from(package: str, homes: Mapping[str, str], *needs: str) -> Callable[[str], Any]:
    """Return a module `__getattr__` that imports each public name of a package on first use.

    Args:
        package: dotted name.
        homes: file of each name, relative to the package.
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
