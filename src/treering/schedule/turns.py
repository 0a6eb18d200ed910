"""Turns of a step's rollouts: the tokens of each, and the waiting before the next.

R rollouts of a step   T turns of all of them, rollouts in order
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treering.errors import InputError


class Parts(NamedTuple):
    """Turns joined up to the next waiting: what a rollout samples without giving its slot back."""

    starts: NDArray[np.int64]
    """int64 [R + 1]: rollout r has the parts `starts[r]` to `starts[r + 1]`."""
    num_tokens: NDArray[np.int64]
    """int64 [parts]."""
    wait_s: NDArray[np.float64]
    """float64 [parts]: seconds of waiting after each part; 0 only after a last part."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turns:
    """Turns of a step's rollouts. A rollout that waits holds no slot.

    Example: a rollout of 8 tokens that waits 2 s for a tool and then samples 5 has the turns (8, 2.0) and (5, 0.0). A
    rollout that waits before its first token begins with a turn of 0 tokens.
    """

    starts: NDArray[np.int64]
    """int64 [R + 1]: rollout r has the turns `starts[r]` to `starts[r + 1]`, at least one."""
    num_tokens: NDArray[np.int64]
    """int64 [T] >= 0: sampled tokens."""
    wait_s: NDArray[np.float64]
    """float64 [T] >= 0: seconds until the next turn, or until the rollout ends, in the unit of the latency."""

    def __post_init__(self) -> None:
        for name, dtype in (("starts", np.int64), ("num_tokens", np.int64), ("wait_s", np.float64)):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype))
        starts, num_tokens, wait_s = self.starts, self.num_tokens, self.wait_s
        is_whole = starts.ndim == 1 and starts.size >= 2 and starts[0] == 0 and starts[-1] == num_tokens.size
        if not is_whole or (np.diff(starts) < 1).any() or num_tokens.shape != wait_s.shape:
            raise InputError(
                f"each rollout needs at least one turn, with its tokens and seconds of waiting, got starts "
                f"{starts.tolist()[:8]} of {num_tokens.size} and {wait_s.size} turns; align them"
            )
        if (num_tokens < 0).any() or not (np.isfinite(wait_s) & (wait_s >= 0)).all():
            raise InputError(
                f"the tokens and seconds of waiting of a turn must be at least 0, got a minimum of "
                f"{num_tokens.min()} and {wait_s.min()}; correct them"
            )

    @classmethod
    def of(cls, rollouts: Sequence[Sequence[tuple[int, float]]]) -> "Turns":
        """Build turns from the tokens and the waiting of each turn of each rollout.

        Example: `Turns.of([[(8, 2.0), (5, 0.0)], [(3, 0.0)]]).starts` is [0, 2, 3].
        """
        flat = [turn for rollout in rollouts for turn in rollout]
        return cls(
            starts=np.cumsum([0, *map(len, rollouts)]),
            num_tokens=np.array([num_tokens for num_tokens, _ in flat], np.int64),
            wait_s=np.array([wait_s for _, wait_s in flat], np.float64),
        )

    def of_rollouts(self, span: slice) -> "Turns":
        """Return the turns of a non-empty slice of the rollouts."""
        first, last = self.starts[span.start], self.starts[span.stop]
        return Turns(
            starts=self.starts[span.start : span.stop + 1] - first,
            num_tokens=self.num_tokens[first:last],
            wait_s=self.wait_s[first:last],
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [R]: sampled tokens of each rollout."""
        return np.add.reduceat(self.num_tokens, self.starts[:-1])

    @property
    def total_wait_s(self) -> NDArray[np.float64]:
        """float64 [R]: waiting of each rollout."""
        return np.add.reduceat(self.wait_s, self.starts[:-1])

    @property
    def num_turns(self) -> NDArray[np.int64]:
        """int64 [R]: turns of each rollout."""
        return np.diff(self.starts)

    def parts(self) -> Parts:
        """Join turns without waiting between them.

        Example: turns (8, 0.0), (5, 2.0) and (1, 0.0) are the parts (13, 2.0) and (1, 0.0).
        """
        is_end = self.wait_s > 0
        is_end[self.starts[1:] - 1] = True
        ends = np.flatnonzero(is_end)
        sums = np.cumsum(self.num_tokens)[ends]
        starts = np.concatenate([[0], np.cumsum(is_end)[self.starts[1:] - 1]])
        return Parts(starts, np.diff(sums, prepend=0), self.wait_s[ends])


def even_turns(lengths: NDArray[np.int64], num_turns: NDArray[np.float64], wait_s: NDArray[np.float64]) -> Turns:
    """Spread the tokens and the waiting of rollouts evenly over their turns; no waiting follows the last turn.

    Args:
        lengths: int64 [R] >= 1.
        num_turns: float64 [R] >= 1, rounded, and at most the length.
        wait_s: float64 [R] >= 0, total waiting of each rollout.

    Example: 10 tokens in 3 turns with 4 s of waiting are the turns (3, 2.0), (3, 2.0) and (4, 0.0).
    """
    counts = np.clip(np.rint(num_turns).astype(np.int64), 1, lengths)
    starts = np.concatenate([[0], np.cumsum(counts)])
    of = np.repeat(np.arange(lengths.size), counts)
    numbers = np.arange(of.size) - starts[of]
    total, size = counts[of], lengths[of]
    waits = wait_s[of] / np.maximum(total - 1, 1)
    waits[(numbers == total - 1) & (total > 1)] = 0.0
    return Turns(starts=starts, num_tokens=(numbers + 1) * size // total - numbers * size // total, wait_s=waits)
