"""The batch and the model of the benchmark of images."""

from dataclasses import dataclass, replace

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from treering.data.image import ImageData, PlacedImage
from treering.model.layers import enable_gradient_checkpointing
from treering.tree.forest import Forest

IMAGE, VIDEO, BEGIN, END = 1000, 1001, 1002, 1003


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sizes of the batch and the model, a Qwen2.5-VL with random weights."""

    num_images: int = 2
    image_side: int = 16
    """Tokens along each side of an image."""
    num_text_tokens: int = 64
    num_completions: int = 8
    completion_tokens: int = 64
    vocab_size: int = 1024
    hidden_size: int = 512
    intermediate_size: int = 1536
    num_layers: int = 4
    num_heads: int = 8
    is_tied: bool = False
    tower_size: int = 320
    tower_intermediate_size: int = 960
    tower_layers: int = 4
    tower_heads: int = 5
    whole_layers: tuple[int, ...] = (3,)
    """Layers of the vision tower that see a whole image; the others see windows of 8 x 8 patches."""
    is_checkpointed: bool = False
    dtype: str = "float32"


DEFAULT = Case()

QWEN2_5_VL_3B = Case(
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=11_008,
    num_layers=36,
    num_heads=16,
    is_tied=True,
    tower_size=1280,
    tower_intermediate_size=3420,
    tower_layers=32,
    tower_heads=16,
    whole_layers=(7, 15, 23, 31),
    is_checkpointed=True,
    dtype="bfloat16",
)
"""The default's batch on the published shape; a padded batch without checkpointing would not fit."""


def small(case: Case) -> Case:
    """The same model on the smallest batch."""
    return replace(case, image_side=4, num_text_tokens=4, num_completions=2, completion_tokens=4)


def model_of(case: Case, device: str = "cpu") -> nn.Module:
    """The model with seeded random weights, drawn on its device; training mode."""
    head_size = case.hidden_size // case.num_heads
    # Time, height and width share the pairs of a head as in the published models.
    section = [head_size // 8, 3 * head_size // 16, 3 * head_size // 16]
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            **{"vocab_size": case.vocab_size, "hidden_size": case.hidden_size, "num_hidden_layers": case.num_layers},
            **{"intermediate_size": case.intermediate_size, "tie_word_embeddings": case.is_tied},
            **{"num_attention_heads": case.num_heads, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": section},
        },
        vision_config={
            **{"depth": case.tower_layers, "hidden_size": case.tower_size, "num_heads": case.tower_heads},
            **{"intermediate_size": case.tower_intermediate_size, "out_hidden_size": case.hidden_size},
            **{"patch_size": 14, "window_size": 112, "fullatt_block_indexes": list(case.whole_layers)},
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        tie_word_embeddings=case.is_tied,
    )
    devices = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(0)
        model: nn.Module = transformers.AutoModelForImageTextToText.from_config(
            config, dtype=getattr(torch, case.dtype), attn_implementation="sdpa"
        )
    enable_gradient_checkpointing(model, "non_reentrant" if case.is_checkpointed else "none")
    return model.train()


def _images(case: Case) -> list[ImageData]:
    random, side = np.random.default_rng(0), 2 * case.image_side
    return [
        ImageData(
            values=random.standard_normal((side * side, 3 * 2 * 14 * 14)).astype(np.float32),
            grid=(1, side, side),
            num_tokens=case.image_side**2,
        )
        for _ in range(case.num_images)
    ]


def _rows(case: Case) -> tuple[list[list[int]], list[PlacedImage]]:
    random, prompt, placed = np.random.default_rng(1), [], []
    for image in _images(case):
        prompt.append(BEGIN)
        placed.append(PlacedImage(start=len(prompt), image=image))
        prompt += [IMAGE] * image.num_tokens + [END]
    prompt += random.integers(0, 1000, case.num_text_tokens).tolist()
    return [
        [*prompt, *random.integers(0, 1000, case.completion_tokens).tolist()] for _ in range(case.num_completions)
    ], placed


def forest_of(case: Case) -> Forest:
    rows, placed = _rows(case)
    return Forest.from_sequences(rows, images=[placed] * len(rows))


def stock_inputs(case: Case) -> dict[str, Tensor]:
    rows, placed = _rows(case)
    ids = torch.tensor(rows)
    pixels = torch.cat([torch.tensor(one.image.values) for one in placed])
    grids = torch.tensor([one.image.grid for one in placed])
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE).long(),
        "pixel_values": pixels.repeat(len(rows), 1),
        "image_grid_thw": grids.repeat(len(rows), 1),
    }
