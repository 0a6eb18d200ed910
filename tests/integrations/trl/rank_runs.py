"""One rank of runs under torchrun: `python -m tests.integrations.trl.rank_runs KIND FOLDER CASE...`, KIND of `CASES`.

Trains each case stock and shared, and saves gradients of every optimizer step, the weights after the last, and token
ratios, by rank. For `REFUSALS` it saves the error of each rank.
"""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState

from tests.integrations.trl import image_runs, on_cpu, runs
from treering.errors import StateError
from treering.model.patch import TreePatch
from treering.ranks.sharded_state import as_whole

ROUTED = {"model_init_kwargs": {"output_router_logits": True}, "learning_rate": 1e-3}
REFERENCED = {"beta": 0.1, "gradient_checkpointing": True}
DDP: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    # name: trainer, options of the host, options of the run
    "grpo accumulated": (runs.grpo, {}, {"beta": 0.1, "share": {}}),
    "grpo lora": (runs.grpo, {}, {"lora": True, **REFERENCED}),
    "sft": (runs.sft, {}, {"gradient_accumulation_steps": 2, "ddp_find_unused_parameters": True}),
    "distillation": (runs.distillation, {}, {"gradient_accumulation_steps": 1}),
    "images grpo": (image_runs.grpo, {}, {"images": "qwen2_5_vl", "gradient_accumulation_steps": 1}),
    "images sft": (image_runs.sft_mixed, {}, {"images": "qwen2_5_vl", "gradient_accumulation_steps": 2}),
}
OFFLOADED, CHECKPOINTED = {"cpu_offload": True}, {"activation_checkpointing": True}
FSDP: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "sft accumulated": (runs.sft, {}, {"gradient_accumulation_steps": 2}),
    "sft tied": (runs.sft, {}, {"model": {"tie_word_embeddings": True}}),
    "sft experts offloaded": (runs.sft, OFFLOADED, {"model": {"family": "qwen3_moe"}, **ROUTED}),
    "grpo checkpointed": (runs.grpo, CHECKPOINTED, {"beta": 0.1}),
    "grpo offloaded checkpointed": (runs.grpo, OFFLOADED | CHECKPOINTED, {"gradient_accumulation_steps": 1}),
    "dpo lora": (runs.dpo, {}, {"lora": True, "gradient_checkpointing": True}),
    "kto one unit": (runs.kto, {"auto_wrap_policy": "NO_WRAP"}, {}),
    "distillation": (runs.distillation, {}, {"gradient_accumulation_steps": 1}),
    "images grpo": (image_runs.grpo, {}, {"images": "qwen2_5_vl", "beta": 0.1}),
    "images sft checkpointed": (image_runs.sft, CHECKPOINTED, {"images": "qwen3_vl"}),
}
LAYERS = {
    "qwen2_5_vl": ["Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock"],
    "qwen3_vl": ["Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock"],
    "qwen3_moe": ["Qwen3MoeDecoderLayer"],
}


def sampled(*args: Any, **options: Any) -> Any:
    """Train GRPO on completions of the model itself; to sample, ZeRO-3 removes its hooks and adds them again."""
    made = runs.grpo(*args, **options)
    del made._generate_single_turn
    return made


ON_HOST = {"offload_optimizer": {"device": "cpu"}}
UNVERIFIED = {"share": {"group_batches": False, "verify_first": False}}
ZERO: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "grpo 1": (runs.grpo, {"stage": 1}, REFERENCED),
    "sft 2": (runs.sft, {"stage": 2}, {"gradient_accumulation_steps": 2}),
    "dpo lora 2": (runs.dpo, {"stage": 2}, {"lora": True}),
    "kto 2": (runs.kto, {"stage": 2, **ON_HOST}, {}),
    "distillation 2": (runs.distillation, {"stage": 2}, {"gradient_accumulation_steps": 1}),
    "sft 3": (
        runs.sft,
        {"stage": 3, **ON_HOST, "offload_param": {"device": "cpu"}},
        {"gradient_accumulation_steps": 2},
    ),
    "sft tied 3": (runs.sft, {"stage": 3}, {"model": {"tie_word_embeddings": True}}),
    "sft experts 3": (runs.sft, {"stage": 3}, {"model": {"family": "qwen3_moe"}, **ROUTED, **UNVERIFIED}),
    "grpo sampled 3": (sampled, {"stage": 3}, REFERENCED),
    "dpo lora 3": (runs.dpo, {"stage": 3}, {"lora": True, "gradient_checkpointing": True, **UNVERIFIED}),
}
CASES = {"ddp": DDP, "fsdp": FSDP, "zero": ZERO}


