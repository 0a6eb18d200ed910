"""A group of completions after two pictures: the tree step against the stock model's padded batch, tower included.

Both compute the gradient of the mean negative log-probability of the completions, for every weight, on one thread. The
stock batch is that of a careful user: no padding is needed, and the head runs only on rows with loss.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common.timing import cpu_name, interleaved_medians, one_thread, process_seconds, versions
from treering.data.picture import Picture, PlacedPicture
from treering.objectives import sft
from treering.train.gradient.backward import backward
from treering.tree.forest import Forest
from treering.tree.stats import visible_pairs

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


def measure(
    *, num_runs: int = 5, case: Case = Case(), on_progress: Callable[..., None] | None = None
) -> dict[str, Any]:
    """Times both ways in turn, in CPU time of this process: medians, the bound, the difference of the gradients."""
    model, inputs, forest = _model(case), _stock_inputs(case), _forest(case)
    masks = [np.arange(length) >= length - case.completion_tokens for length in forest.branch_length.tolist()]
    grads: dict[str, dict[str, Tensor]] = {}

    def timed(name: str, compute: Callable[[], object]) -> Callable[[], None]:
        def step() -> None:
            model.zero_grad(set_to_none=True)
            compute()
            own = {key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None}
            grads[name] = own

        return step

    steps = {
        "padded_batch": timed("padded_batch", lambda: _stock_step(model, inputs, case)),
        "tree": timed("tree", lambda: backward(model, forest, sft(masks))),
    }
    with one_thread():
        for step in steps.values():
            step()
        medians = interleaved_medians(steps, num_runs, process_seconds)
    flat, tree = _flops(case, model, forest)
    speedup, bound = medians["padded_batch"] / medians["tree"], flat / tree
    return {
        "case": asdict(case),
        "seconds": medians,
        "speedup": speedup,
        "flop_bound": bound,
        "share_of_bound": speedup / bound,
        "num_tokens": forest.num_tokens,
        "num_branch_tokens": forest.num_branch_tokens,
        "gradient_difference": _difference(grads["tree"], grads["padded_batch"]),
        "num_runs": num_runs,
        "environment": {"cpu": cpu_name(), **versions()},
    }


def _model(case: Case) -> nn.Module:
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


def _forest(case: Case) -> Forest:
    rows, placed = _rows(case)
    return Forest.from_sequences(rows, pictures=[placed] * len(rows))


def _stock_inputs(case: Case) -> dict[str, Tensor]:
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


def _stock_step(model: nn.Module, inputs: dict[str, Tensor], case: Case) -> None:
    num = case.completion_tokens
    logits = model(**inputs, logits_to_keep=num + 1, use_cache=False).logits[:, :-1]
    torch.autograd.backward(F.cross_entropy(logits.flatten(0, 1), inputs["input_ids"][:, -num:].flatten()))


def _flops(case: Case, model: Any, forest: Forest) -> tuple[float, float]:
    """FLOPs of the flat and the tree step: 3 x (2 x weights x tokens + 4 x layers x width x pairs) of both parts."""
    weights = sum(weight.numel() for layer in model.model.language_model.layers for weight in layer.parameters())
    lengths = forest.branch_length.astype(float)
    head = 2 * model.lm_head.weight.numel() * case.num_completions * case.completion_tokens

    def text(num_tokens: float, num_pairs: float) -> float:
        return float(2 * weights * num_tokens + 4 * case.num_layers * case.hidden_size * num_pairs)

    tower = case.num_pictures * _tower_flops(case, model.model.visual)
    flat = text(lengths.sum(), (lengths * (lengths + 1) / 2).sum()) + case.num_completions * tower
    return 3 * (flat + head), 3 * (text(forest.num_tokens, visible_pairs(forest)) + tower + head)


def _tower_flops(case: Case, tower: Any) -> float:
    """FLOPs of one picture: windows of 8 x 8 patches in all blocks but the last, which sees all."""
    num_patches = (2 * case.picture_side) ** 2
    blocks: int = sum(weight.numel() for part in (tower.blocks, tower.patch_embed) for weight in part.parameters())
    merger: int = sum(weight.numel() for weight in tower.merger.parameters())
    pairs = num_patches * (64 * (case.tower_layers - 1) + num_patches)
    return float(2 * blocks * num_patches) + 2 * merger * num_patches / 4 + 4 * case.tower_size * pairs


def _difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of an entry, relative to the largest entry."""
    largest = max(float(grad.abs().max()) for grad in expected.values())
    return max(float((actual[name] - grad).abs().max()) for name, grad in expected.items()) / largest
