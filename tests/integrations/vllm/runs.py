"""Runs of `treering train` with vLLM on a tiny task whose rewards differ from the first step on."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import tests
from treering.rl.tasks.task import Prompt

ROOT = Path(tests.__file__).parents[1]
GROUP_SIZE, PROMPTS_PER_STEP, NUM_PROMPTS = 4, 2, 5

MODEL = """
[model]
hidden_size = 64
num_layers = 2
num_heads = 2
num_kv_heads = 1
head_size = 32
intermediate_size = 64
device = "cpu"
"""
ENGINE = """
[engine]
kind = "vllm"
verification = "exact"
num_threads = 1
max_batch = 8
[history]
max_draft = 8
[optim]
learning_rate = 1e-2
[run]
dir = "out"
save_every = 1
"""
_TASK = """
[task]
kind = "prompts"
file = "prompts.jsonl"
tokenizer = "words"
template = "raw"
reward = "tests.integrations.vllm.runs:share_of_the_first_half"
[sampling]
max_tokens = 24
[rl]
num_steps = 3
prompts_per_step = {prompts_per_step}
group_size = {group_size}
"""


def share_of_the_first_half(prompt: Prompt, text: str) -> float:
    """The share of words w0 to w13, which differs between rollouts and rises with training."""
    words = text.split()
    return sum(word in {f"w{i}" for i in range(14)} for word in words) / max(len(words), 1)


def write_run(folder: Path) -> Path:
    """Writes a configuration with its prompts and its tokenizer, and returns its path."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["?", "q", "<|im_start|>", "<|im_end|>", *(f"w{i}" for i in range(28))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (folder / "words").mkdir(exist_ok=True)
    tokenizer.save(str(folder / "words" / "tokenizer.json"))
    lines = [{"prompt": f"q w{i} w{3 * i} q", "answer": "q", "id": f"p{i}"} for i in range(NUM_PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = folder / "run.toml"
    task = _TASK.format(prompts_per_step=PROMPTS_PER_STEP, group_size=GROUP_SIZE)
    path.write_text(MODEL + task + ENGINE)
    return path


def train(path: Path, *overrides: str) -> dict[str, Any]:
    """The JSON summary of `treering train` in a process of its own: it imports numba before it starts vLLM."""
    command = "from treering.cli.start import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", command, "train", str(path), *overrides, "--json"],
        cwd=path.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary
