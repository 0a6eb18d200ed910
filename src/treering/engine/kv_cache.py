"""Manage key-value memory: spans of slots, prompts that rollouts share, and finished rollouts to continue.

Spans of finished rollouts are kept until their slots are needed, least recently used first, or the weights change.

    N tokens of a span
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from treering.data.image import PlacedImage
from treering.engine.protocol import Request
from treering.errors import InputError
from treering.types import TokenIds


class KVAllocator(ABC):
    """Interface of key-value memory: spans of token slots."""

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Number of free slots, not necessarily contiguous."""

    @abstractmethod
    def allocate(self, length: int) -> int | None:
        """Return the first slot of a new span of `length` >= 1 slots, or None if there is no space."""

    @abstractmethod
    def allocate_prompt(self, tokens: TokenIds) -> int | None:
        """Allocate as `allocate` does for a prompt's tokens, some of which may already be computed (`num_computed`)."""

    @abstractmethod
    def shrink(self, start: int, length: int) -> None:
        """Keep the first `length` >= 1 slots of a span from `allocate` and free the others."""

    @abstractmethod
    def free(self, start: int) -> None:
        """Free a span from `allocate` or `allocate_prompt`."""

    @abstractmethod
    def cached_prompts(self) -> list[tuple[TokenIds, int]]:
        """Return tokens and first slot of computed prompts without readers, oldest first; `allocate` may evict them."""

    @abstractmethod
    def note_use(self, start: int) -> None:
        """Make a cached prompt the last one to evict; ignore other spans."""

    @abstractmethod
    def num_computed(self, start: int) -> int:
        """Return the number of leading tokens of a span whose keys and values are computed."""

    @abstractmethod
    def set_computed(self, start: int, num_tokens: int) -> None:
        """Mark the first `num_tokens` as computed, at the latest when anything reads them; never lower the count."""

    @abstractmethod
    def invalidate(self) -> None:
        """Mark everything as not computed, after a weight update."""


class SpanAllocator(KVAllocator):
    """Allocator over slots 0 to num_slots - 1.

    Computed prompts without readers stay cached for the next request with the same tokens, and are evicted oldest
    first when space is needed. Spans do not overlap.

    Example: with 10 slots, three calls of `allocate(4)` give 0, 4 and None; after `free(0)` the next gives 0.
    """

    def __init__(self, num_slots: int) -> None:
        """Start with all slots free."""
        if num_slots < 1:
            raise InputError(f"an arena needs at least one slot, got {num_slots}; raise max_tokens")
        self.num_slots = num_slots
        self._holes: list[tuple[int, int]] = [(0, num_slots)]  # (start, length), ascending, never adjacent
        self._taken: dict[int, int] = {}
        self._computed: dict[int, int] = {}
        self._prompts: dict[int, bytes] = {}
        self._cached: dict[bytes, int] = {}  # by the tokens, oldest first

    @property
    def num_free(self) -> int:
        """Number of free slots, including those of cached prompts."""
        return sum(length for _, length in self._holes) + sum(self._taken[start] for start in self._cached.values())

    def allocate(self, length: int) -> int | None:
        """Return the first slot of a new span; evict cached prompts until a hole is long enough."""
        assert length >= 1
        start = self._fit(length)
        while start is None and self._cached:
            self._free(self._cached.pop(next(iter(self._cached))))
            start = self._fit(length)
        return start

    def allocate_prompt(self, tokens: TokenIds) -> int | None:
        """Return the cached span of exactly these tokens, or a new one; None if there is no space."""
        prompt = tokens.tobytes()
        start = self._cached.pop(prompt, None)
        if start is None:
            start = self.allocate(tokens.size)
        if start is not None:
            self._prompts[start] = prompt
        return start

    def cached_prompts(self) -> list[tuple[TokenIds, int]]:
        """Return tokens and first slot of the cached prompts, oldest first."""
        return [(np.frombuffer(prompt, np.int32), start) for prompt, start in self._cached.items()]

    def note_use(self, start: int) -> None:
        """Make a cached prompt the last one to evict."""
        prompt = next((prompt for prompt, cached in self._cached.items() if cached == start), None)
        if prompt is not None:
            self._cached[prompt] = self._cached.pop(prompt)

    def num_computed(self, start: int) -> int:
        """Return the number of leading tokens of a span that are computed."""
        return self._computed[start]

    def set_computed(self, start: int, num_tokens: int) -> None:
        """Mark the first `num_tokens` of a span as computed."""
        self._computed[start] = max(self._computed[start], num_tokens)

    def invalidate(self) -> None:
        """Mark everything as not computed and evict all cached prompts."""
        for start in self._cached.values():
            self._free(start)
        self._cached = {}
        self._computed = dict.fromkeys(self._computed, 0)

    def shrink(self, start: int, length: int) -> None:
        """Keep the first `length` slots of a span and free the others."""
        assert 1 <= length <= self._taken[start]
        num_freed = self._taken[start] - length
        self._taken[start] = length
        if num_freed > 0:
            self._add_hole(start + length, num_freed)

    def free(self, start: int) -> None:
        """Free a span, or cache it if it is a fully computed prompt that is not cached yet."""
        prompt = self._prompts.pop(start, None)
        if prompt is not None and prompt not in self._cached and self._computed[start] == self._taken[start]:
            self._cached[prompt] = start
        else:
            self._free(start)

    def _fit(self, length: int) -> int | None:
        for index, (start, hole) in enumerate(self._holes):
            if hole < length:
                continue
            rest = [(start + length, hole - length)] if hole > length else []
            self._holes[index : index + 1] = rest
            self._taken[start], self._computed[start] = length, 0
            return start
        return None

    def _free(self, start: int) -> None:
        del self._computed[start]
        self._add_hole(start, self._taken.pop(start))

    def _add_hole(self, start: int, length: int) -> None:
        end = start + length
        first = last = bisect_left(self._holes, (start, 0))
        if first > 0 and sum(self._holes[first - 1]) == start:
            first -= 1
            start = self._holes[first][0]
        if last < len(self._holes) and self._holes[last][0] == end:
            end = sum(self._holes[last])
            last += 1
        self._holes[first:last] = [(start, end - start)]


