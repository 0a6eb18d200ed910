"""One rank of a run: `python -m tests.integrations.verl.engine_run FOLDER RANK SIZE`.

Trains each case with verl's engine and with the tree engine, and saves outputs, gradients and computed tokens by rank.
"""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import verl  # noqa: F401 - its plugins are loaded before the platform is set
from tensordict import NonTensorStack
from verl.plugin.platform import set_platform

from tests.integrations.verl.cpu import CpuPlatform

set_platform(CpuPlatform())

from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.config import (  # noqa: E402
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    PolicyLossConfig,
)
from verl.workers.config.engine import TrainingWorkerConfig  # noqa: E402
from verl.workers.engine import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker  # noqa: E402
from verl.workers.utils.losses import ppo_loss, sft_loss  # noqa: E402

from tests.models import build  # noqa: E402
from treering.errors import UnsupportedError  # noqa: E402
from treering.integrations.verl import verl_plugin  # noqa: E402

VOCAB = 64
ROWS_PER_PROMPT = 4
FIXED = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 4}
DYNAMIC = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 90}
ONE = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 10_000}
PPO = {"loss_agg_mode": "token-mean", "entropy_coeff": 0.02, "use_kl_loss": True}
GSPO = {"loss_agg_mode": "seq-mean-token-mean", "policy_loss": PolicyLossConfig(loss_mode="gspo")}
SHOWN = ("actor/pg_loss", "actor/entropy_loss", "kl_loss", "loss", "grad_norm", "tree/token_ratio")
"""Metrics over the batch; those that verl averages over micro-batches depend on how rows are grouped."""
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    # name: model, loss, its options, options of the batch
    "ppo in one micro-batch": ("plain", "ppo", PPO, ONE),
    "ppo in dynamic micro-batches": ("plain", "ppo", PPO, DYNAMIC),
    "ppo at one temperature": ("plain", "ppo", {"loss_agg_mode": "token-mean"}, {**FIXED, "temperature": 0.7}),
    "gspo in micro-batches of 4 rows": ("plain", "ppo", GSPO, FIXED),
    "sft": ("plain", "sft", {}, {**DYNAMIC, "temperature": 1.0}),
    "tied and checkpointed": ("tied", "ppo", PPO, DYNAMIC),
    "lora": ("lora", "ppo", PPO, DYNAMIC),
}


def rows_of(rank: int) -> list[tuple[list[int], list[int]]]:
    """Return prompts that begin alike, with responses that branch, in shuffled order."""
    random = np.random.default_rng(100 + rank)
    system = [1, 2, 3, 4, 5]
    rows = []
    for _ in range(3):
        prompt = [*system, *random.integers(6, VOCAB, 7).tolist()]
        turn = random.integers(6, VOCAB, 9).tolist()
        for row in range(ROWS_PER_PROMPT):
            shared = turn[: 3 * row] if row < ROWS_PER_PROMPT - 1 else []
            rows.append((prompt, [*shared, *random.integers(6, VOCAB, int(random.integers(2, 12))).tolist()]))
    return [rows[i] for i in random.permutation(len(rows))]


def batch_of(rows: list[tuple[list[int], list[int]]], loss: str, options: dict[str, Any], *, size: int) -> Any:
    random = torch.Generator().manual_seed(7)
    nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    like_responses = [torch.randn(len(response), generator=random) for _, response in rows]
    flat = [torch.tensor([*prompt, *response]) for prompt, response in rows]
    response_mask = [torch.ones(len(response), dtype=torch.long) for _, response in rows]
    response_mask[1][0] = 0
    tensors = {
        "input_ids": nested(flat),
        "position_ids": nested([torch.arange(row.numel()) for row in flat]),
        "prompts": nested([torch.tensor(prompt) for prompt, _ in rows]),
        "responses": nested([torch.tensor(response) for _, response in rows]),
        "response_mask": nested(response_mask),
        "loss_mask": nested(response_mask),
        "old_log_probs": nested([0.3 * x - 3.5 for x in like_responses]),
        "ref_log_prob": nested([0.2 * x - 3.4 for x in like_responses]),
        "advantages": nested([x.roll(1) for x in like_responses]),
        "multi_modal_inputs": NonTensorStack(*({} for _ in rows)),
    }
    if loss == "sft":
        masks = zip(rows, response_mask, strict=True)
        tensors["loss_mask"] = nested([torch.cat([torch.zeros(len(p), dtype=torch.long), m]) for (p, _), m in masks])
    if "temperature" not in options:
        tensors["temperature"] = torch.tensor([(0.6, 1.0, 1.7)[i % 3] for i in range(len(rows))])
    plain = {"calculate_entropy": loss == "ppo", "global_batch_size": size * len(rows), "use_remove_padding": False}
    return tu.get_tensordict(tensors, {**plain, **options})


