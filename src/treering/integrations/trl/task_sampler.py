"""An order of a dataset in which rows that begin alike fall into one micro-batch."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

IMAGE_COLUMNS = frozenset({"image", "images"})
"""Columns in which TRL looks for pictures."""

_TEXT_COLUMNS = ("messages", "prompt", "chosen", "completion", "text")
_NUM_ROWS = 64
"""Rows that are read at a time, with their encoded pictures."""


class TaskSampler(Sampler[int]):
    """Indices of rows: `batch_size` neighbours in the order of their tokens at a time, these batches in random order.

    Rows are sorted by their tokens, so rows of a task stand together, and those that share most are next to each
    other. Every epoch has the same batches in another order; the short one is last.
    """

    def __init__(
        self,
        sequences: Sequence[Sequence[int] | NDArray[np.uint8]],
        batch_size: int,
        seed: int,
        epoch: Callable[[], int],
    ) -> None:
        """Sorts the rows.

        Args:
            sequences: token ids of each row, or other numbers that begin alike where rows do.
            batch_size: rows of a micro-batch.
            seed: of every epoch's order, with its number.
            epoch: the number of the epoch that begins.
        """
        # Big-endian bytes compare as the numbers do.
        keys = [np.asarray(tokens, ">u4").tobytes() for tokens in sequences]
        self._sorted = np.array(sorted(range(len(keys)), key=keys.__getitem__), np.intp)
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[int]:
        yield from self.order(self._epoch()).tolist()

    def order(self, epoch: int) -> NDArray[np.intp]:
        """Indices of an epoch."""
        rows, size = self._sorted, self._batch_size
        num_full = len(rows) // size
        batches = np.random.default_rng((self._seed, epoch)).permutation(num_full)
        shuffled = rows[: num_full * size].reshape(num_full, size)[batches]
        return np.concatenate([shuffled.reshape(-1), rows[num_full * size :]])


def sequences_of(dataset: Any) -> list[list[int]] | None:
    """Token ids of each row of a tokenised dataset; None where no columns have them.

    Example: a preference row with prompt_ids [1, 2] and chosen_ids [3] is [1, 2, 3].
    """
    columns = set(getattr(dataset, "column_names", None) or ())
    if "input_ids" in columns:
        return [list(tokens) for tokens in dataset["input_ids"]]
    if "prompt_ids" not in columns:
        return None
    answers = next((dataset[name] for name in ("chosen_ids", "completion_ids") if name in columns), None)
    prompts = list(dataset["prompt_ids"])
    return [[*prompt, *answer] for prompt, answer in zip(prompts, answers or [[]] * len(prompts), strict=True)]


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
