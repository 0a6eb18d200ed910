"""A snapshot of the vision part of a model, and the features of pictures under it.

As the decoder's weights, it is of one policy version: training changes the model, and the snapshot only with `read`.
"""

import copy
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from treering.data.picture import Picture
from treering.model.families import ModelParts
from treering.model.pictures import VisionPart


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
