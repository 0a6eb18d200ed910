"""Short GRPO runs of a tiny model whose rollouts come from the embedded engine."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.models import VOCAB, build

pytest.importorskip("trl", reason="TRL is not installed")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from treering.integrations.trl import HistoryRollouts

NUM_PROMPTS, GROUP_SIZE = 6, 4
PROMPTS = [" ".join(f"w{2 + (i * 5 + k) % (VOCAB - 2)}" for k in range(3 + i)) for i in range(NUM_PROMPTS)]


def tokenizer() -> Any:
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCAB)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def dataset(**columns: list[Any]) -> Dataset:
    return Dataset.from_dict({"prompt": PROMPTS, **columns})


def model(seed: int = 0) -> PreTrainedModel:
    """A model with a preference for some tokens, so that rollouts resemble one another."""
    made = build("qwen3", seed)
    made.lm_head.weight.data *= 3.0
    return made


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def trainer_of(folder: Path, rollouts: HistoryRollouts | None, *, policy: Any = None, **options: Any) -> GRPOTrainer:
    data = options.pop("data", None) or dataset(id=[f"q{i}" for i in range(NUM_PROMPTS)])
    more = {name: options.pop(name) for name in ("peft_config", "tools", "callbacks") if name in options}
    defaults = {
        "per_device_train_batch_size": 2 * GROUP_SIZE,
        "num_generations": GROUP_SIZE,
        "max_completion_length": 12,
        "temperature": 0.9,
        "num_train_epochs": 3,
        "learning_rate": 0.01,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": 3,
        "disable_tqdm": True,
    }
    args = GRPOConfig(output_dir=str(folder), **{**defaults, **options})
    return GRPOTrainer(
        policy or model(), reward, args, data, processing_class=tokenizer(), rollout_func=rollouts, **more
    )