def loss_of(kind: str, options: dict[str, Any]) -> Any:
    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=ROWS_PER_PROMPT, ppo_micro_batch_size_per_gpu=4, clip_ratio=0.2, **options
    )
    return partial(ppo_loss if kind == "ppo" else sft_loss, config=config)


def configs_of(model: Path, name: str) -> dict[str, Any]:
    options: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8} if name == "lora" else {}
    model_config = HFModelConfig(
        path=str(model),
        load_tokenizer=False,
        override_config={"attn_implementation": "eager"},
        enable_gradient_checkpointing=name == "tied",
        use_remove_padding=False,
        **options,
    )
    model_config.model_type = "language_model"
    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
    return {
        "model_config": model_config,
        "engine_config": FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, mixed_precision=precision),
        # Plain descent: an update is as exact as its gradient, while Adam's first update is the gradient's sign.
        "optimizer_config": FSDPOptimizerConfig(lr=0.02, optimizer="SGD", weight_decay=0.0, total_training_steps=10),
        "checkpoint_config": CheckpointConfig(),
    }


def engine_of(kind: type, model: Path, name: str) -> Any:
    torch.manual_seed(3)
    engine = kind(**configs_of(model, name))
    engine.initialize()
    if name == "lora":
        _fill_adapters(engine.module)
    return engine


def ppo_step(
    kind: type[TrainingWorker], model: Path, rows: list[tuple[list[int], list[int]]], *, size: int
) -> dict[str, Any]:
    """Run one PPO step by a worker of verl: three mini-batches with clipped gradients, shuffled by verl's own."""
    worker = kind(TrainingWorkerConfig(model_type="language_model", **configs_of(model, "plain")))
    worker.reset()
    worker.set_loss_fn(loss_of("ppo", PPO))
    before = {name: weight.full_tensor().clone() for name, weight in worker.engine.module.named_parameters()}
    data = batch_of(rows, "ppo", DYNAMIC, size=size)
    steps = {"num_mini_batch": 3, "epochs": 1, "seed": 1, "dataloader_kwargs": {"shuffle": kind is TrainingWorker}}
    tu.assign_non_tensor(data, **steps)
    with counted_tokens(worker.engine) as counted:
        output = worker.train_mini_batch(data)
    after = {name: weight.full_tensor().clone() for name, weight in worker.engine.module.named_parameters()}
    logged = tu.get(output, "metrics")
    metrics = {name: [float(value) for value in values] for name, values in logged.items() if name in SHOWN}
    engine = type(worker.engine).__name__
    return {"engine": engine, "before": before, "after": after, "metrics": metrics, "tokens": counted}


@contextmanager
def counted_tokens(engine: Any) -> Iterator[list[int]]:
    """Count the tokens of each call of the embedding."""
    counted: list[int] = []
    embedding = engine.module.get_input_embeddings()
    hook = embedding.register_forward_pre_hook(lambda module, args: counted.append(args[0].numel()))
    yield counted
    hook.remove()


