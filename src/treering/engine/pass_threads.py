"""Choose how many torch threads an engine uses for its passes, where other processes may occupy the cores."""

import torch

SLOW = 5.0
"""A pass is slow if it takes this many times as long as the fastest of its size."""
NUM_SLOW = 3
"""Consecutive slow passes after which the engine uses one thread."""
NUM_ALONE = 200
"""Passes on one thread before several are tried again."""


class PassThreads:
    """Number of threads of the next pass.

    The threads of a pass wait for each other, so if another process occupies one core, all of them wait for it.

    Example: with is_free=True, if one pass of 16 tokens took 2 ms and three then take 20 ms, the next 200 passes use
    one thread.
    """

    def __init__(self, count: int | None, *, is_free: bool) -> None:
        """Use `count` threads (None: torch's number); the times of passes change it only with `is_free`."""
        self._count = count
        self._is_free = is_free and (count or torch.get_num_threads()) > 1
        self._fastest: dict[int, float] = {}
        self._num_slow = 0
        self._num_alone = 0

    @property
    def count(self) -> int | None:
        """Threads of the next pass; None means torch's number."""
        return 1 if self._num_alone else self._count

    def note_pass(self, num_tokens: int, seconds: float) -> None:
        """Record the wall seconds of a pass over `num_tokens` tokens."""
        if not self._is_free:
            return
        if self._num_alone:
            self._num_alone -= 1
            return
        size = num_tokens.bit_length()
        self._fastest[size] = min(seconds, self._fastest.get(size, seconds))
        self._num_slow = self._num_slow + 1 if seconds > SLOW * self._fastest[size] else 0
        if self._num_slow == NUM_SLOW:
            self._num_slow, self._num_alone = 0, NUM_ALONE
