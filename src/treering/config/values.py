"""Types of single settings, shared by every section: paths, counts, fractions, seeds."""

import os
import re
from datetime import date as Date
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from treering.types import is_count


def _count_or_auto(value: object) -> object:
    """Return a valid value, with one error instead of one for each side of a union."""
    if value == "auto" or is_count(value, least=1):
        return value
    raise ValueError(f'an integer of at least 1, or "auto", got {value!r}')


_SECONDS = MappingProxyType({"s": 1, "min": 60, "h": 3600})
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)")


def _count_or_time(value: object) -> object:
    """Return a valid value, with one error instead of one for each side of a union."""
    if is_count(value, least=1) or (isinstance(value, str) and _TIME.fullmatch(value)):
        return value
    raise ValueError(f'an integer of at least 1, or a time such as "10min" (s, min or h), got {value!r}')


def seconds_in(text: str) -> float:
    """Return the seconds of a time.

    Example: "10min" is 600.0, and "0.5 h" is 1800.0.
    """
    found = _TIME.fullmatch(text)
    assert found is not None, f"{text!r} was not validated"
    return float(found[1]) * _SECONDS[found[2]]


# TOML has no path type, so paths accept strings; every other type is strict.
FilePath = Annotated[Path, Field(strict=False)]
# A single path means an array of one.
FilePaths = Annotated[
    tuple[FilePath, ...],
    Field(strict=False),
    BeforeValidator(
        lambda value: (value,) if isinstance(value, str | os.PathLike) else value,
        json_schema_input_type=FilePath | tuple[FilePath, ...],
    ),
]
# Text, because a `Path` loses the "./" that tells a folder from a hub id.
ModelPath = Annotated[str, BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value)]
Revision = Annotated[
    str | None,
    Field(
        default=None,
        description="Commit, branch or tag of a hub id; none: the newest, or for a resumed run the original one.",
    ),
]
TokenizerPath = Annotated[
    ModelPath | None,
    Field(
        default=None,
        description="Hugging Face tokenizer folder or hub id, for chats; none: the tokenizer of model.path.",
    ),
]
TemplateDate = Annotated[
    Date | None,
    Field(
        default=None,
        strict=False,
        description="Date for chat templates that write today's date, such as 2026-01-31; none: the day of the run's "
        "first start, so that a resumed run has the same prompts.",
    ),
]
Count = Annotated[int, Field(ge=1)]
CountOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_count_or_auto)]
CountOrTime = Annotated[int | str, BeforeValidator(_count_or_time)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
