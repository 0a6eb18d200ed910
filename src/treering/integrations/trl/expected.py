"""What sharing can save on a trainer's data, before training: tokens of the stock path per computed one."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from trl.data_utils import prepare_multimodal_messages

from treering.tree.forest import Forest

_NUM_BATCHES = 32
"""Micro-batches of which the bound of a dataset is counted."""
_NUM_PROMPTS = 64


def dataset_bound(trainer: Any, batches: Iterable[Sequence[int]]) -> float:
    """Tokens per distinct one over the first micro-batches of a dataset.

    Args:
        trainer: whose collator makes batches of its `train_dataset`.
        batches: row numbers of each micro-batch.

    Example: micro-batches of two equal rows have the bound 2.
    """
    num_flat, num_distinct = 0, 0
    for rows in islice(batches, _NUM_BATCHES):
        batch = trainer.data_collator([trainer.train_dataset[int(row)] for row in rows])
        given = (batch.get(name) for name in ("attention_mask", "position_ids"))
        forest, _ = Forest.from_padded(batch["input_ids"], *given)
        num_flat += forest.num_branch_tokens
        num_distinct += forest.num_tokens
    return num_flat / num_distinct if num_distinct else 1.0


def group_bound(*, num_prompt_tokens: float, num_completion_tokens: float, num_rows: int) -> float:
    """Tokens per distinct one of `num_rows` completions of one prompt that share nothing but it.

    Example: 8 completions of 96 tokens after a prompt of 512 have the bound 3.8.
    """
    flat = num_rows * (num_prompt_tokens + num_completion_tokens)
    return flat / (num_prompt_tokens + num_rows * num_completion_tokens)


def mean_prompt_tokens(trainer: Any) -> float | None:
    """Mean tokens of the first prompts of a trainer's dataset; None where they cannot be told beforehand."""
    dataset = trainer.train_dataset
    if not hasattr(dataset, "__len__") or getattr(trainer, "environment_factories", None) is not None:
        return None
    prompts = [_prompt(dataset[i]) for i in range(min(len(dataset), _NUM_PROMPTS))]
    lengths = [len(tokens) for tokens in trainer._tokenize_prompts(prompts)[0]]
    return sum(lengths) / len(lengths) if lengths else None


def _prompt(row: Mapping[str, Any]) -> Any:
    """A row's prompt, with its pictures in their places."""
    images = row.get("images") or ([] if row.get("image") is None else [row["image"]])
    return prepare_multimodal_messages(row["prompt"], images=images) if images else row["prompt"]