@dataclass(slots=True, kw_only=True, eq=False)
class Prefix:
    """All tokens of a prompt but the last, which every rollout computes itself to sample its first token."""

    tokens: TokenIds
    """Token ids; those of images are negative (`PromptKeys`)."""
    images: tuple[PlacedImage, ...] = ()
    allocator: KVAllocator
    num_requests: int = 0
    """Number of requests with this prompt, waiting ones included."""
    num_running: int = 0
    """Number of running rows that read it."""
    start: int | None = None
    """First slot; None while it has no span."""
    awaited: "Prefix | None" = None
    """Prefix with the same beginning that is being computed, whose keys and values this one will copy."""

    @property
    def num_computed(self) -> int:
        """Number of computed leading tokens, including those computed for another prefix with the same beginning."""
        return 0 if self.start is None else self.allocator.num_computed(self.start)

    @property
    def num_tokens(self) -> int:
        """Length of its span; 0 for a prompt of one token, which needs no span."""
        return int(self.tokens.size)

    @property
    def is_complete(self) -> bool:
        """Whether rows may read it."""
        return self.num_computed == self.num_tokens


@dataclass(slots=True, eq=False)
class PrefixCache:
    """Prefixes of all unfinished requests, by their tokens."""

    allocator: KVAllocator
    _by_tokens: dict[bytes, Prefix] = field(default_factory=dict)

    def register(self, prompt: TokenIds, images: Sequence[PlacedImage] = ()) -> None:
        """Register a submitted request."""
        prefix = Prefix(tokens=prompt[:-1].copy(), images=tuple(images), allocator=self.allocator)
        prefix = self._by_tokens.setdefault(prompt.tobytes(), prefix)
        prefix.num_requests += 1

    def get(self, prompt: TokenIds) -> Prefix:
        """Return the prefix of a submitted request's prompt."""
        return self._by_tokens[prompt.tobytes()]

    def allocate(self, prefix: Prefix) -> bool:
        """Allocate a prefix's span if it has none; return False if there is no space."""
        if prefix.start is None and prefix.num_tokens > 0:
            prefix.start = self.allocator.allocate_prompt(prefix.tokens)
        return prefix.start is not None or prefix.num_tokens == 0

    def unregister(self, prompt: TokenIds) -> None:
        """Unregister a request; the last one of a prompt frees the span."""
        prefix = self.get(prompt)
        prefix.num_requests -= 1
        if prefix.num_requests == 0:
            self.free_span(prefix)
            del self._by_tokens[prompt.tobytes()]

    def evict_idle(self) -> bool:
        """Free the spans that no running row reads; return whether there was one."""
        idle = [prefix for prefix in self._by_tokens.values() if prefix.num_running == 0 and prefix.start is not None]
        for prefix in idle:
            self.free_span(prefix)
        return bool(idle)

    def free_span(self, prefix: Prefix) -> None:
        """Free a prefix's span, if it has one; it must be computed again unless the arena still caches it."""
        if prefix.start is not None:
            self.allocator.free(prefix.start)
        prefix.start = None

    def invalidate(self) -> None:
        """Mark every prefix as not computed, after a weight update."""
        self.allocator.invalidate()

    def computed(self) -> list[tuple[TokenIds, int]]:
        """Return tokens and first slot of the computed parts of all prefixes, cached ones included."""
        live = (prefix for prefix in self._by_tokens.values() if prefix.num_computed > 0)
        spans = [(prefix.tokens[: prefix.num_computed], prefix.start) for prefix in live if prefix.start is not None]
        return [*self.allocator.cached_prompts(), *spans]

    def incomplete(self) -> list[Prefix]:
        """Return the prefixes that running rows wait for."""
        return [prefix for prefix in self._by_tokens.values() if prefix.num_running and not prefix.is_complete]


