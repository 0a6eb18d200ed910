"""Rollout cache: keeps the keys and values of finished rollouts, and plans what a request copies of all that there are.

They are kept until their slots are needed, the least recently used ones go first, or until the weights change.

    N tokens of a span
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from treering.engine.kv_cache.allocator import SpanAllocator
from treering.types import TokenIds

Continuation = Literal["copy", "prefill"]
"""How a request gets the keys and values of tokens that the engine has computed before. copy: those of a running or a
finished rollout, and of the prompts before it, are copied. prefill: all but equal prompts are computed again (the
off-switch)."""


_FIRST_COMPARED = 64


class ComputedTokens(NamedTuple):
    """A rollout's own span, with keys and values.

    Example: after the prompt 5 6, the rollout 7 8 9 has the tokens [6, 7, 8]: the last one is sampled, not computed.
    """

    tokens: TokenIds
    """int32 [N], from the prompt's last token on."""
    start: int
    """Slot of the first."""


@dataclass(slots=True, eq=False)
class RolloutCache:
    """Spans of finished rollouts, by prompt."""

    allocator: SpanAllocator
    _spans: dict[int, tuple[bytes, ComputedTokens]] = field(default_factory=dict)  # by slot, least recently used first

    def keep(self, prompt: TokenIds, span: ComputedTokens) -> None:
        """Takes over the allocated span of a finished rollout; slots after its tokens become free."""
        self.allocator.shrink(span.start, span.tokens.size)
        # A copy: the row's tokens are a view that the next row overwrites.
        self._spans[span.start] = prompt.tobytes(), span._replace(tokens=span.tokens.copy())

    def spans_within(self, tokens: TokenIds) -> list[tuple[TokenIds, ComputedTokens]]:
        """The spans whose prompts these tokens begin with, each with its prompt but for the last token, which it holds.

        Most recently used last.
        """
        text = tokens.tobytes()
        return [
            (np.frombuffer(prompt, np.int32)[:-1], span)
            for prompt, span in self._spans.values()
            if text.startswith(prompt)
        ]

    def note_use(self, start: int) -> None:
        """Makes a span the last one to evict; ignores slots of other spans."""
        if start in self._spans:
            self._spans[start] = self._spans.pop(start)

    def evict(self) -> bool:
        """Frees the least recently used span; returns whether there was one."""
        start = next(iter(self._spans), None)
        if start is None:
            return False
        del self._spans[start]
        self.allocator.free(start)
        return True

    def clear(self) -> None:
        """Frees all spans."""
        while self.evict():
            pass


def count_common(left: TokenIds, right: TokenIds) -> int:
    """Number of equal leading tokens.

    Example: 2 of [5, 6, 7] and [5, 6, 8, 9].
    """
    size = min(left.size, right.size)
    # Most spans differ early.
    if size > _FIRST_COMPARED and not np.array_equal(left[:_FIRST_COMPARED], right[:_FIRST_COMPARED]):
        size = _FIRST_COMPARED
    different = left[:size] != right[:size]
    return int(different.argmax()) if different.any() else size


class Source(NamedTuple):
    """A span with keys and values, and the tokens before it, which these depend on.

    Example: the own span of a rollout 7 8 9 after the prompt 5 6 has the path [5, 6, 7, 8], of which it holds those
    from `first` 1 on.
    """

    path: TokenIds
    """int32, from the first token of the context to the last one that the span holds."""
    first: int
    """Index in the path of the first token that the span holds."""
    start: int
    """Slot of that token."""


class Copy(NamedTuple):
    """Copies `num_tokens` slots from `source` on to the slots of the tokens `first` and following.

    Example: after 40 tokens from one span, `Copy(97, 40, 7, 90)` copies seven from the span at slot 90.
    """

    source: int
    first: int
    num_tokens: int
    span: int
    """First slot of the span that it reads."""


def plan_copies(sources: Iterable[Source], tokens: TokenIds, num_computed: int = 0) -> list[Copy]:
    """Copies that give a prompt the longest beginning without a gap, after what it has computed; none if none fits.

    Args:
        sources: in any order.
        tokens: int32 [N].
        num_computed: leading tokens that need no copy.

    Example: the prompt 5 6 lies at slot 0, and at slot 10 what its rollout 7 8 9 added. A context that goes on after
    the rollout copies 5 from the first, and 6, 7 and 8 from the second.
        >>> import numpy as np
        >>> spans = [Source(np.array([5]), 0, 0), Source(np.array([5, 6, 7, 8]), 1, 10)]
        >>> [tuple(copy) for copy in plan_copies(spans, np.array([5, 6, 7, 8, 9, 3]))]
        [(0, 0, 1, 0), (10, 1, 3, 10)]
    """
    matches = [(count_common(source.path, tokens), source) for source in sources]
    found: list[Copy] = []
    at = num_computed
    while True:
        fitting = [(length, source) for length, source in matches if source.first <= at < length]
        if not fitting:
            return found
        length, source = max(fitting, key=lambda match: match[0])
        first_slot = source.start + at - source.first
        found.append(Copy(source=first_slot, first=at, num_tokens=length - at, span=source.start))
        at = length
