"""One rank of a run under torchrun: `python -m tests.integrations.trl.zero_run FOLDER CASE...`.

Trains each case stock and shared under DeepSpeed, and saves gradients of every optimizer step, and the weights after
the last, by rank.
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", ACCELERATE_TORCH_DEVICE="cpu")

import deepspeed
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from deepspeed.utils import safe_get_full_grad

from tests.integrations.trl import runs
from tests.integrations.trl.fsdp_run import ROUTED


def sampled(*args: Any, **options: Any) -> Any:
    """GRPO whose completions the model itself samples, for which ZeRO-3 takes its hooks off and puts them on again."""
    made = runs.grpo(*args, **options)
    del made._generate_single_turn
    return made


OFFLOADED = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "grpo 1": (runs.grpo, {"stage": 1}, {"beta": 0.1, "gradient_checkpointing": True}),
    "sft 2": (runs.sft, {"stage": 2}, {"gradient_accumulation_steps": 2}),
    "dpo lora 2": (runs.dpo, {"stage": 2}, {"lora": True}),
    "kto 2": (runs.kto, {"stage": 2, "offload_optimizer": {"device": "cpu"}}, {}),
    "sft 3": (runs.sft, {"stage": 3, **OFFLOADED}, {"gradient_accumulation_steps": 2}),
    "sft tied 3": (runs.sft, {"stage": 3}, {"model": {"tie_word_embeddings": True}}),
    "sft experts 3": (runs.sft, {"stage": 3}, {"model": {"family": "qwen3_moe"}, "verify_first": False, **ROUTED}),
    "grpo sampled 3": (sampled, {"stage": 3}, {"beta": 0.1, "gradient_checkpointing": True}),
    "dpo lora 3": (runs.dpo, {"stage": 3}, {"lora": True, "gradient_checkpointing": True, "verify_first": False}),
    "distillation 2": (runs.distillation, {"stage": 2}, {"gradient_accumulation_steps": 1}),
}


def on_gloo() -> None:
    """Makes Accelerate hand processes on CPU to DeepSpeed, which it does with those of devices only."""
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)
    # It would compile collectives of its own.
    deepspeed.ops.__dict__["__compatible_ops__"] = {}


def options_of(name: str) -> tuple[Any, str, dict[str, Any]]:
    """What trains a case, its model, and the options of both sides."""
    make, zero, options = CASES[name]
    model, options = runs.model_and_options(options)
    config = {
        "zero_optimization": {**zero, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    return make, runs.saved(**model), {"deepspeed": config, "use_cpu": False, **options}


def trained(
    make: Any, model: str, options: dict[str, Any], *, folder: Path, shared: dict[str, Any] | None
) -> dict[str, Any]:
    options = dict(options)
    verify_first = options.pop("verify_first", True)
    if shared is not None:
        shared = {**shared, "verify_first": verify_first}
    gradients: list[dict[str, torch.Tensor]] = []
    stock = deepspeed.DeepSpeedEngine.step

    def step(engine: Any, *args: Any, **kwargs: Any) -> None:
        weights = [(n, p) for n, p in engine.module.named_parameters() if p.requires_grad]
        gradients.append({n: safe_get_full_grad(p).clone() for n, p in weights})
        stock(engine, *args, **kwargs)

    deepspeed.DeepSpeedEngine.step = step
    try:
        run = runs.train(make, model, folder, shared=shared, **options)
    finally:
        deepspeed.DeepSpeedEngine.step = stock
    weights = dict(run.trainer.model.named_parameters())
    is_partitioned = all(weight.numel() == 0 for weight in weights.values())
    with deepspeed.zero.GatheredParameters(list(weights.values())):
        whole = {name: weight.detach().clone() for name, weight in weights.items()}
    ratio = [log.get("tree/token_ratio") for log in run.logs[:-1]]
    AcceleratorState._reset_state()
    return {"gradients": gradients, "weights": whole, "ratio": ratio, "is_partitioned": is_partitioned}


def main(folder: Path, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    on_gloo()
    # Saved before there are ranks, of which only the first would write.
    runs.saved(seed=1)
    cases = {name: options_of(name) for name in CASES}
    saved = {
        f"{name}/{side}": trained(*cases[name], folder=folder / "out", shared=shared)
        for name in names
        for side, shared in (("stock", None), ("ours", {"group_batches": False}))
    }
    torch.save(saved, folder / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
