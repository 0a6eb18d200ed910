"""Compares the gradients of a trainer's own loss with and without `treering.patch`, on a small model on CPU.

    python tools/any_trainer.py --trainer openrlhf

The trainer and what its loss imports must be there; `docs/any_trainer.md` has the commands. What needs a device to be
built, `flash_attn`, is stood in for by three functions that remove padding and bring it back.
"""

import argparse
import sys
import types
import typing
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from typing import Any

import torch
import transformers
import typing_extensions
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import treering

PROMPTS, ROWS, ANSWER = (23, 37), 4, 17
"""Tokens of each prompt, rows of each, and the most tokens of an answer."""
Loss = Callable[[Any], Tensor]
"""The trainer's loss of a model, a scalar."""


def batch() -> types.SimpleNamespace:
    """Groups of rows with one prompt each: prompts end, and answers begin, at one column."""
    draw = torch.Generator().manual_seed(0)
    rows, left, width = len(PROMPTS) * ROWS, max(PROMPTS), max(PROMPTS) + ANSWER
    ids = torch.zeros(rows, width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row in range(rows):
        start = left - PROMPTS[row // ROWS]
        end = width - row % ROWS
        ids[row, start:end] = torch.randint(1, 200, (end - start,), generator=draw)
        ids[row, start:left] = ids[row - row % ROWS, start:left]
        mask[row, start:end] = 1
    shape = (rows, ANSWER)
    advantages = torch.randn(rows, 1, generator=draw).expand(shape)
    old = -5 + 0.1 * torch.randn(shape, generator=draw)
    return types.SimpleNamespace(ids=ids, mask=mask, answer=mask[:, left:], advantages=advantages, old=old)


def stand_in_for_flash_attn() -> None:
    """Registers the functions of `flash_attn.bert_padding`, which are plain torch and ship with its kernels alone."""
    for name in ("flash_attn", "flash_attn.bert_padding", "flash_attn.utils", "flash_attn.utils.distributed"):
        module: Any = types.ModuleType(name)
        module.__path__, module.__spec__ = [], ModuleSpec(name, None)
        sys.modules[name] = module
    padding: Any = sys.modules["flash_attn.bert_padding"]
    padding.rearrange = lambda values, _: values.flatten(0, 1)
    padding.index_first_axis = lambda values, indices: values[indices]
    padding.unpad_input = _unpad
    padding.pad_input = _pad
    distributed: Any = sys.modules["flash_attn.utils.distributed"]
    distributed.all_gather = None


def _unpad(values: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    lengths = attention_mask.sum(-1)
    indices = attention_mask.flatten().nonzero().flatten()
    return values.flatten(0, 1)[indices], indices, lengths.cumsum(0), int(lengths.max()), lengths


def _pad(values: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    flat = values.new_zeros(batch * seqlen, *values.shape[1:])
    return flat.index_copy(0, indices, values).unflatten(0, (batch, seqlen))


def openrlhf(packed: bool) -> Loss:
    """The actor's loss of OpenRLHF's `ActorPPOTrainer.training_step`."""
    stand_in_for_flash_attn()
    from openrlhf.models.actor import Actor
    from openrlhf.models.loss import PolicyLoss, aggregate_loss

    data = batch()

    def loss(model: Any) -> Tensor:
        actor = Actor(model, temperature=0.8)
        actor.packing_samples = packed
        logprobs, output = actor(
            data.ids, data.answer, attention_mask=data.mask, return_output=True, return_entropy=True
        )
        policy = PolicyLoss()(logprobs, data.old, data.advantages, action_mask=data.answer)[0]
        return policy - 0.01 * aggregate_loss(output.entropy[:, -ANSWER:], data.answer)

    return loss


def skyrl(packed: bool) -> Loss:
    """The policy's loss of SkyRL's `PolicyWorkerBase._forward_backward_micro`."""
    stand_in_for_flash_attn()
    if sys.version_info < (3, 12):
        typing.TypedDict = typing_extensions.TypedDict  # SkyRL is written for 3.12, where pydantic takes both
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
    from skyrl.backends.skyrl_train.utils.torch_utils import masked_mean
    from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper
    from skyrl.train.config import AlgorithmConfig

    data, config = batch(), AlgorithmConfig()

    def loss(model: Any) -> Tensor:
        wrapper = HFModelWrapper(model)
        wrapper.remove_microbatch_padding = packed
        wrapper.attn_implementation = "flash_attention_2" if packed else "sdpa"  # which arguments it passes
        logprobs, output = wrapper(
            data.ids, ANSWER, data.mask, temperature=0.8, return_output=True, compute_entropy=True
        )
        policy_loss = PolicyLossRegistry.get(config.policy_loss_type)
        policy, _ = policy_loss(logprobs, data.old, data.advantages, config, data.answer)
        return policy - 0.01 * masked_mean(output["entropy"][:, -ANSWER - 1 : -1], data.answer)

    return loss


def ms_swift(packed: bool) -> Loss:
    """The loss of ms-swift's `GRPOTrainer._compute_loss_and_metrics`, by its defaults."""
    from swift.rl_core.data import GRPOBatch
    from swift.rlhf_trainers.grpo_trainer import GRPOTrainer
    from swift.rlhf_trainers.utils import build_completion_mask_and_seq_lengths

    data, record = batch(), types.SimpleNamespace
    inputs, answer = {"input_ids": data.ids, "attention_mask": data.mask}, torch.zeros_like(data.mask)
    answer[:, -ANSWER:] = data.answer
    if packed:
        real = data.mask == 1
        inputs = {"input_ids": data.ids[real][None], "position_ids": (data.mask.cumsum(-1) - 1)[real][None]}
        answer = answer[real][None]
    labels = inputs["input_ids"].where(answer == 1, -100)
    kept = labels.shape[1] - int((labels != -100).int().argmax(-1).min())
    mask, lengths, _ = build_completion_mask_and_seq_lengths(
        labels, len(data.ids), padding_free=packed, encoded_batch=inputs, logits_to_keep=kept
    )
    parts = GRPOBatch(mask, torch.zeros(len(mask)), lengths, advantages=data.advantages[:, :1], logits_to_keep=kept)

    def loss(model: Any) -> Tensor:
        trainer = GRPOTrainer.__new__(GRPOTrainer)
        names = ("compute_entropy", "overlong_filter", "log_rollout_offpolicy_metrics", "dynamic_num_samples")
        vars(trainer).update(dict.fromkeys((*names, "disable_rollout_importance_sampling", "_has_teacher"), False))
        names = ("rollout_importance_sampling_mode", "off_policy_sequence_mask_delta", "chord_sft_iterator")
        vars(trainer).update(dict.fromkeys(names), model=model, temperature=0.8, loss_type="grpo", beta=0.0)
        vars(trainer).update(importance_sampling_level="token", epsilon_low=0.2, epsilon_high=0.2, sdar_loss_coef=0.0)
        trainer.model_kwarg_keys = {"logits_to_keep", "use_cache"}
        trainer.args = record(per_device_train_batch_size=len(mask), top_entropy_quantile=1, delta=None, report_to=[])
        trainer.template = record(padding_free=packed, sequence_parallel_size=1)
        trainer.accelerator = record(is_main_process=True, gather_for_metrics=lambda values: values)
        return trainer._compute_loss_and_metrics(model, dict(inputs), parts)[0]

    return loss


TRAINERS = {"openrlhf": openrlhf, "skyrl": skyrl, "ms-swift": ms_swift}


def gradients(loss: Loss, patched: bool) -> tuple[list[Tensor], float]:
    """Each weight's gradient in float32, and tokens of the batch per computed one."""
    torch.manual_seed(0)
    # With a cache, transformers' own model mixes the sequences of a packed row.
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=256, head_dim=16, num_hidden_layers=2, use_cache=False, **shape)
    model = Qwen3ForCausalLM(config).train()
    patch = treering.patch(model) if patched else None
    loss(model).backward()
    return [weight.grad for weight in model.parameters()], patch.take_counts().token_ratio if patch else 1.0


def main() -> None:
    """Prints the largest relative difference of a weight's gradient, by layout of the batch; fails above 1e-6."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trainer", choices=TRAINERS, required=True)
    name = parser.parse_args().trainer
    worst = 0.0
    for layout, packed in (("padded", False), ("packed", True)):
        loss = TRAINERS[name](packed)
        (stock, _), (tree, ratio) = gradients(loss, False), gradients(loss, True)
        error = max(float((a - b).norm() / a.norm()) for a, b in zip(stock, tree, strict=True))
        print(f"{layout}: {error:.1e}, {ratio:.2f} tokens of the batch per computed one")
        worst = max(worst, error)
    print(f"{name} {version(name)}, transformers {transformers.__version__}, torch {torch.__version__}")
    sys.exit(worst > 1e-6)


if __name__ == "__main__":
    main()
