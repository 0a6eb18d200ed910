"""Compares the gradients of a trainer's own loss with and without `treering.patch`, on a small model on CPU.

    python tools/any_trainer.py --trainer openrlhf

The trainer and what its loss imports must be installed; `docs/any_trainer.md` has the commands. `flash_attn` cannot be
built for a CPU: its functions that remove padding and bring it back are written here.
"""

import argparse
import sys
import typing
from collections.abc import Callable
from importlib.metadata import version
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import typing_extensions
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import treering

PROMPTS, ROWS, ANSWER = (23, 37), 4, 17
"""Tokens of each prompt, rows of each, and the most tokens of an answer."""
Loss = Callable[[Any], Tensor]  # of a model


def batch() -> SimpleNamespace:
    """Rows that share their group's prompt: prompts end, and answers begin, at one column."""
    draw = torch.Generator().manual_seed(0)
    rows, left, width = len(PROMPTS) * ROWS, max(PROMPTS), max(PROMPTS) + ANSWER
    ids, mask = torch.randint(1, 200, (rows, width), generator=draw), torch.zeros(rows, width, dtype=torch.long)
    for row in range(rows):
        ids[row, :left] = ids[row - row % ROWS, :left]
        mask[row, left - PROMPTS[row // ROWS] : width - row % ROWS] = 1
    advantages, old = torch.randn(2, rows, ANSWER, generator=draw)
    return SimpleNamespace(ids=ids * mask, mask=mask, answer=mask[:, left:], advantages=advantages, old=0.1 * old - 5)


def stand_in_for_flash_attn() -> None:
    """Registers `flash_attn` with the functions that remove padding and bring it back, in plain torch."""
    parts = ("flash_attn", "flash_attn.utils", "flash_attn.utils.distributed", "flash_attn.bert_padding")
    modules: dict[str, Any] = {name: ModuleType(name) for name in parts}
    modules["flash_attn.utils.distributed"].all_gather = None
    padding = modules["flash_attn.bert_padding"]
    padding.rearrange, padding.index_first_axis = lambda values, _: values.flatten(0, 1), Tensor.__getitem__
    padding.unpad_input, padding.pad_input = _unpad, _pad
    sys.modules.update(modules)


def _unpad(values: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    lengths, indices = attention_mask.sum(-1), attention_mask.flatten().nonzero().flatten()
    return values.flatten(0, 1)[indices], indices, lengths.cumsum(0), int(lengths.max()), lengths


def _pad(values: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    flat = values.new_zeros(batch * seqlen, *values.shape[1:])
    return flat.index_copy(0, indices, values).unflatten(0, (batch, seqlen))


def openrlhf(data: SimpleNamespace, packed: bool) -> Loss:
    """The actor's loss of OpenRLHF's `ActorPPOTrainer.training_step`, entropy bonus included."""
    stand_in_for_flash_attn()
    from openrlhf.models.actor import Actor
    from openrlhf.models.loss import PolicyLoss, aggregate_loss

    def loss(model: Any) -> Tensor:
        actor = Actor(model, temperature=0.8)
        actor.packing_samples = packed
        asked = {"return_output": True, "return_entropy": True}
        logprobs, output = actor(data.ids, data.answer, attention_mask=data.mask, **asked)
        policy = PolicyLoss()(logprobs, data.old, data.advantages, action_mask=data.answer)[0]
        return policy - 0.01 * aggregate_loss(output.entropy[:, -ANSWER:], data.answer)

    return loss


def skyrl(data: SimpleNamespace, packed: bool) -> Loss:
    """The policy's loss of SkyRL's `PolicyWorkerBase._forward_backward_micro`, with an entropy bonus."""
    stand_in_for_flash_attn()
    if sys.version_info < (3, 12):
        typing.TypedDict = typing_extensions.TypedDict  # SkyRL is for 3.12, where pydantic takes both.
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
    from skyrl.backends.skyrl_train.utils.torch_utils import masked_mean
    from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper
    from skyrl.train.config import AlgorithmConfig

    config, asked = AlgorithmConfig(), {"temperature": 0.8, "return_output": True, "compute_entropy": True}

    def loss(model: Any) -> Tensor:
        wrapper = HFModelWrapper(model)
        wrapper.remove_microbatch_padding = packed
        wrapper.attn_implementation = "flash_attention_2" if packed else "sdpa"  # What it passes to the model.
        logprobs, output = wrapper(data.ids, ANSWER, data.mask, **asked)
        policy_loss = PolicyLossRegistry.get(config.policy_loss_type)
        policy = policy_loss(logprobs, data.old, data.advantages, config, data.answer)[0]
        return policy - 0.01 * masked_mean(output["entropy"][:, -ANSWER - 1 : -1], data.answer)

    return loss


def ms_swift(data: SimpleNamespace, packed: bool) -> Loss:
    """The loss of ms-swift's `GRPOTrainer._compute_loss_and_metrics` by its defaults."""
    from swift.rl_core.data import GRPOBatch
    from swift.rlhf_trainers.grpo_trainer import GRPOTrainer
    from swift.rlhf_trainers.utils import build_completion_mask_and_seq_lengths

    inputs, real = {"input_ids": data.ids, "attention_mask": data.mask}, data.mask == 1
    labels = data.ids.where(real, -100)
    labels[:, :-ANSWER] = -100
    if packed:
        inputs = {"input_ids": data.ids[real][None], "position_ids": (data.mask.cumsum(-1) - 1)[real][None]}
        labels = labels[real][None]
    kept, rows = labels.shape[1] - int((labels != -100).int().argmax(-1).min()), len(data.ids)
    asked = {"padding_free": packed, "encoded_batch": inputs, "logits_to_keep": kept}
    mask, lengths, _ = build_completion_mask_and_seq_lengths(labels, rows, **asked)
    advantages = data.advantages[:, :1].expand(rows, kept)
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    off = ("compute_entropy", "overlong_filter", "log_rollout_offpolicy_metrics", "dynamic_num_samples", "_has_teacher")
    off += ("disable_rollout_importance_sampling", "rollout_importance_sampling_mode", "chord_sft_iterator")
    vars(trainer).update(dict.fromkeys((*off, "off_policy_sequence_mask_delta")), beta=0.0, sdar_loss_coef=0.0)
    vars(trainer).update(loss_type="grpo", importance_sampling_level="token", epsilon_low=0.2, epsilon_high=0.2)
    vars(trainer).update(model_kwarg_keys={"logits_to_keep", "use_cache"}, temperature=0.8)
    trainer.args = SimpleNamespace(per_device_train_batch_size=rows, top_entropy_quantile=1, delta=None, report_to=[])
    trainer.template = SimpleNamespace(padding_free=packed, sequence_parallel_size=1)
    trainer.accelerator = SimpleNamespace(is_main_process=True, gather_for_metrics=lambda values: values)

    def loss(model: Any) -> Tensor:
        trainer.model = model
        parts = GRPOBatch(mask, torch.zeros(rows), lengths, advantages=advantages, logits_to_keep=kept)
        return trainer._compute_loss_and_metrics(model, dict(inputs), parts)[0]

    return loss


TRAINERS = {"openrlhf": openrlhf, "skyrl": skyrl, "ms-swift": ms_swift}


def gradients(loss: Loss, patched: bool) -> tuple[list[Tensor], float]:
    """Each weight's gradient in float64, and tokens of the batch per computed one."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    # With a cache, transformers' own attention on CPU mixes the sequences of a packed row.
    config = Qwen3Config(vocab_size=256, head_dim=16, num_hidden_layers=2, use_cache=False, **shape)
    model = Qwen3ForCausalLM(config).double().train()
    patch = treering.patch(model) if patched else None
    loss(model).backward()
    return [weight.grad for weight in model.parameters()], patch.take_counts().token_ratio if patch else 1.0


def main() -> None:
    """Prints the largest relative difference of a weight's gradient, by layout of the batch; fails above 1e-6."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trainer", choices=TRAINERS, required=True)
    name = parser.parse_args().trainer
    print(", ".join(f"{package} {version(package)}" for package in (name, "transformers", "torch")))
    worst = 0.0
    for layout in ("padded", "packed"):
        loss = TRAINERS[name](batch(), layout == "packed")
        (stock, _), (tree, ratio) = gradients(loss, False), gradients(loss, True)
        error = max(float((a - b).norm() / a.norm()) for a, b in zip(stock, tree, strict=True))
        print(f"{layout}: {error:.1e}, {ratio:.2f} tokens of the batch per computed one")
        worst = max(worst, error)
    sys.exit(worst > 1e-6)


if __name__ == "__main__":
    main()
