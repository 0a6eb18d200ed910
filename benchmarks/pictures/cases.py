"""The batch and the model of the benchmark of pictures."""

from dataclasses import dataclass, replace

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from treering.data.picture import Picture, PlacedPicture
from treering.tree.forest import Forest

IMAGE, VIDEO, BEGIN, END = 1000, 1001, 1002, 1003


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sizes of the batch and the model, whose shape is that of Qwen2.5-VL, smaller."""

    num_pictures: int = 2
    picture_side: int = 16
    """Tokens along each side of a picture."""
    num_text_tokens: int = 64
    num_completions: int = 8
    completion_tokens: int = 64
    hidden_size: int = 512
    num_layers: int = 4
    tower_size: int = 320
    tower_layers: int = 4


DEFAULT = Case()


def small(case: Case) -> Case:
    """The same model on the smallest batch."""
    return replace(case, picture_side=4, num_text_tokens=4, num_completions=2, completion_tokens=4)


def model_of(case: Case) -> nn.Module:
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            **{"vocab_size": 1024, "hidden_size": case.hidden_size, "intermediate_size": 3 * case.hidden_size},
            **{"num_hidden_layers": case.num_layers, "num_attention_heads": 8, "num_key_value_heads": 2},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
        },
        vision_config={
            **{"depth": case.tower_layers, "hidden_size": case.tower_size, "num_heads": 5, "patch_size": 14},
            **{"intermediate_size": 3 * case.tower_size, "out_hidden_size": case.hidden_size, "window_size": 112},
            "fullatt_block_indexes": [case.tower_layers - 1],
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForImageTextToText.from_config(config)
    return model.train()


def _pictures(case: Case) -> list[Picture]:
    random, side = np.random.default_rng(0), 2 * case.picture_side
    return [
        Picture(
            values=random.standard_normal((side * side, 3 * 2 * 14 * 14)).astype(np.float32),
            grid=(1, side, side),
            num_tokens=case.picture_side**2,
        )
        for _ in range(case.num_pictures)
    ]


def _rows(case: Case) -> tuple[list[list[int]], list[PlacedPicture]]:
    random, prompt, placed = np.random.default_rng(1), [], []
    for picture in _pictures(case):
        prompt.append(BEGIN)
        placed.append(PlacedPicture(start=len(prompt), picture=picture))
        prompt += [IMAGE] * picture.num_tokens + [END]
    prompt += random.integers(0, 1000, case.num_text_tokens).tolist()
    return [
        [*prompt, *random.integers(0, 1000, case.completion_tokens).tolist()] for _ in range(case.num_completions)
    ], placed


def forest_of(case: Case) -> Forest:
    rows, placed = _rows(case)
    return Forest.from_sequences(rows, pictures=[placed] * len(rows))


def stock_inputs(case: Case) -> dict[str, Tensor]:
    rows, placed = _rows(case)
    ids = torch.tensor(rows)
    pixels = torch.cat([torch.tensor(one.picture.values) for one in placed])
    grids = torch.tensor([one.picture.grid for one in placed])
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE).long(),
        "pixel_values": pixels.repeat(len(rows), 1),
        "image_grid_thw": grids.repeat(len(rows), 1),
    }