def _fill_adapters(module: Any) -> None:
    """Fill adapters with values that change the output, the same on both sides."""
    random = torch.Generator().manual_seed(5)
    for weight in module.parameters():
        if weight.requires_grad:
            full = 0.3 * torch.randn(weight.shape, generator=random)
            local = torch.distributed.tensor.distribute_tensor(full, weight.device_mesh, weight.placements)
            weight.data.to_local().copy_(local.to_local())


def train(engine: Any, data: Any, loss: Any) -> dict[str, Any]:
    with counted_tokens(engine) as counted, engine.train_mode():
        engine.optimizer_zero_grad()
        tu.assign_non_tensor(data, return_model_output=True)
        output = engine.forward_backward_batch(data, loss, forward_only=False)
        gradients = {
            name: weight.grad.full_tensor().clone()
            for name, weight in engine.module.named_parameters()
            if weight.grad is not None
        }
    values = {name: list(value.unbind()) for name, value in output["model_output"].items()}
    metrics = {name: value for name, value in output["metrics"].items() if name == "tree/token_ratio"}
    return {"gradients": gradients, "outputs": values, "tokens": counted, "loss": sum(output["loss"]), **metrics}


def refusal_of_shuffled_rows(kind: type[TrainingWorker]) -> str:
    data = tu.get_tensordict({}, {"dataloader_kwargs": {"shuffle": True}})
    try:
        kind.train_mini_batch(SimpleNamespace(), data)
    except UnsupportedError as error:
        return str(error)
    return ""


def main(folder: Path, rank: int, size: int) -> None:
    """Run all cases; rank 0 saves the models before the others pass the rendezvous."""
    warnings.simplefilter("ignore")
    # verl's workers read these, although the process group exists already.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="localhost", MASTER_PORT="0")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    if rank == 0:
        for name, tied in (("plain", False), ("tied", True)):
            build("qwen3", vocab_size=VOCAB, tie_word_embeddings=tied).save_pretrained(folder / name)
    dist.barrier()
    # verl registers its own engine only for CUDA and NPU devices.
    EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")(FSDPEngineWithLMHead)
    # Every group is on all ranks, as happens when verl balances rows by length.
    rows = [row for other in range(size) for row in rows_of(other)][rank::size]
    saved: dict[str, Any] = {"rows": [[*prompt, *response] for prompt, response in rows]}
    os.environ["TREERING_VERL_GROUPS"] = "whole_mini_batches"
    verl_plugin.register()
    workers = {"step": TrainingWorker, "grouped step": ActorRolloutRefWorker.actor_worker_cls}
    for name, worker in workers.items():
        saved[f"{name}/stock"] = ppo_step(worker, folder / "plain", rows, size=size)
    saved["refusal"] = refusal_of_shuffled_rows(workers["grouped step"])
    os.environ[verl_plugin.VARIABLE] = verl_plugin.VENDOR
    for name, worker in workers.items():
        saved[f"{name}/tree"] = ppo_step(worker, folder / "plain", rows, size=size)
    ours = EngineRegistry.get_engine_cls("language_model", "fsdp2")
    models = {"plain": folder / "plain", "tied": folder / "tied", "lora": folder / "plain"}
    engines = {
        (name, side): engine_of(kind, path, name)
        for name, path in models.items()
        for side, kind in (("stock", FSDPEngineWithLMHead), ("tree", ours))
    }
    for case, (name, loss, options, batch) in CASES.items():
        for side in ("stock", "tree"):
            data = batch_of(rows, loss, batch, size=size)
            saved[f"{case}/{side}"] = train(engines[name, side], data, loss_of(loss, options))
    os.environ["TREERING_VERL_GROUPS"] = "as_dealt"
    off = engine_of(ours, folder / "plain", "plain")
    saved["off"] = train(off, batch_of(rows, "ppo", ONE, size=size), loss_of("ppo", PPO))
    data = batch_of(rows, "ppo", DYNAMIC, size=size)
    for side in ("stock", "tree"):
        with engines["plain", side].eval_mode():
            output = engines["plain", side].infer_batch(data.clone())
        saved[f"inference/{side}"] = {name: list(value.unbind()) for name, value in output["model_output"].items()}
    torch.save(saved, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
