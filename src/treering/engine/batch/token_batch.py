"""Describe the tokens of a forward pass: positions, visible keys, key-value slots, and the images among them.

A pass computes tokens of the running rows and chunks of shared prompts.

    T tokens of a pass   P image tokens of a pass
"""

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treering.arrays import Int64Array
from treering.data.image import ImageData, PlacedImage
from treering.engine.batch.rows import Table
from treering.engine.kv_cache import Prefix
from treering.model.images import VisionPart
from treering.model.tree_model import TreeModel
from treering.tree.forest import Forest
from treering.tree.image_tokens import rotary_positions
from treering.types import TokenIds

PER_TOKEN = (
    *("tokens", "positions", "slots", "prefix_start", "num_prefix", "own_start", "num_own", "tree_start", "tree_bits"),
)
"""Columns of a `TokenBatch` that have an entry per token, in order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageInputs:
    """Changes that images make to a pass.

    Example: an image of 2 x 3 tokens is prefilled from index 4 of the pass on: `at` is 4 to 9.
    """

    rotary: Int64Array
    """[3, T] position of each token in time, height and width."""
    at: Int64Array
    """[P] indices of the image tokens in the pass."""
    levels: tuple[Tensor, ...]
    """[P, C] each: features that replace their embeddings, then those added in the first layers; () without images."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenBatch:
    """Tokens of one pass; int64 [T] each, except `wanted` and `images`.

    Every layer writes the keys and values of all tokens before any token reads.

    Example: the 3rd token of a rollout after a prompt of 5, with the prompt at slots 0-4 and its own span from slot 40:
    position 7, slot 42, prefix_start 0, num_prefix 5, own_start 40, num_own 3. Two alternative drafts after it, the
    second with a child, at slots 43, 44 and 45, have positions 8, 8 and 9, num_own 3, tree_start 43, and tree_bits
    0b001, 0b010 and 0b110.
    """

    tokens: Int64Array
    """Token ids."""
    positions: Int64Array
    """Absolute positions, used for RoPE unless `images` has others."""
    slots: Int64Array
    """Slot for the token's key and value."""
    prefix_start: Int64Array
    """First slot of the token's shared prefix."""
    num_prefix: Int64Array
    """Slots of the prefix, all visible; 0 for none."""
    own_start: Int64Array
    """First slot of the token's own span."""
    num_own: Int64Array
    """Visible slots from the start of the own span; the last is the token's slot, unless that is in a draft tree."""
    tree_start: Int64Array
    """Slot of the first draft token of the token's tree; ignored if tree_bits is 0."""
    tree_bits: Int64Array
    """Unsigned mask: bit j of 64 makes slot tree_start + j visible, each at most once; 0 outside of trees."""
    wanted: Int64Array
    """[W] ascending indices of the tokens whose logits are needed."""
    images: ImageInputs | None = None
    """None if no row and no chunk has an image."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return int(self.tokens.size)


def of_sequence(tokens: TokenIds | Int64Array, *, first_slot: int = 0) -> TokenBatch:
    """Return one sequence as a batch, in its own span from `first_slot` on; all logits are wanted.

    Example: its third token has position 2 and slot `first_slot` + 2, and sees three slots.
    """
    zeros, order = np.zeros(tokens.size, np.int64), np.arange(tokens.size)
    return TokenBatch(
        tokens=tokens.astype(np.int64),
        positions=order,
        slots=first_slot + order,
        prefix_start=zeros,
        num_prefix=zeros,
        own_start=zeros + first_slot,
        num_own=order + 1,
        tree_start=zeros,
        tree_bits=zeros,
        wanted=order,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillChunk:
    """Tokens `first` to `first + num_tokens - 1` of a prefix."""

    prefix: Prefix
    first: int
    num_tokens: int

    def complete(self) -> None:
        """Mark its keys and values as computed; the pass writes them before any token reads."""
        assert self.prefix.start is not None
        self.prefix.allocator.set_computed(self.prefix.start, self.first + self.num_tokens)


_LEAST_AWAITED = 16
"""Tokens that a prefix starts to wait for, a page of `PagedAllocator`; fewer are computed twice."""


def _waits(prefix: Prefix, other: Prefix) -> bool:
    """Return whether a prefix should wait for what it shares with another one that is being computed."""
    shared = prefix.num_computed + (1 if prefix.awaited is other else _LEAST_AWAITED)
    return min(prefix.num_tokens, other.num_tokens) >= shared and bool(
        prefix.tokens[:shared].tobytes() == other.tokens[:shared].tobytes()
    )


def prefill_chunks(prefixes: Iterable[Prefix], max_tokens: int) -> list[PrefillChunk]:
    """Return chunks of the missing prefix tokens, at most `max_tokens` in all, and mark them as computed.

    A pass writes all keys before any token reads, so a prefix can continue in the same pass after the tokens that it
    shares with an earlier one, where both read the same slots. Elsewhere it waits, to copy them after the pass.

    Example: prefixes with 300 and 500 missing tokens and max_tokens=512 give chunks of 300 and 212.
    """
    chunks: list[PrefillChunk] = []
    for prefix in prefixes:
        prefix.awaited = next((chunk.prefix for chunk in chunks if _waits(prefix, chunk.prefix)), None)
        num_tokens = min(prefix.num_tokens - prefix.num_computed, max_tokens)
        if num_tokens > 0 and prefix.awaited is None:
            chunk = PrefillChunk(prefix=prefix, first=prefix.num_computed, num_tokens=num_tokens)
            chunk.complete()
            chunks.append(chunk)
            max_tokens -= num_tokens
    return chunks


def join(batch: TokenBatch, chunks: Sequence[PrefillChunk]) -> TokenBatch:
    """Return one batch with the rows' tokens, then the chunks', whose logits are not computed."""
    if not chunks:
        return batch
    parts = zip(*(_columns(chunk) for chunk in chunks), strict=True)
    merged: dict[str, Any] = {
        name: np.concatenate([getattr(batch, name), *part]) for name, part in zip(PER_TOKEN, parts, strict=True)
    }
    return replace(batch, **merged)


def _columns(chunk: PrefillChunk) -> list[Int64Array]:
    """Return a chunk's columns in the order of `PER_TOKEN`; the prefix's span counts as its tokens' own span."""
    prefix = chunk.prefix
    assert prefix.start is not None
    positions = np.arange(chunk.first, chunk.first + chunk.num_tokens)
    zeros = np.zeros(chunk.num_tokens, np.int64)
    # Image tokens are negative; features replace their embeddings.
    tokens = np.maximum(prefix.tokens[positions].astype(np.int64), 0)
    own_start = zeros + prefix.start
    return [tokens, positions, own_start + positions, zeros, zeros, own_start, positions + 1, zeros, zeros]


