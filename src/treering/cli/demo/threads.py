"""Chooses the sampling threads of each of the demo's engines by timing passes.

One token per row keeps one core busy; drafts use more.
"""

import torch
from transformers import PreTrainedModel

from treering.cli.demo.run import Side
from treering.engine.torch_engine import TorchEngine
from treering.history.budget.costs import VerifyCosts
from treering.history.budget.selection import seconds_of

_TOKENS_PER_ROW = 8
"""In a typical pass with drafts."""


def best_threads(model: PreTrainedModel, max_batch: int) -> dict[Side, int]:
    """One thread or torch's number of threads per side, by passes of one token per row and of eight.

    Example: where 8 tokens take 0.35 ms with one thread and 0.40 ms with two, and 64 tokens 1.5 ms and 1.1 ms, the
    plain side gets one thread and the other one two.
    """
    counts = sorted({1, torch.get_num_threads()})
    return fastest(
        {count: TorchEngine(model, max_batch=max_batch, num_threads=count).measure_costs() for count in counts},
        max_batch,
    )


def fastest(costs: dict[int, VerifyCosts], max_batch: int) -> dict[Side, int]:
    """The best number of threads for each side, given the costs of each; ties go to the first."""

    def best(num_tokens: float) -> int:
        return min(costs, key=lambda count: seconds_of(num_tokens, costs[count].num_tokens, costs[count].seconds))

    return {"plain": best(max_batch), "treering": best(_TOKENS_PER_ROW * max_batch)}
