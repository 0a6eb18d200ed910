"""An order of a dataset in which rows that begin alike fall into one micro-batch."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler


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
