"""Micro-batches as TRL's trainers make them: a group of rollouts, rows that share nothing, rows of real tasks."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.tree.sets import TaskSource
from treering.types import LossMask, TokenIds

NUM_ROWS = 8
"""Rows of a micro-batch."""
NUM_PROMPT_TOKENS = 512
COMPLETION_TOKENS = (64, 128)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """Micro-batches that one step trains."""

    name: str
    vocab_size: int
    batches: tuple[tuple[Sequence[TokenIds], Sequence[LossMask]], ...]
    """Rows and their loss masks."""

    def tensors(self) -> list[dict[str, Tensor]]:
        """What a trainer's collator makes of each micro-batch: padded on the right."""
        return [padded(rows, masks) for rows, masks in self.batches]

    @property
    def num_labels(self) -> int:
        """Labelled tokens; a row's first has nothing before it that could score it."""
        return sum(int(sum(list(mask)[1:])) for _, masks in self.batches for mask in masks)

    @property
    def rows(self) -> list[TokenIds]:
        """All rows."""
        return [row for rows, _ in self.batches for row in rows]


def group(vocab_size: int, *, is_shared: bool, trains_prompts: bool = False, seed: int = 0) -> Case:
    """Eight completions of 64 to 128 tokens after a prompt of 512, or after eight different ones.

    Args:
        vocab_size: tokens are drawn from it.
        is_shared: one prompt for all.
        trains_prompts: prompts have labels too, as in SFT on whole conversations.
        seed: of the draw.
    """
    drawn = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [drawn.randrange(vocab_size) for _ in range(count)]

    prompt = tokens(NUM_PROMPT_TOKENS)
    rows, masks = [], []
    for _ in range(NUM_ROWS):
        completion = tokens(drawn.randint(*COMPLETION_TOKENS))
        rows.append([*(prompt if is_shared else tokens(NUM_PROMPT_TOKENS)), *completion])
        masks.append([int(trains_prompts)] * NUM_PROMPT_TOKENS + [1] * len(completion))
    kind = "sft" if trains_prompts else "group" if is_shared else "nothing_shared"
    return Case(name=f"{kind}_{vocab_size}", vocab_size=vocab_size, batches=((rows, masks),))


def real(source: TaskSource, name: str, num_tokens: int) -> Case:
    """Whole tasks of a set, in the micro-batches that `share_prefixes` makes of them."""
    sample = source.sample(name, num_tokens=num_tokens)
    rows = [row for task in sample.tasks for row in task.sequences]
    masks = sample.loss_masks()
    from treering.integrations.trl.grouping import TaskSampler

    order = TaskSampler(rows, NUM_ROWS, seed=0, epoch=lambda: 0).order(0).tolist()
    picked = [order[start : start + NUM_ROWS] for start in range(0, len(order), NUM_ROWS)]
    batches = tuple(([rows[i] for i in batch], [masks[i] for i in batch]) for batch in picked)
    return Case(name=name, vocab_size=4096, batches=batches)


def padded(rows: Sequence[TokenIds], masks: Sequence[LossMask]) -> dict[str, Tensor]:
    """Ids, attention mask and labels [rows, columns]."""
    width = max(map(len, rows))
    ids, mask = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(2))
    labels = torch.full((len(rows), width), -100)
    for i, (row, trained) in enumerate(zip(rows, masks, strict=True)):
        tokens = torch.tensor(list(row))
        ids[i, : len(row)] = tokens
        mask[i, : len(row)] = 1
        labels[i, : len(row)] = tokens.where(torch.tensor(list(trained)).bool(), -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
