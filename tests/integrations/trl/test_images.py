"""TRL's trainers on images: gradients and metrics are the stock trainer's, and only equal pixels share a prefix."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.integrations.trl import image_runs, runs
from treering.errors import StateError, UnsupportedError
from treering.integrations.trl import share_prefixes
from treering.integrations.trl.grouping import keys_of_images, regroup
from treering.tree.forest import ImageTable

pytestmark = pytest.mark.filterwarnings("default")

# Bounds of the first step, in which weights are equal; two more steps round further, as for text.
FIRST_GRADIENT, GRADIENTS, METRICS = 1e-6, 3e-6, 1e-6
# Rounding of the stock path moves Gemma's by up to 1.2e-6 (measured by `verify_first`), and leave-one-out advantages
# sum to 0, see test_exactness.
TIMES = {"grpo gemma3": 2, "rloo": 3}

_MAKERS = {
    "qwen2_5_vl": ("sft", "dpo", "grpo", "kto"),
    **dict.fromkeys(("qwen3_vl", "gemma3", "internvl"), ("sft", "grpo")),
}
CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    **{f"{make} {family}": (getattr(image_runs, make), family, {}) for family in _MAKERS for make in _MAKERS[family]},
    "some rows without images": (image_runs.sft_mixed, "qwen2_5_vl", {"gradient_accumulation_steps": 2}),
    "rloo": (image_runs.rloo, "qwen2_5_vl", {}),
    "grpo lora": (image_runs.grpo, "qwen2_5_vl", {"lora": True, "beta": 0.1, "gradient_checkpointing": True}),
}


def trained(name: str, out: Path, shared: dict[str, Any] | None) -> runs.Run:
    make, family, options = CASES[name]
    return runs.train(make, family, out, shared=shared, **runs.model_and_options(options)[1])


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_metrics_are_those_of_the_stock_trainer(name: str, tmp_path: Path) -> None:
    stock = trained(name, tmp_path, None)
    ours = trained(name, tmp_path, {"group_batches": False})
    assert len(stock.gradients) >= 3
    times = TIMES.get(name, 1)
    assert runs.apart(ours.gradients[:1], stock.gradients[:1]) <= FIRST_GRADIENT * times
    apart = runs.apart(ours.gradients, stock.gradients)
    assert apart <= GRADIENTS * times
    found = runs.metrics_apart(ours.logs, stock.logs)
    # By the triangle inequality a norm is no further off than the gradients that it sums.
    assert found.pop("grad_norm") <= max(METRICS * times, apart)
    assert "loss" in found
    assert {name: value for name, value in found.items() if value > METRICS * times} == {}
    assert ours.handle.difference.tree <= ours.handle.difference.bound < 1e-4
    assert all(log["tree/token_ratio"] > 1 for log in ours.logs[:-1])
    assert any("vis" in weight for weight in stock.gradients[0]) == ("lora" not in name)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_regrouped_rollouts_keep_their_images(family: str, tmp_path: Path) -> None:
    # The loss is over the optimizer batch, which is the whole generation.
    stock = runs.train(image_runs.grpo, family, tmp_path)
    ours = runs.train(image_runs.grpo, family, tmp_path, shared={})
    assert runs.apart(ours.gradients, stock.gradients) <= GRADIENTS
    assert ours.logs[0]["tree/token_ratio"] > 2


def test_equal_placeholders_with_other_pixels_never_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = ImageTable.add

    def by_size(table: ImageTable, image: Any) -> int:
        same = [i for i, one in enumerate(table.images) if one.num_tokens == image.num_tokens]
        return same[0] if same else original(table, image)

    monkeypatch.setattr(ImageTable, "add", by_size)
    with pytest.raises(StateError, match="differ from the stock path"):
        trained("grpo qwen2_5_vl", tmp_path, {"group_batches": False})


def test_the_tower_sees_each_image_of_a_micro_batch_once(tmp_path: Path) -> None:
    calls: list[int] = []

    def count(model: Any) -> None:
        vision_tower = model.model.visual
        vision_tower.register_forward_pre_hook(
            lambda _, args, given: calls.append(_num_rows(args, given)), with_kwargs=True
        )

    options = {"shared": {"verify_first": False}, "change": count, "max_steps": 1}
    trainer = runs.train(image_runs.grpo, "qwen2_5_vl", tmp_path, **options).trainer
    # All four rows of a micro-batch have the same images.
    assert calls == [len(batch["pixel_values"]) // 4 for batch in trainer._buffered_inputs]


def _num_rows(args: Any, given: Any) -> int:
    """Return the number of patches or images of a call."""
    values: Tensor = next(one for one in (*args, *given.values()) if isinstance(one, Tensor))
    return len(values)


def test_groups_are_of_equal_prompts_with_equal_images() -> None:
    black, white = torch.zeros(4, 3), torch.ones(4, 3)

    def batch(images: list[Tensor], rows: list[int]) -> dict[str, Any]:
        ids = torch.full((2, 3), 9)
        return {
            **{"prompt_ids": ids, "prompt_mask": torch.ones_like(ids), "advantages": torch.tensor(rows)},
            **{"pixel_values": torch.cat(images), "image_grid_thw": torch.tensor([[1, 2, 2]] * 2)},
            "num_images": [1, 1],
        }

    first, second = regroup([batch([black, white], [0, 1]), batch([white, black], [2, 3])])
    assert (first["advantages"].tolist(), second["advantages"].tolist()) == ([0, 3], [1, 2])
    assert first["pixel_values"].equal(torch.cat([black, black]))
    assert second["pixel_values"].equal(torch.cat([white, white]))
    assert first["image_grid_thw"].tolist() == [[1, 2, 2]] * 2


def test_rows_with_the_same_images_stand_together(tmp_path: Path) -> None:
    data = image_runs.conversations()
    keys = keys_of_images(data)
    trainer = image_runs.sft("qwen2_5_vl", tmp_path)
    share_prefixes(trainer)
    order = trainer._get_train_sampler().order(0)
    # Every fourth row belongs to the same task.
    assert [len(set(order[start : start + 4] % 4)) for start in range(0, 16, 4)] == [1, 1, 1, 1]
    same = np.array_equal(keys[0][:16], keys[4][:16]), np.array_equal(keys[0][:16], keys[3][:16])
    assert same == (True, False)


@pytest.mark.parametrize(
    ("make", "setting", "rule"),
    [
        (runs.distillation, None, "takes images, which are tested on trees in GRPOTrainer"),
        (runs.sft, "torch_compile", "torch_compile=True, which is not tested with images"),
        (runs.sft, "deepspeed", r"under DeepSpeed.*use DDP or FSDP2"),
    ],
)
def test_what_is_not_tested_with_images_is_refused_by_name(
    make: Any, setting: str | None, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(runs.saved(), tmp_path)
    trainer._is_vlm = True
    trainer.args.torch_compile = setting == "torch_compile"
    trainer.is_deepspeed_enabled = setting == "deepspeed"
    monkeypatch.setattr(type(trainer.accelerator.state), "deepspeed_plugin", SimpleNamespace(zero_stage=1))
    with pytest.raises(UnsupportedError, match=rule):
        share_prefixes(trainer)