class VisionSnapshot:
    """Copy of the vision part that computes the features of each image once per version.

    Each image gets its own call of the vision tower, so its features never depend on other images.
    """

    def __init__(self, model: TreeModel, vision: VisionPart, *, max_tokens: int) -> None:
        """Copy the vision part; the cache holds features of at most `max_tokens` tokens, most recently used ones."""
        # The language model has its own snapshot.
        copied = copy.deepcopy(vision.model, {id(model.decoder): None})
        self._part = replace(vision, model=copied.eval().requires_grad_(False))
        self._max_tokens = max_tokens
        self._held: OrderedDict[bytes, list[Tensor]] = OrderedDict()

    @torch.inference_mode()
    def features(self, image: ImageData) -> list[Tensor]:
        """Return an image's features, [M, C], then those of deeper layers."""
        levels = self._held.get(image.digest)
        if levels is None:
            levels = self._held[image.digest] = self._part.features([image])
        self._held.move_to_end(image.digest)
        while len(self._held) > 1 and sum(one[0].shape[0] for one in self._held.values()) > self._max_tokens:
            self._held.popitem(last=False)
        return levels

    def read(self, vision: VisionPart) -> None:
        """Copy the model's current weights, and drop the features of the old ones."""
        with torch.inference_mode():
            for own, source in self._pairs(vision):
                own.copy_(source)
        self._held.clear()

    def is_current(self, vision: VisionPart) -> bool:
        """Return whether the copied weights equal the model's."""
        return all(torch.equal(own, source) for own, source in self._pairs(vision))

    def _pairs(self, vision: VisionPart) -> Iterator[tuple[Tensor, Tensor]]:
        model = self._part.model
        sources = dict([*vision.model.named_parameters(), *vision.model.named_buffers()])
        return ((own, sources[name]) for name, own in [*model.named_parameters(), *model.named_buffers()])


def with_images(batch: TokenBatch, chunks: Sequence[PrefillChunk], table: Table, vision: VisionSnapshot) -> TokenBatch:
    """Add the features of the chunks' images and the rotary positions, which images shorten.

    Returns the same batch if no row and no chunk has an image.

    Args:
        batch: the rows' tokens, then the chunks'.
        chunks: the chunks of the pass.
        table: the running rows.
        vision: computes the features.

    Example: a token after an image of 2 x 3 tokens that starts at position 1 has depth 7 and rotary position 4.
    """
    if not any(request.images for request in table.requests) and not any(chunk.prefix.images for chunk in chunks):
        return batch
    rotary = np.tile(batch.positions - _shortened(batch, table), (3, 1))
    at, features = [np.zeros(0, np.int64)], []
    first = batch.num_tokens - sum(chunk.num_tokens for chunk in chunks)
    for chunk in chunks:
        rotary[:, first : first + chunk.num_tokens] = _positions(chunk)
        for placed in chunk.prefix.images:
            start, stop = (min(max(end - chunk.first, 0), chunk.num_tokens) for end in (placed.start, placed.stop))
            if start == stop:
                continue
            rows = slice(start + chunk.first - placed.start, stop + chunk.first - placed.start)
            at.append(np.arange(first + start, first + stop))
            features.append([level[rows] for level in vision.features(placed.image)])
        first += chunk.num_tokens
    levels = tuple(torch.cat(parts) for parts in zip(*features, strict=True))
    return replace(batch, images=ImageInputs(rotary=rotary, at=np.concatenate(at), levels=levels))


def _shortened(batch: TokenBatch, table: Table) -> Int64Array:
    """Return how many positions the images of each token's row save, int64 [T]; 0 for the tokens of chunks."""
    saved = np.zeros(batch.num_tokens, np.int64)
    for row, request in enumerate(table.requests):
        if request.images:
            # No other row and no prefix has this span.
            saved[batch.own_start == table.columns.own_start[row]] = _saved(request.images)
    return saved


def _saved(images: Sequence[PlacedImage]) -> int:
    return sum(one.image.num_tokens - one.image.num_positions for one in images)


def _positions(chunk: PrefillChunk) -> Int64Array:
    """Return the rotary positions of a chunk's tokens, [3, tokens] or [tokens]."""
    last = chunk.first + chunk.num_tokens
    prefix: Prefix = chunk.prefix
    if not prefix.images:
        return np.arange(chunk.first, last)
    forest = Forest.from_sequences([np.maximum(prefix.tokens, 0)], images=[prefix.images])
    return np.asarray(rotary_positions(forest), np.int64)[..., chunk.first : last]
