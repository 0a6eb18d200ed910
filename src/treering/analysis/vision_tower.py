"""FLOPs of a model's vision tower for an image, from its config.json."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treering.data.image import ImageData


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionTowerShape:
    """Sizes of a vision tower, and of the projection of its outputs to the text, that decide its cost.

    Example: two layers of width 8 with 1,000 parameters per patch, in an image of 4 patches that see each other and
    become one token of 100 parameters, take 3 x (2 x (4,000 + 100) + 4 x 2 x 8 x 16) FLOPs.
    """

    params_per_patch: int
    """Parameters that one patch is multiplied with in all layers, its embedding included."""
    params_per_token: int
    """Parameters that one token of the text is multiplied with after the layers."""
    hidden_size: int
    num_full_layers: int
    """Layers in which each patch sees all others of its image or crop."""
    num_window_layers: int = 0
    patches_per_window: int = 0
    """Patches that one patch sees in the other layers."""
    patches_per_crop: int | None = None
    """Patches of a crop, for a model without image grids."""
    tokens_per_crop: int = 1

    def flops(self, images: Iterable[ImageData]) -> int:
        """Return the FLOPs of forward and backward over images, with every part trained; see `train_flops`."""
        return 3 * sum(map(self._forward, images))

    def _forward(self, image: ImageData) -> int:
        if image.grid is None:
            num_crops, num_patches = image.num_tokens // self.tokens_per_crop, self.patches_per_crop or 0
        else:
            num_crops, num_patches = 1, image.grid[1] * image.grid[2]
        window = min(self.patches_per_window, num_patches)
        pairs = self.num_full_layers * num_patches**2 + self.num_window_layers * num_patches * window
        matmuls = 2 * (self.params_per_patch * num_crops * num_patches + self.params_per_token * image.num_tokens)
        return matmuls + 4 * self.hidden_size * num_crops * pairs


def read_vision_tower(path: Path) -> VisionTowerShape | None:
    """Read the vision tower of a model from its config.json or folder; None if it is unknown or incomplete.

    Example: the folder of a text model has none.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_bytes())
        read = _FAMILIES.get(config.get("model_type"))
        return None if read is None else read(config, config["vision_config"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _qwen2_5_vl(config: Mapping[str, Any], vision: Mapping[str, Any]) -> VisionTowerShape:
    num_full = len(vision["fullatt_block_indexes"])
    return VisionTowerShape(
        params_per_patch=_layers(vision, vision["depth"], num_mlps=3) + _embedding(vision),
        params_per_token=_merger(vision),
        hidden_size=vision["hidden_size"],
        num_full_layers=num_full,
        num_window_layers=vision["depth"] - num_full,
        patches_per_window=(vision["window_size"] // vision["patch_size"]) ** 2,
    )


def _qwen3_vl(config: Mapping[str, Any], vision: Mapping[str, Any]) -> VisionTowerShape:
    return VisionTowerShape(
        params_per_patch=_layers(vision, vision["depth"], num_mlps=2) + _embedding(vision),
        params_per_token=_merger(vision) * (1 + len(vision["deepstack_visual_indexes"])),
        hidden_size=vision["hidden_size"],
        num_full_layers=vision["depth"],
    )


def _gemma3(config: Mapping[str, Any], vision: Mapping[str, Any]) -> VisionTowerShape:
    patch, width = vision["patch_size"], vision["hidden_size"]
    return VisionTowerShape(
        params_per_patch=_layers(vision, vision["num_hidden_layers"], num_mlps=2) + 3 * patch**2 * width,
        params_per_token=width * config["text_config"]["hidden_size"],
        hidden_size=width,
        num_full_layers=vision["num_hidden_layers"],
        patches_per_crop=(vision["image_size"] // patch) ** 2,
        tokens_per_crop=config["mm_tokens_per_image"],
    )


def _layers(vision: Mapping[str, Any], num_layers: int, *, num_mlps: int) -> int:
    """Return the parameters of all layers; `num_mlps` is 3 for gated MLPs."""
    width, inner = vision["hidden_size"], vision["intermediate_size"]
    return int(num_layers * (4 * width**2 + num_mlps * width * inner))


def _embedding(vision: Mapping[str, Any]) -> int:
    values = 3 * vision.get("temporal_patch_size", 2) * vision["patch_size"] ** 2
    return int(values * vision["hidden_size"])


def _merger(vision: Mapping[str, Any]) -> int:
    square = vision["hidden_size"] * vision["spatial_merge_size"] ** 2
    return int(square**2 + square * vision["out_hidden_size"])


_FAMILIES = {"qwen2_5_vl": _qwen2_5_vl, "qwen3_vl": _qwen3_vl, "gemma3": _gemma3}
