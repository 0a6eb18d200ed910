"""SFT with TRL on agents' search trees, every shared token of a micro-batch computed once.

    pip install -e '.[trl]'    # in the checkout
    python examples/trl_sft_toolbench/run.py

Reads ToolBench from the real-data folder (TREERING_DATA, default ../shared/data); without it, generated trajectories.
"""

import argparse
import time
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import SFTConfig, SFTTrainer

from treering.data import AgentSpec, data_folder, generate_trajectories, read_trajectories, render
from treering.integrations.trl import share_prefixes

VOCAB_SIZE = 4096
FILE = "bench/toolbench_dfsdt.jsonl.gz"


def rows(num_rows: int, max_tokens: int) -> Dataset:
    """Branches of search trees with their labels: the assistant's tokens only."""
    folder = data_folder()
    if folder is None:
        print("no real data here: generated trajectories instead")
        rendered = render(list(generate_trajectories(AgentSpec(num_tasks=max(1, num_rows // 4)))))
    else:
        rendered = render(read_trajectories(folder / FILE), folder / "tokenizer")
    rendered = [one for one in rendered if one.tokens.size <= max_tokens][:num_rows]
    # Ids 0 and 1 are padding and the end; a real vocabulary would be most of so small a model.
    sequences = [2 + one.tokens % (VOCAB_SIZE - 2) for one in rendered]
    labels = [np.where(one.loss_mask, tokens, -100) for tokens, one in zip(sequences, rendered, strict=True)]
    return Dataset.from_dict({"input_ids": [tokens.tolist() for tokens in sequences], "labels": labels})


def tokenizer() -> Any:
    """Names padding and the end; the rows have ids already."""
    inner = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def main(arguments: list[str] | None = None) -> None:
    """Trains an epoch and prints what was shared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=4096, help="longer rows are left out")
    parser.add_argument("--stock", action="store_true", help="without Treering, to compare")
    parser.add_argument("--scattered", action="store_true", help="keep TRL's order of rows")
    parser.add_argument("--out", default="runs/trl_sft_toolbench")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes = shape | {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": VOCAB_SIZE}
    config = SFTConfig(
        output_dir=options.out,
        num_train_epochs=1,
        per_device_train_batch_size=8,
        max_length=None,
        logging_steps=1000,
        report_to="none",
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
    )
    trainer = SFTTrainer(
        Qwen3ForCausalLM(Qwen3Config(**sizes)),
        args=config,
        train_dataset=rows(options.rows, options.max_tokens),
        processing_class=tokenizer(),
    )
    if not options.stock:
        share_prefixes(trainer, group_batches=not options.scattered)
    start = time.process_time()
    trainer.train()
    seconds = time.process_time() - start
    log = trainer.state.log_history[-1]
    shared = f"token ratio {log['tree/token_ratio']:.2f}" if "tree/token_ratio" in log else "nothing shared"
    print(f"{shared}; {seconds:.1f} s of process time; loss {log['train_loss']:.3f}")


if __name__ == "__main__":
    main()
