"""GRPO with TRL on sums told as stories, every prompt computed once for its group.

    pip install -e '.[trl]'    # in the checkout
    python examples/trl_grpo_sums/run.py

A small Qwen3 from random weights with one id per character. Only one line differs from a script without Treering.
"""

import argparse
import random
import time
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from treering.integrations.trl import share_prefixes

CHARACTERS = "0123456789 .,?abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ\n"
NAMES, THINGS = ("Ann", "Ben", "Cleo", "Dan"), ("pens", "apples", "books", "coins")


def story(drawn: random.Random) -> tuple[str, int]:
    """A story and its answer."""
    first, second = drawn.randint(1, 20), drawn.randint(1, 20)
    name, thing = drawn.choice(NAMES), drawn.choice(THINGS)
    text = f"{name} has {first} {thing} and gets {second} more. How many {thing} does {name} have? Answer "
    return text, first + second


def stories(num: int, seed: int = 0) -> Dataset:
    """Stories, each after three worked ones."""
    drawn = random.Random(seed)
    worked = "".join(f"{text}{answer}.\n" for text, answer in (story(drawn) for _ in range(3)))
    asked = [story(drawn) for _ in range(num)]
    return Dataset.from_list([{"prompt": worked + text, "answer": str(answer)} for text, answer in asked])


def tokenizer() -> Any:
    """One id per character."""
    ids = {"<pad>": 0, "<eos>": 1} | {character: 2 + i for i, character in enumerate(CHARACTERS)}
    inner = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for the answer, and a tenth for each digit where a digit belongs, so that random weights have a start."""
    texts = ["".join(text.split()) for text in completions]
    return [
        1.0 if text.startswith(f"{wanted}.") else 0.1 * sum(character.isdigit() for character in text[: len(wanted)])
        for text, wanted in zip(texts, answer, strict=True)
    ]


def main(arguments: list[str] | None = None) -> None:
    """Trains and prints what was shared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--stock", action="store_true", help="without Treering, to compare")
    parser.add_argument("--out", default="runs/trl_grpo_sums")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes = shape | {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": len(CHARACTERS) + 2}
    config = GRPOConfig(
        output_dir=options.out,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        num_generations=8,
        max_completion_length=16,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
        bf16=False,
        save_strategy="no",
    )
    trainer = GRPOTrainer(
        Qwen3ForCausalLM(Qwen3Config(**sizes)),
        reward_funcs=reward,
        args=config,
        train_dataset=stories(64),
        processing_class=tokenizer(),
    )
    if not options.stock:
        share_prefixes(trainer)
    start = time.process_time()
    trainer.train()
    seconds = time.process_time() - start
    logs = [log for log in trainer.state.log_history if "reward" in log]
    ratios = [log["tree/token_ratio"] for log in logs if "tree/token_ratio" in log]
    shared = f"token ratio {sum(ratios) / len(ratios):.2f}" if ratios else "nothing shared"
    print(f"{shared}; {seconds:.1f} s of process time; reward of the last step {logs[-1]['reward']:.3f}")


if __name__ == "__main__":
    main()
