"""The formats of records, one module each; `FORMATS` collects the formats that the modules list."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType

from treering.data.formats.record_format import RecordFormat


def _listed() -> Iterator[RecordFormat]:
    for module in iter_modules(__path__):
        yield from import_module(f"{__name__}.{module.name}").FORMATS


def _last_rank(known: RecordFormat) -> int:
    return max(rank for rank, _ in known.signs)


FORMATS: Mapping[str, RecordFormat] = MappingProxyType(
    {known.name: known for known in sorted(_listed(), key=_last_rank, reverse=True)}
)
"""Formats by name; general formats come first and are recognised last."""
