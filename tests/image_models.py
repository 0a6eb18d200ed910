"""Tiny random models that take images, their images, and training of stock transformers on each sequence separately."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from treering.data.image import ImageData, PlacedImage
from treering.tree.forest import Forest

IMAGE, VIDEO, VOCAB = 90, 91, 96
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_QWEN_VISION = {"depth": 2, "hidden_size": 24, "num_heads": 2, "patch_size": 2, "in_channels": 3, "out_hidden_size": 32}
_QWEN_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 92, "vision_end_token_id": 93}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}


def _qwen2_5_vl() -> transformers.PreTrainedConfig:
    vision = {**_QWEN_VISION, "intermediate_size": 32, "window_size": 8, "fullatt_block_indexes": [1]}
    text = {**_TEXT, "rope_parameters": _MROPE}
    return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_QWEN_IDS)


def _qwen3_vl() -> transformers.PreTrainedConfig:
    more = {"intermediate_size": 32, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
    text = {**_TEXT, "head_dim": 8, "rope_parameters": {**_MROPE, "mrope_interleaved": True}}
    return transformers.Qwen3VLConfig(text_config=text, vision_config={**_QWEN_VISION, **more}, **_QWEN_IDS)


def _gemma3() -> transformers.PreTrainedConfig:
    text = {**_TEXT, "head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
    vision = {
        **{"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"image_size": 16, "patch_size": 2, "vision_use_head": False},
    }
    return transformers.Gemma3Config(
        text_config={**text, "num_hidden_layers": 4}, vision_config=vision, mm_tokens_per_image=16, image_token_id=IMAGE
    )


def _internvl() -> transformers.PreTrainedConfig:
    vision = {
        **{"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"image_size": [16, 16], "patch_size": [4, 4]},
    }
    text = {**_TEXT, "model_type": "qwen2"}
    return transformers.InternVLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, image_seq_length=4, downsample_ratio=0.5
    )


_CONFIGS = {"qwen2_5_vl": _qwen2_5_vl, "qwen3_vl": _qwen3_vl, "gemma3": _gemma3, "internvl": _internvl}
FAMILIES = tuple(_CONFIGS)


def build(family: str, seed: int = 0) -> nn.Module:
    """Build a stock model with random weights, float32, in training mode."""
    config = _CONFIGS[family]()
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * (0.3 if weight.dim() == 1 else 0.1))
    return model.train()


@cache
def image(family: str, number: int, *, wide: bool = False) -> ImageData:
    """Return an image of random values; `wide` ones have another size."""
    random = np.random.default_rng(1000 + number)
    if family.startswith("qwen"):
        height, width = (4, 8) if wide else (6, 4)
        values = random.standard_normal((height * width, 2 * 3 * 2 * 2)).astype(np.float32)
        return ImageData(values=values, grid=(1, height, width), num_tokens=height * width // 4)
    crops = 2 if wide and family == "internvl" else 1
    per_crop = 16 if family == "gemma3" else 4
    values = random.standard_normal((crops, 3, 16, 16)).astype(np.float32)
    return ImageData(values=values, num_tokens=crops * per_crop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequenced:
    """Sequence of text and images."""

    tokens: list[int]
    placed: list[PlacedImage]
    mask: list[bool]


def sequence(*parts: int | ImageData, trained: Sequence[int] = ()) -> Sequenced:
    """Concatenate tokens and images; only the tokens of `trained` have a mask of True."""
    tokens: list[int] = []
    placed = []
    for part in parts:
        if isinstance(part, ImageData):
            placed.append(PlacedImage(start=len(tokens), image=part))
            tokens += [IMAGE] * part.num_tokens
        else:
            tokens.append(part)
    mask = [False] * len(tokens) + [True] * len(trained)
    return Sequenced(tokens=[*tokens, *trained], placed=placed, mask=mask)


def sequences_of(family: str) -> list[Sequenced]:
    """Branches before, between and after images; two sizes in one prefix; equal placeholders with other pixels."""
    first, second, other = (image(family, i, wide=i == 1) for i in range(3))
    start = (5, 6, 92, first, 93)
    both = (*start, 7, 92, second, 93, 8)
    return [
        sequence(*both, trained=[10, 11, 12]),
        sequence(*both, trained=[10, 11, 13, 14]),
        sequence(*both, trained=[15]),
        sequence(*start, 7, 92, other, 93, 8, trained=[10, 16]),
        sequence(*start, 17, trained=[18, 19, 20]),
        sequence(*start, 7, 92, first, 93, trained=[21, 22]),
        sequence(5, 6, 23, trained=[24, 25]),
        sequence(5, 6, 92, other, 93, 7, 92, second, 93, 8, trained=[10, 11]),
    ]


def forest_of(sequences: Sequence[Sequenced]) -> Forest:
    return Forest.from_sequences([one.tokens for one in sequences], images=[one.placed for one in sequences])


def stock_inputs(model: nn.Module, one: Sequenced) -> dict[str, Tensor]:
    """Return what a processor gives stock transformers for one sequence."""
    ids = torch.tensor([one.tokens])
    family = model.config.model_type
    types = (ids == IMAGE).long()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if family != "internvl":
        inputs["token_type_ids" if family == "gemma3" else "mm_token_type_ids"] = types
    if one.placed:
        inputs["pixel_values"] = torch.cat([torch.tensor(p.image.values) for p in one.placed])
        if family.startswith("qwen"):
            inputs["image_grid_thw"] = torch.tensor([p.image.grid for p in one.placed])
    return inputs


def flat_loss(model: nn.Module, sequences: Sequence[Sequenced]) -> Tensor:
    """Return minus the log-probs of trained tokens, summed over sequences that run separately."""
    losses = []
    for one in sequences:
        logits = model(**stock_inputs(model, one), use_cache=False).logits[0, :-1]
        targets = torch.tensor(one.tokens[1:])
        own = -logits.float().log_softmax(-1).gather(1, targets.clamp(max=VOCAB - 1)[:, None])[:, 0]
        losses.append(own[torch.tensor(one.mask[1:])].sum())
    return torch.stack(losses).sum()
