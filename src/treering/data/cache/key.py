"""What the arrays of a file depend on, as one digest: other contents, settings or code make other arrays."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from datetime import date as Date
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from treering.data.formats.containers import source_files
from treering.data.formats.parts import missing_parts
from treering.data.rendering.renderer import Renderer
from treering.extras import versions_of

CACHE_VERSION = 3
"""Of the arrays and their files."""

_TOKENIZER_FILES = ("*.json", "*.jinja", "additional_chat_templates/*.jinja")
_WRITES_DATE = b"strftime_now"
_CODE = Path(__file__).parents[1]
_PACKAGES = ("tokenizers", "jinja2", "pyarrow", "pillow", "transformers")


def cache_key(path: Path, renderer: Renderer, options: Mapping[str, Any]) -> str:
    """The name of the arrays: SHA-256 over the contents of the file or folder, the tokenizer's files, and all settings.

    The contents are read, so that no time stamp has to be trusted. The code of `treering.data` and the releases of the
    packages that it renders with are part of it too.

    Args:
        path: the file or folder.
        renderer: its tokenizer, template and date.
        options: how the records are read; JSON values.

    Raises:
        OSError: something cannot be read.

    Example: a file that is copied under another name of the same ending keeps its key.
    """
    facts = {
        "version": CACHE_VERSION,
        "code": _code(),
        "contents": [[_name(each, path), _digest(each)] for each in source_files(path)],
        # Whose absence is said, or refused.
        "missing": missing_parts(path),
        "template": renderer.template,
        **_tokenizer(renderer),
        **options,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _name(file: Path, path: Path) -> str:
    """What of a name says how a file is read."""
    return str(file.relative_to(path)) if file != path else "".join(file.suffixes[-2:]).lower()


def _tokenizer(renderer: Renderer) -> dict[str, Any]:
    if renderer.tokenizer is None:
        return {"tokenizer": None}
    folder = renderer.tokenizer
    files = sorted({file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()})
    writes_date = any(_WRITES_DATE in file.read_bytes() for file in files)
    return {
        "tokenizer": [[str(file.relative_to(folder)), _digest(file)] for file in files],
        "date": str(renderer.date or Date.today()) if writes_date else None,
    }


@cache
def code_digest(folder: Path) -> str:
    """SHA-256 over the code in a folder, which a cache that depends on it has among its options."""
    return _digest_of(sorted(folder.rglob("*.py")))


@cache
def _code() -> list[str]:
    found = versions_of(_PACKAGES)
    return [code_digest(_CODE), np.__version__, *(found.get(package, "") for package in _PACKAGES)]


def _digest(file: Path) -> str:
    return _digest_of([file])


def _digest_of(files: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()
