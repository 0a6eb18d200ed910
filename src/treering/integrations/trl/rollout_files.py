"""The state of rollouts in a checkpoint: draws, and each prompt's latest rollouts, one folder per process."""

from pathlib import Path

import numpy as np

from treering.files.atomic import read_facts, write_folder
from treering.integrations.trl.draft_history import DraftHistory, KeptRollouts
from treering.integrations.trl.prompt_ids import PromptIds

_FILE = "tokens.npy"


def save_state(checkpoint: Path, rank: int, version: int, ids: PromptIds, history: DraftHistory) -> None:
    """Writes the state below a checkpoint's folder, whole or not at all."""
    latest = history.latest()
    rollouts = [tokens for kept in latest.values() for tokens in kept.tokens.values()]
    facts = {
        "version": version,
        "draws": ids.state(),
        "prompts": [[prompt_id, kept.version, len(kept.tokens)] for prompt_id, kept in latest.items()],
        "sizes": [int(tokens.size) for tokens in rollouts],
    }
    tokens = np.concatenate(rollouts) if rollouts else np.zeros(0, np.int32)
    write_folder(_folder(checkpoint, rank), lambda folder: np.save(folder / _FILE, tokens), facts)


def load_state(checkpoint: Path, rank: int, ids: PromptIds, history: DraftHistory) -> int:
    """Reads a state back; returns its policy version.

    Raises:
        StateError: it is damaged.
    """
    facts = read_facts(_folder(checkpoint, rank))
    tokens = np.load(_folder(checkpoint, rank) / _FILE)
    parts = iter(np.split(tokens, np.cumsum(facts["sizes"])[:-1]) if facts["sizes"] else [])
    history.load(
        {
            prompt_id: KeptRollouts(version=version, tokens={sample: next(parts) for sample in range(count)})
            for prompt_id, version, count in facts["prompts"]
        }
    )
    ids.load_state(facts["draws"])
    return int(facts["version"])


def has_state(checkpoint: Path, rank: int) -> bool:
    """Whether a checkpoint's folder holds the state of a process."""
    return _folder(checkpoint, rank).is_dir()


def _folder(checkpoint: Path, rank: int) -> Path:
    # A parent for each process: writing one folder clears what a killed writer left beside it.
    return checkpoint / f"history_rollouts_{rank}" / "state"
