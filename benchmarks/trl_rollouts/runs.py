"""GRPO runs of the demo's policy in TRL, whose rollouts are sampled with drafts and without, in turns."""

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GROUP_SIZE, PROMPTS_PER_CALL = 8, 8
WAYS = ("off", "auto", "control")
_EPOCHS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSize:
    """A run of three epochs."""

    batch: int
    """Rollouts that the engine runs at once."""
    num_prompts: int


def measure_drafts(policy: Path, size: RunSize, seed: int) -> dict[str, Any]:
    """Process time of every call, with drafts and without, on the same prompts, weights and noise.

    Run it in its own process: the drafter is loaded once in a process.
    """
    from treering.integrations.trl import HistoryRollouts

    ways = {
        name: HistoryRollouts(drafts="auto" if name == "auto" else "off", max_batch=size.batch, num_threads=1)
        for name in WAYS
    }
    calls: list[dict[str, Any]] = []

    def all_ways(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        call: dict[str, Any] = {}
        outputs = {}
        # Each way is first in every third call.
        first = len(calls) % len(WAYS)
        for name in WAYS[first:] + WAYS[:first]:
            start = time.process_time()
            outputs[name] = ways[name](prompts, trainer)
            call[name] = time.process_time() - start
            call[f"{name}_forward"] = trainer._metrics["train"]["rollout/tokens_per_forward"][-1]
        off, auto = (outputs[name]["completion_ids"] for name in ("off", "auto"))
        call["num_tokens"] = sum(map(len, off))
        call["num_differing"] = sum(mine != other for mine, other in zip(auto, off, strict=True))
        calls.append(call)
        return outputs["off"]

    _train(policy, size.num_prompts, seed, all_ways)
    return _by_epoch(calls, size)


def measure_learning(policy: Path, num_prompts: int, seed: int, way: str) -> list[float]:
    """Mean reward of each epoch; way: "generate" (TRL's own) or "engine"."""
    from treering.integrations.trl import HistoryRollouts

    history = _train(policy, num_prompts, seed, None if way == "generate" else HistoryRollouts(num_threads=1))
    rewards = [row["reward"] for row in history if "reward" in row]
    per_epoch = len(rewards) // _EPOCHS
    return [sum(rewards[i : i + per_epoch]) / per_epoch for i in range(0, _EPOCHS * per_epoch, per_epoch)]


def _by_epoch(calls: list[dict[str, Any]], size: RunSize) -> dict[str, Any]:
    """Microseconds of a token by epoch; the first call makes the engines and is left out of both sides."""
    per_epoch = len(calls) // _EPOCHS
    rows = []
    for epoch in range(_EPOCHS):
        own = calls[max(1, epoch * per_epoch) : (epoch + 1) * per_epoch]
        num_tokens = sum(call["num_tokens"] for call in own)
        rows.append(
            {
                "epoch": epoch,
                **{f"{name}_us": 1e6 * sum(call[name] for call in own) / num_tokens for name in WAYS},
                "tokens_per_forward": sum(call["auto_forward"] for call in own) / len(own),
            }
        )
    timed = calls[1:]
    spent = {name: sum(call[name] for call in timed) for name in WAYS}
    return {
        "batch": size.batch,
        "num_prompts": size.num_prompts,
        "num_tokens": sum(call["num_tokens"] for call in timed),
        **{f"{name}_s": spent[name] for name in WAYS},
        "ratio": spent["off"] / spent["auto"],
        "control_ratio": spent["off"] / spent["control"],
        "num_differing": sum(call["num_differing"] for call in calls),
        "epochs": rows,
    }


def _train(policy: Path, num_prompts: int, seed: int, rollout_func: Any) -> list[dict[str, Any]]:
    """Trains the policy; returns the trainer's log."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from treering.cli.demo import MAX_ROLLOUT_TOKENS, demo_task

    torch.set_num_threads(1)
    task = demo_task(num_prompts)
    prompts = [task.decode(prompt.tokens) for prompt in task.prompts]
    answers = {text: int(prompt.answer or -1) for text, prompt in zip(prompts, task.prompts, strict=True)}
    ids = [str(prompt.prompt_id) for prompt in task.prompts]

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [
            float(text.split("=")[-1].strip(". ") == str(answers[prompt]))
            for prompt, text in zip(prompts, completions, strict=True)
        ]

    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=PROMPTS_PER_CALL * GROUP_SIZE,
            num_generations=GROUP_SIZE,
            max_completion_length=MAX_ROLLOUT_TOKENS,
            num_train_epochs=_EPOCHS,
            learning_rate=1e-4,
            beta=0.0,
            seed=seed,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(policy),
            reward,
            args,
            Dataset.from_dict({"prompt": prompts, "id": ids}),
            processing_class=_tokenizer(task.symbols),
            rollout_func=rollout_func,
        )
        trainer.train()
    return list(trainer.state.log_history)


def _tokenizer(symbols: str) -> Any:
    """A tokenizer of single characters; "." ends a completion."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token=symbols[0]))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="\n", eos_token=".", padding_side="left")