def options_of(kind: str, name: str) -> tuple[Any, str, dict[str, Any], dict[str, Any]]:
    """Return the trainer of a case, its model, the options of both sides, and those of `share_prefixes`."""
    make, host, options = CASES[kind][name]
    model, options = runs.model_and_options(options)
    family = options.pop("images", None)
    shared = options.pop("share", {"group_batches": False})
    if kind == "fsdp":
        layers = LAYERS.get(family or model.get("family"), ["Qwen3DecoderLayer"])
        options |= {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": layers, **host}}
    if kind == "zero":
        config = {
            "zero_optimization": {**host, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
        }
        options |= {"deepspeed": config, "use_cpu": False}
    if family is not None:
        image_runs.saved(family)
    return make, family or runs.saved(**model), options, shared


def trained(kind: str, case: tuple[Any, str, dict[str, Any]], out: Path, shared: dict[str, Any] | None) -> Any:
    """Return gradients, weights and token ratios of a run."""
    make, model, options = case
    if kind != "zero":
        run = runs.train(make, model, out, shared=shared, **options)
        found = {"gradients": run.gradients, "is_partitioned": False}
        weights = {name: as_whole(weight.detach()).clone() for name, weight in run.trainer.model.named_parameters()}
    else:
        with on_cpu.gradients_of_deepspeed() as gradients:
            run = runs.train(make, model, out, shared=shared, **options)
        found = {"gradients": gradients, "is_partitioned": all(w.numel() == 0 for w in run.trainer.model.parameters())}
        weights = on_cpu.weights_of_deepspeed(run.trainer.model)
        AcceleratorState._reset_state()
    return {**found, "weights": weights, "ratio": [log.get("tree/token_ratio") for log in run.logs[:-1]]}


def refusal(train: Callable[[], Any]) -> str:
    try:
        train()
    except StateError as error:
        return str(error)
    return ""


def refusal_of_a_wrong_tree(folder: Path) -> str:
    """Return this rank's error if only rank 1 has a wrong tree."""
    TreePatch._batch = runs.misplaced(TreePatch._batch, lambda: dist.get_rank() == 1)
    make, model, options, _ = options_of("fsdp", "sft accumulated")
    return refusal(lambda: runs.train(make, model, folder, shared={}, **options))


def refusal_of_images_on_one_rank(folder: Path) -> str:
    """Return this rank's error if only rank 0 has images."""
    make, family, options, shared = options_of("fsdp", "images sft checkpointed")
    options |= {"per_device_train_batch_size": 1, "train_sampling_strategy": "sequential"}
    options["trainer_options"] = {"train_dataset": image_runs.mixed().select([1, 0])}
    return refusal(lambda: runs.train(make, family, folder, shared=shared, **options))


# The wrong tree comes last, because it stays.
REFUSALS = {"images on one rank": refusal_of_images_on_one_rank, "wrong": refusal_of_a_wrong_tree}


def main(kind: str, folder: Path, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    on_cpu.emulate(kind)
    # Save models before there are ranks, because only the first rank would write.
    runs.saved(seed=1)
    cases = {name: options_of(kind, name) for name in CASES[kind]}
    saved: dict[str, Any] = {}
    for name in names:
        if name in REFUSALS:
            saved[name] = REFUSALS[name](folder / "out")
            continue
        *case, shared = cases[name]
        for side, given in (("stock", None), ("ours", shared)):
            saved[f"{name}/{side}"] = trained(kind, tuple(case), folder / "out", given)
    torch.save(saved, folder / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
