"""Rows of a dataset with pictures as keys that sort rows of a task together, without decoding a picture."""

import json
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

IMAGE_COLUMNS = frozenset({"image", "images"})
"""Columns in which TRL looks for pictures."""

_TEXT_COLUMNS = ("messages", "prompt", "chosen", "completion", "text")
_NUM_ROWS = 64
"""Rows that are read at a time, with their encoded pictures."""


def keys_of_pictures(dataset: Any) -> list[NDArray[np.uint8]]:
    """A key of each row: 16 bytes for each of its pictures in order, then its text.

    Rows with the same pictures sort together, and among them those whose text begins alike. Pictures are compared by
    their encoded bytes: which rows stand together depends on that, and which are merged does not.

    Args:
        dataset: of TRL, with a column `image` or `images`.

    Example: two rows with the same file and other questions have keys that begin with the same 16 bytes.
    """
    columns = [name for name in (*sorted(IMAGE_COLUMNS), *_TEXT_COLUMNS) if name in dataset.column_names]
    tables = dataset.select_columns(columns).with_format("arrow").iter(batch_size=_NUM_ROWS)
    return [_key(row) for table in tables for row in table.to_pylist()]


def _key(row: Mapping[str, Any]) -> NDArray[np.uint8]:
    digests = (blake2b(picture, digest_size=16).digest() for picture in _pictures(row))
    text = json.dumps([row[name] for name in _TEXT_COLUMNS if name in row], default=repr)
    return np.frombuffer(b"".join(digests) + text.encode(), np.uint8)


def _pictures(row: Mapping[str, Any]) -> Iterator[bytes]:
    """What tells a row's pictures apart: their bytes, else what stands in their place, such as a path."""
    for one in [row.get("image"), *(row.get("images") or ())]:
        if one is not None:
            content = one.get("bytes") if isinstance(one, Mapping) else None
            yield content or repr(one).encode()
