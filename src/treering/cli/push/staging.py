"""What of a checkpoint is uploaded: weights, their configuration, the tokenizer and the card, and nothing else."""

import json
from fnmatch import fnmatch
from pathlib import Path

from treering.cli.push.card import CARD_FILE, hub_base, published
from treering.errors import InputError, StateError
from treering.files.atomic import read_facts
from treering.report.run import read_run
from treering.train.loop.adapters import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from treering.train.loop.checkpoint import CHECKPOINT_NAME, TOKENIZER_FILES
from treering.train.loop.run import CHECKPOINTS_FOLDER

UPLOADED = (
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *(ADAPTER_FILE, ADAPTER_CONFIG_FILE, *TOKENIZER_FILES),
)
"""Names of uploaded files. Optimiser, random states, manifests, histories and rollouts are none of them."""


def find_checkpoint(folder: Path, step: int | None) -> Path:
    """The newest checkpoint of a run, or that of a step, whole.

    Raises:
        InputError: there is none.
        StateError: it is damaged.
    """
    found = sorted((folder / CHECKPOINTS_FOLDER).glob("step-*"))
    checkpoints = {int(path.name.removeprefix("step-")): path for path in found if CHECKPOINT_NAME.fullmatch(path.name)}
    if not checkpoints:
        raise InputError(
            f"a run folder holds checkpoints/step-..., and {folder} has none; name the run.dir of a run that has saved"
        )
    chosen = max(checkpoints) if step is None else step
    if chosen not in checkpoints:
        steps = ", ".join(map(str, sorted(checkpoints)))
        raise InputError(f"{folder} has checkpoints of the steps {steps}, and --step is {step}; choose one of them")
    try:
        read_facts(checkpoints[chosen])
    except StateError as error:
        raise StateError(f"{checkpoints[chosen]} is damaged ({error}); push another one with --step") from error
    return checkpoints[chosen]


def stage(checkpoint: Path, target: Path, *, repo_id: str, base_model: str | None) -> list[Path]:
    """Fills an empty folder with what is uploaded of a checkpoint; large files are links.

    Args:
        checkpoint: `checkpoints/step-...` in the folder of a run.
        target: the empty folder.
        repo_id: of the repository.
        base_model: hub id of the base model, for a run that began from a folder.

    Returns:
        The files, by name.

    Raises:
        InputError: adapters of a folder without a base model, or a base model other than that of the run.
    """
    base = hub_base(read_run(checkpoint.parents[1]).config)
    if base is not None and base_model not in (None, base):
        raise InputError(f"this run began from {base}, and --base-model is {base_model}; leave it out")
    for file in checkpoint.iterdir():
        if any(fnmatch(file.name, pattern) for pattern in UPLOADED):
            (target / file.name).symlink_to(file.resolve())
    if (target / ADAPTER_CONFIG_FILE).exists():
        _name_base(target / ADAPTER_CONFIG_FILE, base, base_model)
    card = (checkpoint / CARD_FILE).read_text(encoding="utf-8")
    (target / CARD_FILE).write_text(published(card, repo_id, base_model), encoding="utf-8")
    return sorted(target.iterdir())


def _name_base(file: Path, base: str | None, base_model: str | None) -> None:
    """Replaces the folder of a base model, which nobody else has."""
    if base is not None:
        return
    settings = json.loads(file.read_bytes())
    if base_model is None:
        raise InputError(
            f"adapters name their base model, and nobody else has that of this run, the folder "
            f"{settings['base_model_name_or_path']}; name its hub id with --base-model"
        )
    file.unlink()
    settings |= {"base_model_name_or_path": base_model, "revision": None}
    file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
