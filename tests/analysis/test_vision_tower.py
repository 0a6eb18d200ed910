"""The cost of a vision tower equals its weights and pairs counted one by one."""

import json
from itertools import product

import pytest

from tests.image_models import build, image
from treering.analysis.vision_tower import read_vision_tower

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3")


def matrices_of(model):
    """Return the number of weights applied to patches and to tokens, by their place in the model."""
    patches = tokens = 0
    for name, weight in model.model.named_parameters():
        if "language_model" in name or weight.dim() < 2 or "pos" in name:
            continue
        if "merger" in name or "projector" in name:
            tokens += weight.numel()
        else:
            patches += weight.numel()
    return patches, tokens


def num_pairs(model, one):
    """Count the pairs of patches that see each other, times layers."""
    vision = model.config.vision_config
    if one.grid is None:
        num = (vision.image_size // vision.patch_size) ** 2
        return len(one.values) * num**2 * vision.num_hidden_layers
    _, height, width = one.grid
    full = getattr(vision, "fullatt_block_indexes", range(vision.depth))
    side = getattr(vision, "window_size", 0) // vision.patch_size
    cells = list(product(range(height), range(width)))
    in_window = sum((a // side, b // side) == (c // side, d // side) for a, b in cells for c, d in cells) if side else 0
    return len(full) * len(cells) ** 2 + (vision.depth - len(full)) * in_window


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_are_those_of_the_weights_and_the_pairs_of_patches(tmp_path, family):
    model = build(family)
    model.config.save_pretrained(tmp_path)
    # A window of 4 x 4 patches divides this image.
    one = image(family, 0, wide=True)
    num_patches = len(one.values) if one.grid else 64 * len(one.values)
    patches, tokens = matrices_of(model)
    vision = model.config.vision_config
    forward = 2 * (patches * num_patches + tokens * one.num_tokens) + 4 * vision.hidden_size * num_pairs(model, one)
    vision_tower = read_vision_tower(tmp_path)
    assert vision_tower.flops([one, one]) == 3 * 2 * forward


def test_a_model_of_text_and_a_short_config_have_no_tower(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert read_vision_tower(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "vision_config": {"patch_size": 2}}))
    assert read_vision_tower(tmp_path) is None
    assert read_vision_tower(tmp_path / "missing") is None
