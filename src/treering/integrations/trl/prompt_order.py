"""Order of a trainer's prompts, so that a batch is known before it is read."""

from collections.abc import Callable, Sequence
from typing import Any


class PromptOrder:
    """Order in which a trainer takes its prompts, known one batch ahead.

    Example: if an epoch takes the prompts [4, 4, 3, 3], [0, 0, 1, 1] and each batch twice, `following` finds the batch
    [4, 3] and returns [0, 1] and the number of updates between the two.
    """

    def __init__(self, sampler: Any) -> None:
        """Draw the orders of this epoch and the next one from a TRL `RepeatSampler` that only this object uses."""
        self._sampler = sampler
        # Without repetitions the sampler yields the prompts of its batches in the same order.
        sampler.mini_repeat_count = sampler.repeat_count = 1
        self._epochs = [self._draw(), self._draw()]
        self._expected = 0

    def _draw(self) -> list[list[int]]:
        size, order = self._sampler.batch_size, [*self._sampler]
        return [order[i : i + size] for i in range(0, len(order), size)]

    def following(
        self, is_sampled: Callable[[Sequence[int]], bool], *, num_passes: int, passes_per_update: int
    ) -> tuple[list[int], int] | None:
        """Return the prompts after the sampled batch, and the updates between the two; None if no batch is that one.

        Args:
            is_sampled: whether the indices of a batch are those of the one that was sampled.
            num_passes: backward passes over a batch.
            passes_per_update: gradient accumulation steps; an epoch's last update may have fewer.
        """
        both = [batch for epoch in self._epochs for batch in epoch]
        at = next((at for at in (self._expected, *range(len(both))) if is_sampled(both[at])), None)
        if at is None:
            return None
        if at >= len(self._epochs[0]):
            at -= len(self._epochs[0])
            self._epochs = [self._epochs[1], self._draw()]
        now, later = self._epochs
        self._expected = at + 1
        end = (at + 1) * num_passes
        num_updates = end // passes_per_update if at + 1 < len(now) else -(-end // passes_per_update)
        return [*now, *later][at + 1], num_updates - at * num_passes // passes_per_update
