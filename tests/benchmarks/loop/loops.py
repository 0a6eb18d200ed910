"""Starts and sizes of runs that tests of the loop's benchmarks share: a random model on four sums."""

from pathlib import Path

from benchmarks.loop.runs import RunSize, Start

from treering.cli.demo import demo_task
from treering.cli.models import build_model
from treering.config.model import ModelConfig

TINY = RunSize(num_prompts=4, prompts_per_step=2, group_size=3, num_steps=4, max_batch=2, max_tokens=6)


def random_start(folder: Path, seed: int = 0) -> Start:
    config = ModelConfig(hidden_size=16, num_layers=1, device="cpu")
    build_model(config, num_ids=demo_task(4).vocab_size, seed=seed, folder=None).save_pretrained(folder)
    return Start(folder=folder, num_steps=0, accuracy=0.25)
