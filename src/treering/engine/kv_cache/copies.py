"""Plans which keys and values a new prompt copies from spans that hold them already, of whatever prompt or branch.

N tokens of the new prompt
"""

from collections.abc import Iterable
from typing import NamedTuple

from treering.engine.kv_cache.rollout_cache import count_common
from treering.types import TokenIds


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
