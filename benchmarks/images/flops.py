"""FLOPs of a step on images, vision tower included."""

from typing import Any

from benchmarks.images.cases import Case
from treering.tree.forest import Forest
from treering.tree.stats import visible_pairs


def step_flops(case: Case, model: Any, forest: Forest) -> tuple[float, float]:
    """FLOPs of the flat and the tree step: 3 x (2 x weights x tokens + 4 x layers x width x pairs) of both parts."""
    weights = sum(weight.numel() for layer in model.model.language_model.layers for weight in layer.parameters())
    lengths = forest.branch_length.astype(float)
    head = 2 * model.lm_head.weight.numel() * case.num_completions * case.completion_tokens

    def text(num_tokens: float, num_pairs: float) -> float:
        return float(2 * weights * num_tokens + 4 * case.num_layers * case.hidden_size * num_pairs)

    vision_tower = case.num_images * _vision_flops(case, model.model.visual)
    flat = text(lengths.sum(), (lengths * (lengths + 1) / 2).sum()) + case.num_completions * vision_tower
    return 3 * (flat + head), 3 * (text(forest.num_tokens, visible_pairs(forest)) + vision_tower + head)


def _vision_flops(case: Case, vision_tower: Any) -> float:
    """FLOPs of one image: windows of 8 x 8 patches in all layers but those that see all."""
    num_patches = (2 * case.image_side) ** 2
    blocks: int = sum(
        weight.numel() for part in (vision_tower.blocks, vision_tower.patch_embed) for weight in part.parameters()
    )
    merger: int = sum(weight.numel() for weight in vision_tower.merger.parameters())
    num_whole = len(case.whole_layers)
    pairs = num_patches * (64 * (case.tower_layers - num_whole) + num_patches * num_whole)
    return float(2 * blocks * num_patches) + 2 * merger * num_patches / 4 + 4 * case.tower_size * pairs
