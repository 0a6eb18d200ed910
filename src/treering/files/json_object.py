"""Reads files that hold one JSON object, as folders of models and datasets have them."""

import json
from pathlib import Path
from typing import Any

from treering.errors import InputError, TreeringError


def read_object(file: Path, kind: type[TreeringError] = InputError, *, fix: str = "fetch it again") -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        file: in UTF-8.
        kind: of the error.
        fix: what the error advises.

    Raises:
        TreeringError: of `kind`; the file cannot be read, or holds anything else.

    Example: of a file with `[1]` it says "config.json is a JSON object, got list; fetch it again".
    """
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise kind(f"{file} is a JSON object, and this one cannot be read ({error}); {fix}") from error
    if not isinstance(value, dict):
        raise kind(f"{file} is a JSON object, got {type(value).__name__}; {fix}")
    return value
