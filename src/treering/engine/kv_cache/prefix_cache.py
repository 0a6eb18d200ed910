"""Prefix cache: stores the keys and values of each prompt once for all rollouts that continue it.

Prompts without requests are dropped here; the arena itself may keep them cached. Prompts with pictures are known by
what these show.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from treering.data.picture import PlacedPicture
from treering.engine.kv_cache.allocator import SpanAllocator
from treering.engine.request import Request
from treering.types import TokenIds


@dataclass(slots=True, kw_only=True, eq=False)
class Prefix:
    """All tokens of a prompt but the last, which every rollout computes itself, to sample its first token."""

    tokens: TokenIds
    """Those of pictures are negative, see `PromptKeys`."""
    pictures: tuple[PlacedPicture, ...] = ()
    allocator: SpanAllocator
    num_requests: int = 0
    """Requests with this prompt, waiting ones included."""
    num_running: int = 0
    """Running rows that read it."""
    start: int | None = None
    """First slot; None while it has no span."""

    @property
    def num_computed(self) -> int:
        """Leading tokens whose keys and values are computed, also by another prefix with the same beginning."""
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
    """The prefixes of all unfinished requests, by their tokens."""

    allocator: SpanAllocator
    _by_tokens: dict[bytes, Prefix] = field(default_factory=dict)

    def register(self, prompt: TokenIds, pictures: Sequence[PlacedPicture] = ()) -> None:
        """Registers a submitted request."""
        prefix = Prefix(tokens=prompt[:-1].copy(), pictures=tuple(pictures), allocator=self.allocator)
        prefix = self._by_tokens.setdefault(prompt.tobytes(), prefix)
        prefix.num_requests += 1

    def get(self, prompt: TokenIds) -> Prefix:
        """The prefix of a submitted request's prompt."""
        return self._by_tokens[prompt.tobytes()]

    def allocate(self, prefix: Prefix) -> bool:
        """Allocates a prefix's span if it has none; False if there is no space."""
        if prefix.start is None and prefix.num_tokens > 0:
            prefix.start = self.allocator.allocate_prompt(prefix.tokens)
        return prefix.start is not None or prefix.num_tokens == 0

    def unregister(self, prompt: TokenIds) -> None:
        """Unregisters a request; the last one of a prompt frees the span."""
        prefix = self.get(prompt)
        prefix.num_requests -= 1
        if prefix.num_requests == 0:
            self.free_span(prefix)
            del self._by_tokens[prompt.tobytes()]

    def evict_idle(self) -> bool:
        """Frees the spans that no running row reads; returns whether there was one."""
        idle = [prefix for prefix in self._by_tokens.values() if prefix.num_running == 0 and prefix.start is not None]
        for prefix in idle:
            self.free_span(prefix)
        return bool(idle)

    def free_span(self, prefix: Prefix) -> None:
        """Frees a prefix's span, if it has one; it is computed again next time unless the arena still caches it."""
        if prefix.start is not None:
            self.allocator.free(prefix.start)
        prefix.start = None

    def invalidate(self) -> None:
        """Marks every prefix as not computed, after a weight update."""
        self.allocator.invalidate()

    def computed(self) -> list[tuple[TokenIds, int]]:
        """Tokens and first slot of what is computed of all prefixes, also of those that the arena caches."""
        live = (prefix for prefix in self._by_tokens.values() if prefix.num_computed > 0)
        spans = [(prefix.tokens[: prefix.num_computed], prefix.start) for prefix in live if prefix.start is not None]
        return [*self.allocator.cached_prompts(), *spans]

    def incomplete(self) -> list[Prefix]:
        """Prefixes that running rows wait for."""
        return [prefix for prefix in self._by_tokens.values() if prefix.num_running and not prefix.is_complete]


class PromptKeys:
    """Numbers the pictures of an engine.

    Example: the prompts 5 9 9 6 with two pictures at 9 9 have the keys 5 -1 -1 6 and 5 -2 -2 6; that of text is itself.
    """

    def __init__(self) -> None:
        """Without a picture; each that comes takes the memory of its digest for good."""
        self._numbers: dict[bytes, int] = {}

    def of(self, request: Request) -> TokenIds:
        """The prompt of a request with negative tokens in place of its pictures, int32."""
        if not request.pictures:
            return request.prompt
        tokens = request.prompt.copy()
        for one in request.pictures:
            tokens[one.start : one.stop] = -1 - self._numbers.setdefault(one.picture.digest, len(self._numbers))
        return tokens