class PromptKeys:
    """Numbers of the images that an engine has seen.

    Example: two prompts 5 9 9 6 with different images at 9 9 get the keys 5 -1 -1 6 and 5 -2 -2 6; text keeps its ids.
    """

    def __init__(self) -> None:
        """Start without images; the digest of each new image is kept for good."""
        self._numbers: dict[bytes, int] = {}

    def of(self, request: Request) -> TokenIds:
        """Return a request's prompt with negative tokens in place of its images, int32."""
        if not request.images:
            return request.prompt
        tokens = request.prompt.copy()
        for one in request.images:
            tokens[one.start : one.stop] = -1 - self._numbers.setdefault(one.image.digest, len(self._numbers))
        return tokens


_FIRST_COMPARED = 64


class ComputedTokens(NamedTuple):
    """Span of a rollout, with computed keys and values.

    Example: after prompt 5 6, rollout 7 8 9 has tokens [6, 7, 8], because 9 is sampled but not computed.
    """

    tokens: TokenIds
    """int32 [N], from the prompt's last token on."""
    start: int
    """Slot of the first token."""


@dataclass(slots=True, eq=False)
class RolloutCache:
    """Spans of finished rollouts, by prompt."""

    allocator: KVAllocator
    _spans: dict[int, tuple[bytes, ComputedTokens]] = field(default_factory=dict)  # by slot, least recently used first

    def keep(self, prompt: TokenIds, span: ComputedTokens) -> None:
        """Take over the allocated span of a finished rollout; slots after its tokens become free."""
        self.allocator.shrink(span.start, span.tokens.size)
        # A copy, because the row's tokens are a view that the next row overwrites.
        self._spans[span.start] = prompt.tobytes(), span._replace(tokens=span.tokens.copy())

    def spans_within(self, tokens: TokenIds) -> list[tuple[TokenIds, ComputedTokens]]:
        """Return the spans of all prompts that these tokens begin with, each with its prompt without the last token.

        The span itself has that last token. The most recently used span comes last.
        """
        text = tokens.tobytes()
        return [
            (np.frombuffer(prompt, np.int32)[:-1], span)
            for prompt, span in self._spans.values()
            if text.startswith(prompt)
        ]

    def note_use(self, start: int) -> None:
        """Make a span the last one to evict; ignore slots of other spans."""
        if start in self._spans:
            self._spans[start] = self._spans.pop(start)

    def evict(self) -> bool:
        """Free the least recently used span; return whether there was one."""
        start = next(iter(self._spans), None)
        if start is None:
            return False
        del self._spans[start]
        self.allocator.free(start)
        return True

    def clear(self) -> None:
        """Free all spans."""
        while self.evict():
            pass


def count_common(left: TokenIds, right: TokenIds) -> int:
    """Return the number of equal leading tokens.

    Example: 2 for [5, 6, 7] and [5, 6, 8, 9].
    """
    size = min(left.size, right.size)
    # Most spans differ early.
    if size > _FIRST_COMPARED and not np.array_equal(left[:_FIRST_COMPARED], right[:_FIRST_COMPARED]):
        size = _FIRST_COMPARED
    different = left[:size] != right[:size]
    return int(different.argmax()) if different.any() else size


class Source(NamedTuple):
    """Span with computed keys and values, and the path of tokens that they depend on.

    Example: after prompt 5 6, the span of rollout 7 8 9 has path [5, 6, 7, 8], and starts at its index 1 (`first`).
    """

    path: TokenIds
    """int32, from the context's first token to the span's last."""
    first: int
    """Index in the path of the span's first token."""
    start: int
    """Slot of that token."""


class Copy(NamedTuple):
    """Copy of `num_tokens` slots, from `source` on, to the slots of the context's tokens from index `first` on.

    Example: after 40 tokens from one span, `Copy(97, 40, 7, 90)` copies seven from the span at slot 90.
    """

    source: int
    first: int
    num_tokens: int
    span: int
    """First slot of the span that is read."""


def list_copies(sources: Iterable[Source], tokens: TokenIds, num_computed: int = 0) -> list[Copy]:
    """Return copies that give a context the longest beginning without a gap, after its computed tokens.

    Args:
        sources: spans to copy from, in any order.
        tokens: int32 [N], the context.
        num_computed: leading tokens that need no copy.

    Example: prompt 5 6 is at slot 0, and its rollout 7 8 9 at slot 10. A context that continues the rollout copies 5
    from the first span, and 6, 7 and 8 from the second.
        >>> import numpy as np
        >>> spans = [Source(np.array([5]), 0, 0), Source(np.array([5, 6, 7, 8]), 1, 10)]
        >>> [tuple(copy) for copy in list_copies(spans, np.array([5, 6, 7, 8, 9, 3]))]
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
