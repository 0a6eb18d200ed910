"""On how many torch threads an engine runs its passes, where other processes may hold the cores."""

import torch

SLOW = 5.0
"""A pass this many times as long as the fastest one of its size is slow."""
NUM_SLOW = 3
"""Slow passes in a row that end the use of several threads."""
NUM_ALONE = 200
"""Passes on one thread, after which several are tried again."""


class PassThreads:
    """The number of threads of the next pass.

    The threads of a pass wait for each other, and where another process holds a core all of them wait for it.

    Example: with is_free=True, three passes of 16 tokens that take 20 ms after one that took 2 ms are followed by 200
    on one thread.
    """

    def __init__(self, count: int | None, *, is_free: bool) -> None:
        """`count`: None is torch's number. Only with `is_free` the times of passes change it."""
        self._count = count
        self._is_free = is_free and (count or torch.get_num_threads()) > 1
        self._fastest: dict[int, float] = {}
        self._num_slow = 0
        self._num_alone = 0

    @property
    def count(self) -> int | None:
        """Threads of the next pass; None is torch's number."""
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
