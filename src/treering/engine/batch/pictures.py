"""Pictures in a pass: their features, under a snapshot of the model's vision part, and where the decoder gets them.

As the decoder's weights, the snapshot is of one policy version: training changes the model, and it only with `read`.

T tokens of a pass   P picture tokens of a pass
"""

import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from treering.arrays import Int64Array
from treering.data.picture import Picture, PlacedPicture
from treering.engine.batch.table import Table
from treering.engine.batch.token_batch import PictureInputs, PrefillChunk, TokenBatch
from treering.engine.kv_cache.prefix_cache import Prefix
from treering.model.families import ModelParts
from treering.model.pictures import VisionPart
from treering.tree.forest import Forest
from treering.tree.pictures import rotary_positions


class VisionSnapshot:
    """Computes the features of each picture once in a version, by a call of the tower of its own.

    So the features of a picture never depend on the pictures beside it.
    """

    def __init__(self, parts: ModelParts, vision: VisionPart, *, max_tokens: int) -> None:
        """Copies the vision part; features of at most `max_tokens` tokens are held, those that were used last."""
        # The language model has a snapshot of its own.
        model = copy.deepcopy(vision.model, {id(parts.decoder): None})
        self._part = replace(vision, model=model.eval().requires_grad_(False))
        self._max_tokens = max_tokens
        self._held: OrderedDict[bytes, list[Tensor]] = OrderedDict()

    @torch.inference_mode()
    def features(self, picture: Picture) -> list[Tensor]:
        """Those that stand for the picture's tokens, [M, C], then those of deeper layers."""
        levels = self._held.get(picture.digest)
        if levels is None:
            levels = self._held[picture.digest] = self._part.features([picture])
        self._held.move_to_end(picture.digest)
        while len(self._held) > 1 and sum(one[0].shape[0] for one in self._held.values()) > self._max_tokens:
            self._held.popitem(last=False)
        return levels

    def read(self, vision: VisionPart) -> None:
        """Copies the model's current weights, and forgets the features of the last ones."""
        with torch.inference_mode():
            for own, source in self._pairs(vision):
                own.copy_(source)
        self._held.clear()

    def is_current(self, vision: VisionPart) -> bool:
        """Whether `read` would change nothing."""
        return all(torch.equal(own, source) for own, source in self._pairs(vision))

    def _pairs(self, vision: VisionPart) -> Iterator[tuple[Tensor, Tensor]]:
        model = self._part.model
        sources = dict([*vision.model.named_parameters(), *vision.model.named_buffers()])
        return ((own, sources[name]) for name, own in [*model.named_parameters(), *model.named_buffers()])


def with_pictures(
    batch: TokenBatch, chunks: Sequence[PrefillChunk], table: Table, vision: VisionSnapshot
) -> TokenBatch:
    """The batch with the features of its chunks' pictures, and rotary positions that pictures have shortened.

    The same batch if no row and no chunk has a picture.

    Args:
        batch: the rows' tokens, then the chunks'.
        chunks: of the pass.
        table: of the rows.
        vision: gives the features.

    Example: a token after a picture of 2 x 3 tokens that starts at position 1 has depth 7 and rotary position 4.
    """
    if not any(request.pictures for request in table.requests) and not any(chunk.prefix.pictures for chunk in chunks):
        return batch
    rotary = np.tile(batch.positions - _shortened(batch, table), (3, 1))
    at, features = [np.zeros(0, np.int64)], []
    first = batch.num_tokens - sum(chunk.num_tokens for chunk in chunks)
    for chunk in chunks:
        rotary[:, first : first + chunk.num_tokens] = _positions(chunk)
        for placed in chunk.prefix.pictures:
            start, stop = (min(max(end - chunk.first, 0), chunk.num_tokens) for end in (placed.start, placed.stop))
            if start == stop:
                continue
            rows = slice(start + chunk.first - placed.start, stop + chunk.first - placed.start)
            at.append(np.arange(first + start, first + stop))
            features.append([level[rows] for level in vision.features(placed.picture)])
        first += chunk.num_tokens
    levels = tuple(torch.cat(parts) for parts in zip(*features, strict=True))
    return replace(batch, pictures=PictureInputs(rotary=rotary, at=np.concatenate(at), levels=levels))


def _shortened(batch: TokenBatch, table: Table) -> Int64Array:
    """How many positions the pictures of each token's row have saved; 0 for the tokens of chunks."""
    saved = np.zeros(batch.num_tokens, np.int64)
    for row, request in enumerate(table.requests):
        if request.pictures:
            # No other row and no prefix has this span.
            saved[batch.own_start == table.columns.own_start[row]] = _saved(request.pictures)
    return saved


def _saved(pictures: Sequence[PlacedPicture]) -> int:
    return sum(one.picture.num_tokens - one.picture.num_positions for one in pictures)


def _positions(chunk: PrefillChunk) -> Int64Array:
    """Rotary positions of a chunk's tokens, [3, tokens] or [tokens]."""
    last = chunk.first + chunk.num_tokens
    prefix: Prefix = chunk.prefix
    if not prefix.pictures:
        return np.arange(chunk.first, last)
    forest = Forest.from_sequences([np.maximum(prefix.tokens, 0)], pictures=[prefix.pictures])
    return np.asarray(rotary_positions(forest), np.int64)[..., chunk.first : last]
