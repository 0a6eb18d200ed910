"""One rank of a run under torchrun: `python -m tests.integrations.trl.ddp_run FOLDER MODEL TEACHER`.

Trains each case stock and shared, and saves gradients of every optimizer step by rank.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.integrations.trl import picture_runs, runs

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "grpo": (runs.grpo, {"gradient_accumulation_steps": 1}),
    "grpo accumulated": (runs.grpo, {"beta": 0.1}),
    "grpo checkpointed": (runs.grpo, {"gradient_checkpointing": True}),
    "grpo lora": (runs.grpo, {"lora": True, "beta": 0.1, "gradient_checkpointing": True}),
    "sft": (runs.sft, {"gradient_accumulation_steps": 2, "ddp_find_unused_parameters": True}),
    "sft lora": (runs.sft, {"lora": True}),
    "dpo": (runs.dpo, {}),
    "distillation": (runs.distillation, {"gradient_accumulation_steps": 1}),
    "pictures grpo": (picture_runs.grpo, {"gradient_accumulation_steps": 1}),
    "pictures sft": (picture_runs.sft_mixed, {"gradient_accumulation_steps": 2}),
}


def main(folder: Path, model: str, teacher: str) -> None:
    warnings.simplefilter("ignore")
    # Saved before there are ranks, of which only the first would write.
    picture_runs.saved("qwen2_5_vl")
    saved: dict[str, Any] = {}
    for name, (make, options) in CASES.items():
        _, given = runs.model_and_options(options)
        if make is runs.distillation:
            given["trainer_options"] = {"teacher_model": teacher}
        for side, shared in (("stock", None), ("ours", {"group_batches": False}), ("grouped", {})):
            source = "qwen2_5_vl" if name.startswith("pictures") else model
            run = runs.train(make, source, folder / "out", shared=shared, **given)
            saved[f"{name}/{side}"] = run.gradients
            saved[f"{name}/{side}/ratio"] = [log.get("tree/token_ratio") for log in run.logs]
    torch.save(saved, folder / f"rank{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
