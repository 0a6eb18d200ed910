"""The formats of records; `FORMATS` collects the formats that the modules list."""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType

from treering.data.formats.record_format import RecordFormat

_LISTED: list[RecordFormat] = [
    known for module in iter_modules(__path__) for known in import_module(f"{__name__}.{module.name}").FORMATS
]
FORMATS: Mapping[str, RecordFormat] = MappingProxyType(
    {known.name: known for known in sorted(_LISTED, key=lambda one: max(rank for rank, _ in one.signs), reverse=True)}
)
"""Formats by name; general formats come first and are recognised last."""
