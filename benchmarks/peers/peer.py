"""Starts other projects' tree trainers in an environment of their own and reads their results.

Model, weights and tokens are passed in a file, seconds and errors come back in another. Nothing of a peer is imported.
"""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.tree.cases import Case, model_settings
from treering.errors import StateError

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-peers" / "bin" / "python"
SCRIPTS = ROOT / "benchmarks" / "peers"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerResult:
    """What a peer took for a case, and its own baseline, interleaved with it in the same process."""

    seconds: float
    baseline_s: float
    """One branch at a time by stock Hugging Face."""
    speedup: float
    grad_error: float
    """Relative L2 distance of the whole gradient from that of its baseline."""
    versions: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A peer that is installed."""

    name: str
    python: Path
    script: Path

    def can_train(self, case: Case) -> bool:
        """PrefixGrouper shares one prompt, so branches must part at one place."""
        return case.num_prompt_tokens is not None

    def measure(self, model: PreTrainedModel, case: Case, num_runs: int) -> PeerResult:
        """Runs the peer on the same weights and tokens.

        Raises:
            StateError: its process failed; the message ends with what it said last.
        """
        with TemporaryDirectory() as folder:
            given, answer = Path(folder) / "case.pt", Path(folder) / "result.json"
            torch.save(_as_tensors(model, case), given)
            # -I: neither this process's import path nor the script's folder, whose file has the peer's own name.
            command = [str(self.python), "-I", str(self.script), str(given), str(answer), str(num_runs)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise StateError(
                    f"peer {self.name} must run in {self.python.parent.parent.name}, and it ended with "
                    f"{done.returncode}: remove that folder and `make peers` again. {done.stderr[-400:]}"
                )
            return PeerResult(**json.loads(answer.read_text(encoding="utf-8")))


def find_peers(python: Path = PYTHON) -> list[Peer]:
    """The peers that `make peers` has installed; none without it."""
    if not python.exists():
        return []
    return [Peer(name="prefix_grouper", python=python, script=SCRIPTS / "prefix_grouper.py")]


def _as_tensors(model: PreTrainedModel, case: Case) -> dict[str, object]:
    return {
        "settings": model_settings(),
        "weights": model.state_dict(),
        "sequences": [torch.from_numpy(sequence.astype(np.int64)) for sequence in case.sequences],
        "num_prompt_tokens": case.num_prompt_tokens,
        "num_trained": case.num_trained,
    }
