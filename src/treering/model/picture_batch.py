"""Pictures of a padded batch, from the arguments that trainers give stock models.

B rows   P pictures or crops of the batch
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treering.data.picture import Picture, PlacedPicture
from treering.errors import InputError, UnsupportedError
from treering.model.pictures import VisionPart
from treering.tree.padded import split_padded

OF_PICTURES = frozenset({"pixel_values", "image_grid_thw", "token_type_ids", "mm_token_type_ids"})
"""Arguments that say which pictures a batch has, and where."""

_REFUSED = MappingProxyType(
    {
        **dict.fromkeys(("pixel_values_videos", "video_grid_thw", "second_per_grid_ts"), "video is not supported"),
        **dict.fromkeys(("input_features", "feature_attention_mask"), "sound is not supported"),
        "mm_encoder_outputs": "features of pictures are computed once for equal ones, from pixels",
        "position_ids": "positions follow from pictures along each branch",
        "vision_feature_layer": "the configuration's layer is used",
        "vision_feature_select_strategy": "the configuration's choice is used",
    }
)
_TYPES = MappingProxyType(
    {"gemma3": "token_type_ids", "qwen2_5_vl": "mm_token_type_ids", "qwen3_vl": "mm_token_type_ids"}
)
"""The argument that tells stock models where pictures are; without it they see or rotate them otherwise."""


def pictures_of_batch(
    vision: VisionPart, sequences: Sequence[NDArray[np.integer[Any]]], kwargs: Mapping[str, Any]
) -> list[list[PlacedPicture]]:
    """The pictures of each sequence of a batch.

    Args:
        vision: part of the model that the batch is for.
        sequences: of the batch, row after row, without padding.
        kwargs: the call's: `pixel_values` of all pictures one after another, and grids of a family with grids.

    Raises:
        InputError: pictures that do not fit the placeholders.
        UnsupportedError: video, sound, or arguments that a forest does not follow.

    Example: two rows with the same picture give two equal digests, and so one picture of the forest.
    """
    for name, why in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"a model that runs on trees takes no {name}: {why}; leave it out")
    _check_types(vision, sequences, kwargs)
    if kwargs.get("pixel_values") is None:
        return [[] for _ in sequences]
    left = iter(_pictures(vision, kwargs["pixel_values"], kwargs.get("image_grid_thw")))
    placed = [list(_placed(tokens, vision, left)) for tokens in sequences]
    rest = sum(1 for _ in left)
    if rest:
        raise InputError(f"pixel_values hold {rest} pictures more than input_ids have places for: were rows cut?")
    return placed


def _check_types(vision: VisionPart, sequences: Sequence[NDArray[np.integer[Any]]], kwargs: Mapping[str, Any]) -> None:
    """Refuses types of tokens by which a stock model would see or rotate its pictures otherwise than a forest does."""
    name = _TYPES.get(vision.family)
    if name is None:
        return
    types, mask = kwargs.get(name), kwargs.get("attention_mask")
    if types is None:
        if kwargs.get("pixel_values") is None:
            return
        raise InputError(
            f"model type {vision.family!r} learns from {name} where its pictures are, and it was not given: pass on "
            "what the processor returns"
        )
    own = split_padded(types.cpu(), None if mask is None else mask.cpu(), None).sequences
    for row, (tokens, marked) in enumerate(zip(sequences, own, strict=True)):
        if ((tokens == vision.placeholders[0]) != (marked == 1)).any():
            raise InputError(
                f"{name} is 1 at the placeholders of pictures and nowhere else, and sequence {row} of the batch has it "
                "elsewhere: pass on what the processor returns"
            )


def _placed(tokens: NDArray[np.integer[Any]], vision: VisionPart, left: Iterator[Picture]) -> Iterator[PlacedPicture]:
    places = np.flatnonzero(tokens == vision.placeholders[0])
    at = 0
    while at < places.size:
        picture = next(left, None)
        if picture is None or at + picture.num_tokens > places.size:
            raise InputError(
                f"a row has {places.size} placeholders of pictures, which pixel_values do not fill: were rows cut?"
            )
        yield PlacedPicture(start=int(places[at]), picture=picture)
        at += picture.num_tokens


def _pictures(vision: VisionPart, pixels: Tensor, grids: Tensor | None) -> Iterator[Picture]:
    """Each picture of a family with grids; of others each crop."""
    values = _float32(pixels)
    if vision.merge is None:
        assert vision.tokens_per_crop is not None
        for crop in values:
            yield Picture(values=crop[None], num_tokens=vision.tokens_per_crop)
        return
    if grids is None:
        raise InputError(
            "pixel_values come with image_grid_thw, which was not given: pass on what the processor returns"
        )
    start = 0
    for time, height, width in grids.tolist():
        stop = start + time * height * width
        num_tokens = time * height * width // vision.merge**2
        yield Picture(values=values[start:stop], grid=(time, height, width), num_tokens=num_tokens)
        start = stop
    if start != len(values):
        raise InputError(f"image_grid_thw have {start} patches, and pixel_values {len(values)}")


def _float32(pixels: Tensor) -> NDArray[np.float32]:
    if pixels.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InputError(f"pixel_values are float32 or narrower, got {pixels.dtype}: cast them")
    return pixels.detach().float().cpu().numpy()
