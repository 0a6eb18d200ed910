"""Counts what vLLM's outputs tell of its passes."""

from collections.abc import Sequence
from typing import Any

from treering.engine.protocol import EngineStats


class Counts:
    """The counts of one engine.

    Example: a pass that gives three rollouts 2, 1 and 1 tokens adds 1 forward, 3 rows and 4 sampled tokens.
    """

    def __init__(self) -> None:
        """All counts are 0."""
        self._counts = dict.fromkeys(EngineStats.__slots__, 0)

    @property
    def stats(self) -> EngineStats:
        """The counts so far."""
        return EngineStats(**self._counts)

    def note_pass(self, outputs: Sequence[Any]) -> None:
        """Counts a pass by its outputs, vLLM's `RequestOutput` records of running rollouts."""
        self._counts["num_forwards"] += bool(outputs)

    def note_row(self, output: Any, num_new: int, *, is_first: bool) -> None:
        """Counts a row of a pass with so many new tokens, the first ones of its request or not."""
        self._counts["num_rows"] += num_new > 0
        self._counts["num_sampled"] += num_new
        if is_first and num_new:
            self._counts["num_prefilled"] += len(output.prompt_token_ids) - (output.num_cached_tokens or 0)
        drafts = output.outputs[0].spec_decode_metrics
        if drafts is not None:
            self._counts["num_drafted"] += drafts.num_draft_tokens
            self._counts["num_accepted"] += sum(length * count for length, count in enumerate(drafts.histogram))
