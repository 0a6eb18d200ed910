"""The vision part of a model: which images it takes, and their features, computed once per distinct image.

`images_of_batch` reads the images of a padded batch from the arguments that trainers pass to stock models.

    N tokens   M tokens of all distinct images   C hidden size   B rows   P images or crops of a batch
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from treering.attention.layout import to_device
from treering.data.image import ImageData, PlacedImage
from treering.errors import InputError, UnsupportedError, plural
from treering.families import IMAGE_FAMILIES
from treering.tree.forest import Forest, split_padded
from treering.tree.image_tokens import ImageTokens, image_tokens

_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VisionPart:
    """Vision tower of a model, with the projection of its outputs to the text model.

    Attributes:
        model: the model without its head, whose `get_image_features` runs the vision tower.
        family: a name from `IMAGE_FAMILIES`.
        placeholders: token ids that stand for images, and for videos and sounds, which are refused.
        sees_whole_images: whether the tokens of an image attend to the whole image.
        merge: patches along each side of a token's square, in families with grids; None in others.
        tokens_per_crop: number of tokens per crop, in families without grids.
        device: device of the features.
    """

    model: Any
    family: str
    placeholders: tuple[int, ...]
    sees_whole_images: bool
    merge: int | None
    tokens_per_crop: int | None
    device: torch.device

    def check(self, forest: Forest) -> None:
        """Refuse images that the model does not take, and placeholders without an image.

        Raises:
            InputError: names the image or the token.
        """
        bare = np.flatnonzero(np.isin(forest.tokens, self.placeholders))
        if bare.size:
            raise InputError(
                f"token id {int(forest.tokens[bare[0]])} at packed index {int(bare[0])} is a placeholder of model type "
                f"{self.family!r} without an image; give each image with its position (no video or sound)"
            )
        for number, image in enumerate(forest.images):
            self._check_image(image, f"image {number} of {image.num_tokens} tokens")
        if self.sees_whole_images:
            _check_apart(forest)

    def _check_image(self, image: ImageData, name: str) -> None:
        if self.merge is not None and (image.grid is None or image.merge != self.merge):
            raise InputError(
                f"{name} has grid {image.grid}, and model type {self.family!r} needs one token per square of "
                f"{self.merge} x {self.merge} patches; make images with the processor of this model"
            )
        if self.tokens_per_crop is None:
            return
        if image.grid is not None or len(image.values) * self.tokens_per_crop != image.num_tokens:
            raise InputError(
                f"{name} has values {image.values.shape} and grid {image.grid}, and model type {self.family!r} "
                f"needs no grid and {self.tokens_per_crop} tokens per crop; make images with the processor of this "
                "model"
            )

    def features(self, images: Sequence[ImageData]) -> list[Float[Tensor, "M C"]]:
        """Return the features of images in order: first those that replace their tokens, then those of deeper layers.

        The vision tower is called once; the result is differentiable.
        """
        values = torch.from_numpy(np.concatenate([image.values for image in images])).to(self.device)
        grids = {}
        if self.merge is not None:
            grids["image_grid_thw"] = torch.tensor([image.grid for image in images], device=self.device)
        output = self.model.get_image_features(values, **grids, return_dict=True)
        deeper = getattr(output, "deepstack_features", None) or ()
        return [_one_after_another(level) for level in (output.pooler_output, *deeper)]


def find_vision(causal_lm: Any) -> VisionPart | None:
    """Return the vision part of a model; None for a text model.

    Raises:
        UnsupportedError: a model whose images cannot be placed in a forest yet.
    """
    config = causal_lm.config
    if getattr(config, "vision_config", None) is None:
        return None
    family = IMAGE_FAMILIES.get(config.model_type)
    if family is None:
        raise UnsupportedError(
            f"model type {config.model_type!r} takes images and is not supported; supported are "
            f"{', '.join(IMAGE_FAMILIES)}; to "
            "train on text only, extract its language model as a separate causal language model"
        )
    per_crop = family.tokens_per_crop
    ids = (getattr(config, name, None) for name in _PLACEHOLDERS)
    return VisionPart(
        model=causal_lm.model,
        family=family.model_type,
        placeholders=tuple(token for token in ids if token is not None),
        sees_whole_images=family.sees_whole_images,
        merge=None if per_crop else config.vision_config.spatial_merge_size,
        tokens_per_crop=getattr(config, per_crop) if per_crop else None,
        device=next(causal_lm.model.parameters()).device,
    )


class ImageFeatures:
    """Features of distinct images, computed once and read by every pass of a step.

    Passes read leaves, whose gradients are summed in float32 or wider; `backward` takes the sums through the vision
    part once.
    """

    def __init__(self, vision: VisionPart, images: Sequence[ImageData], *, is_apart: bool) -> None:
        """Compute the features; with `is_apart`, passes read leaves, else their gradients enter the vision tower."""
        stops = np.cumsum([0, *(image.num_tokens for image in images)])
        self._first = {image.digest: int(start) for image, start in zip(images, stops, strict=False)}
        self._outputs = vision.features(images) if images else []
        self.levels = [_leaf(output) for output in self._outputs] if is_apart else self._outputs

    def rows(self, forest: Forest, placed_tokens: ImageTokens) -> Int[np.ndarray, " P"]:
        """Return the row in the features for each image token of a forest, int64, in packed order."""
        first = np.array([self._first[image.digest] for image in forest.images], np.int64)
        return first[placed_tokens.number] + placed_tokens.offset

    def backward(self) -> None:
        """Add the gradients of the vision part to `.grad`."""
        pairs = [(output, leaf.grad) for output, leaf in zip(self._outputs, self.levels, strict=True)]
        wanted = [(output, grad.to(output.dtype)) for output, grad in pairs if grad is not None]
        if wanted:
            torch.autograd.backward([output for output, _ in wanted], [grad for _, grad in wanted])


def distinct_images(forests: Sequence[Forest]) -> list[ImageData]:
    """Return each distinct image of some forests once, in order of first appearance.

    Example: two forests with the same image give one.
    """
    return list({image.digest: image for forest in forests for image in forest.images}.values())


def embedded(embedding: nn.Module, forest: Forest, features: ImageFeatures, device: torch.device) -> dict[str, Any]:
    """Return the decoder's inputs instead of token ids: embeddings, with image features at their positions.

    Includes the features of deeper layers, if the vision part has them.
    """
    placed_tokens = image_tokens(forest)
    at = to_device(placed_tokens.at, device)
    rows = to_device(features.rows(forest, placed_tokens), device)
    tokens = to_device(np.maximum(forest.tokens, 0), device)[None]
    embeddings: Tensor = embedding(tokens.long())
    own, *deeper = [level[rows].to(embeddings.dtype) for level in features.levels]
    inputs: dict[str, Any] = {"inputs_embeds": embeddings.index_copy(1, at, own[None])}
    if deeper:
        is_image = torch.zeros(tokens.shape, dtype=torch.bool, device=device)
        is_image[0, at] = True
        inputs |= {"visual_pos_masks": is_image, "deepstack_visual_embeds": deeper}
    return inputs


def _leaf(output: Tensor) -> Tensor:
    wide = torch.promote_types(output.dtype, torch.float32)
    return output.detach().to(wide).requires_grad_(output.requires_grad)


def _one_after_another(level: Any) -> Tensor:
    """Concatenate one tensor per image, or [crops, tokens, C], to [M, C]."""
    return torch.cat(list(level)) if isinstance(level, tuple | list) else level.flatten(0, -2)


def _check_apart(forest: Forest) -> None:
    """Refuse adjacent images, because stock models let the tokens of both attend to each other."""
    placed_tokens = image_tokens(forest)
    starts = placed_tokens.at[placed_tokens.offset == 0]
    above = forest.parent[starts]
    adjacent = starts[(above >= 0) & (forest.tokens[above] < 0)]
    if adjacent.size:
        raise InputError(
            f"an image at packed index {int(adjacent[0])} follows another without a token between, and the model "
            "would see them as one; put begin and end tokens around each image, as the model's processor does"
        )


OF_IMAGES = frozenset({"pixel_values", "image_grid_thw", "token_type_ids", "mm_token_type_ids"})
"""Arguments that say which images a batch has, and where."""

_REFUSED = MappingProxyType(
    {
        **dict.fromkeys(("pixel_values_videos", "video_grid_thw", "second_per_grid_ts"), "video is not supported"),
        **dict.fromkeys(("input_features", "feature_attention_mask"), "sound is not supported"),
        "mm_encoder_outputs": "image features are computed here, once per distinct image, from pixels",
        "position_ids": "positions follow from images along each branch",
        "vision_feature_layer": "the configuration's layer is used",
        "vision_feature_select_strategy": "the configuration's choice is used",
    }
)


def images_of_batch(
    vision: VisionPart, sequences: Sequence[NDArray[np.integer[Any]]], kwargs: Mapping[str, Any]
) -> list[list[PlacedImage]]:
    """Return the images of each sequence of a batch.

    Args:
        vision: vision part of the model that gets the batch.
        sequences: sequences of the batch, row after row, without padding.
        kwargs: arguments of the call: `pixel_values` of all images one after another, and grids in families with grids.

    Raises:
        InputError: images that do not fit the placeholders.
        UnsupportedError: video, sound, or arguments that a forest does not follow.

    Example: two rows with the same image give two equal digests, and so one image of the forest.
    """
    for name, why in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"a model that runs on trees does not support {name}: {why}; remove it")
    _check_types(vision, sequences, kwargs)
    if kwargs.get("pixel_values") is None:
        return [[] for _ in sequences]
    left = iter(_images(vision, kwargs["pixel_values"], kwargs.get("image_grid_thw")))
    placed = [list(_placed(tokens, vision, left)) for tokens in sequences]
    rest = sum(1 for _ in left)
    if rest:
        raise InputError(
            f"pixel_values hold {plural(rest, 'image')} more than input_ids have placeholders; check if rows were cut"
        )
    return placed


def _check_types(vision: VisionPart, sequences: Sequence[NDArray[np.integer[Any]]], kwargs: Mapping[str, Any]) -> None:
    """Refuse token types by which a stock model would attend to or rotate its images differently than a forest."""
    name = IMAGE_FAMILIES[vision.family].token_types
    if name is None:
        return
    types, mask = kwargs.get(name), kwargs.get("attention_mask")
    if types is None:
        if kwargs.get("pixel_values") is None:
            return
        raise InputError(
            f"model type {vision.family!r} needs {name} to find its images, and it was not given; pass on what the "
            "processor returns"
        )
    own = split_padded(types.cpu(), None if mask is None else mask.cpu(), None).sequences
    for row, (tokens, marked) in enumerate(zip(sequences, own, strict=True)):
        if ((tokens == vision.placeholders[0]) != (marked == 1)).any():
            raise InputError(
                f"{name} must be 1 at image placeholders and 0 elsewhere, and sequence {row} of the batch differs; "
                "pass on what the processor returns"
            )


def _placed(tokens: NDArray[np.integer[Any]], vision: VisionPart, left: Iterator[ImageData]) -> Iterator[PlacedImage]:
    positions = np.flatnonzero(tokens == vision.placeholders[0])
    at = 0
    while at < positions.size:
        image = next(left, None)
        if image is None or at + image.num_tokens > positions.size:
            raise InputError(
                f"a row has {positions.size} image placeholders, which pixel_values do not fill; check if rows were cut"
            )
        yield PlacedImage(start=int(positions[at]), image=image)
        at += image.num_tokens


def _images(vision: VisionPart, pixels: Tensor, grids: Tensor | None) -> Iterator[ImageData]:
    """Yield each image in families with grids, each crop in others."""
    if pixels.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InputError(f"pixel_values must be float32 or narrower, got {pixels.dtype}; cast them")
    values: NDArray[np.float32] = pixels.detach().float().cpu().numpy()
    if vision.merge is None:
        assert vision.tokens_per_crop is not None
        for crop in values:
            yield ImageData(values=crop[None], num_tokens=vision.tokens_per_crop)
        return
    if grids is None:
        raise InputError("pixel_values need image_grid_thw, which was not given; pass on what the processor returns")
    start = 0
    for time, height, width in grids.tolist():
        stop = start + time * height * width
        num_tokens = time * height * width // vision.merge**2
        yield ImageData(values=values[start:stop], grid=(time, height, width), num_tokens=num_tokens)
        start = stop
    if start != len(values):
        raise InputError(
            f"image_grid_thw has {start} patches, and pixel_values {len(values)}; pass on what the processor returns"
        )
