"""Starts other projects' trainers and drafters in their own environment and reads their results.

Model, weights and tokens are passed in a file, seconds and errors come back in another. Nothing of a peer is imported.
"""

import json
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.tree.cases import Case, model_settings
from treering.errors import StateError

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-peers" / "bin" / "python"


def measure_peers(
    model: PreTrainedModel, case: Case, num_runs: int, python: Path = PYTHON
) -> dict[str, dict[str, Any]]:
    """What PrefixGrouper takes for a case on the same weights and tokens, and one branch at a time in its process.

    It shares one prompt, so branches must part at one place; {} for other cases, and before `make peers`.

    Raises:
        StateError: its process failed; the message ends with what it said last.
    """
    if case.num_prompt_tokens is None or not python.exists():
        return {}
    with TemporaryDirectory() as folder:
        given, answer = Path(folder) / "case.pt", Path(folder) / "result.json"
        torch.save(_as_tensors(model, case), given)
        run_peer(python, "prefix_grouper.py", given, answer, num_runs)
        return {"prefix_grouper": json.loads(answer.read_text(encoding="utf-8"))}


def run_peer(python: Path, script: str, *arguments: Path | int) -> None:
    """Runs a script of this folder in the environment of `make peers`.

    Raises:
        StateError: its process failed; the message ends with what it said last.
    """
    # -I: neither this process's import path nor the script's folder, whose file has the peer's own name.
    command = [str(python), "-I", str(ROOT / "benchmarks" / "peers" / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise StateError(
            f"{script} must run in {python.parent.parent.name}, and it ended with {done.returncode}: remove that "
            f"folder and `make peers` again. {done.stderr[-400:]}"
        )


def _as_tensors(model: PreTrainedModel, case: Case) -> dict[str, object]:
    return {
        "settings": model_settings(),
        "weights": model.state_dict(),
        "sequences": [torch.from_numpy(sequence.astype(np.int64)) for sequence in case.sequences],
        "num_prompt_tokens": case.num_prompt_tokens,
        "num_trained": case.num_trained,
    }
