"""One rank of a run under torchrun: `python -m tests.integrations.trl.fsdp_run FOLDER CASE...`.

Trains each case stock and shared under FSDP2, and saves gradients of every optimizer step, and the weights after the
last, by rank. Of `REFUSALS` it saves what each rank raised.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.integrations.trl import fsdp_on_cpu, picture_runs, runs
from treering.errors import StateError
from treering.model.patch import TreePatch
from treering.ranks.state import as_whole

OFFLOADED, CHECKPOINTED = {"cpu_offload": True}, {"activation_checkpointing": True}
ROUTED = {"model_init_kwargs": {"output_router_logits": True}, "learning_rate": 1e-3}
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "sft accumulated": (runs.sft, {"gradient_accumulation_steps": 2}, {}),
    "sft tied": (runs.sft, {"model": {"tie_word_embeddings": True}}, {}),
    "sft experts offloaded": (runs.sft, {"model": {"family": "qwen3_moe"}, **ROUTED}, OFFLOADED),
    "grpo checkpointed": (runs.grpo, {"beta": 0.1}, CHECKPOINTED),
    "grpo offloaded checkpointed": (runs.grpo, {"gradient_accumulation_steps": 1}, OFFLOADED | CHECKPOINTED),
    "dpo lora": (runs.dpo, {"lora": True, "gradient_checkpointing": True}, {}),
    "kto one unit": (runs.kto, {}, {"auto_wrap_policy": "NO_WRAP"}),
    "distillation": (runs.distillation, {"gradient_accumulation_steps": 1}, {}),
    "pictures grpo": (picture_runs.grpo, {"pictures": "qwen2_5_vl", "beta": 0.1}, {}),
    "pictures sft checkpointed": (picture_runs.sft, {"pictures": "qwen3_vl"}, CHECKPOINTED),
}
PICTURE_LAYERS = {
    "qwen2_5_vl": ["Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock"],
    "qwen3_vl": ["Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock"],
}


def options_of(name: str) -> tuple[Any, str, dict[str, Any]]:
    """What trains a case, its model, and the options of both sides."""
    make, options, sharding = CASES[name]
    model, options = runs.model_and_options(options)
    family = options.pop("pictures", None)
    layers = ["Qwen3MoeDecoderLayer" if model.get("family") == "qwen3_moe" else "Qwen3DecoderLayer"]
    layers = layers if family is None else PICTURE_LAYERS[family]
    if family is not None:
        picture_runs.saved(family)
    sharding = {"version": 2, "transformer_layer_cls_to_wrap": layers, **sharding}
    return make, family or runs.saved(**model), {"fsdp": True, "fsdp_config": sharding, **options}


def weights_of(run: runs.Run) -> dict[str, torch.Tensor]:
    return {name: as_whole(weight.detach()).clone() for name, weight in run.trainer.model.named_parameters()}


def refusal_of_a_wrong_tree(folder: Path) -> str:
    """What this rank raises where rank 1 alone reads the state of the token before each."""
    stock = TreePatch._batch

    def shifted(self: Any, args: Any, kwargs: Any) -> Any:
        batch = stock(self, args, kwargs)
        if batch is not None and dist.get_rank() == 1:
            batch.places[:, 1:] = batch.places[:, :-1].copy()
        return batch

    TreePatch._batch = shifted
    make, model, options = options_of("sft accumulated")
    try:
        runs.train(make, model, folder, shared={}, **options)
    except StateError as error:
        return str(error)
    return ""


def refusal_of_pictures_on_one_rank(folder: Path) -> str:
    """What this rank raises where rank 0 alone has pictures."""
    _, family, options = options_of("pictures sft checkpointed")
    options |= {"per_device_train_batch_size": 1, "train_sampling_strategy": "sequential"}
    options["trainer_options"] = {"train_dataset": picture_runs.mixed().select([1, 0])}
    try:
        runs.train(picture_runs.sft, family, folder, shared={"group_batches": False}, **options)
    except StateError as error:
        return str(error)
    return ""


REFUSALS = {"wrong": refusal_of_a_wrong_tree, "pictures on one rank": refusal_of_pictures_on_one_rank}


def main(folder: Path, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    fsdp_on_cpu.emulate()
    # Models are saved before there are ranks, of which only the first would write.
    runs.saved(seed=1)
    cases = {name: options_of(name) for name in CASES}
    saved: dict[str, Any] = {}
    for name in names:
        if name in REFUSALS:
            saved[name] = REFUSALS[name](folder / "out")
            continue
        make, model, options = cases[name]
        for side, shared in (("stock", None), ("ours", {"group_batches": False})):
            run = runs.train(make, model, folder / "out", shared=shared, **options)
            saved[f"{name}/{side}"] = run.gradients
            saved[f"{name}/{side}/weights"] = weights_of(run)
            saved[f"{name}/{side}/ratio"] = [log.get("tree/token_ratio") for log in run.logs[:-1]]
    torch.save(saved, folder / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
