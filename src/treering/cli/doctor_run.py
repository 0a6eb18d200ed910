"""Check a run folder for `treering doctor`: damaged files, the next start, and the train-inference mismatch."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treering.arrays import Float64Array
from treering.cli.models import load_checkpoint
from treering.cli.run_folder import HISTORY_FOLDER
from treering.data import Trajectory, read_trajectories
from treering.errors import InputError, TreeringError, plural
from treering.files.step_lines import read_rows, spans
from treering.files.writing import CHECKPOINTS_FOLDER, read_facts, read_object
from treering.history.store.store import read_saved
from treering.metrics import METRICS_FILE
from treering.report.rollout_views import ROLLOUTS_FOLDER
from treering.report.run_data import CONFIG_FILE
from treering.train.branch_logprobs import branch_logprobs
from treering.train.loop.checkpoint import STATE_FILE, check_identity, saved_steps
from treering.train.loop.compute import precision
from treering.train.loop.saved_run import RUN_FILE
from treering.tree.forest import Forest

MAX_TOKENS = 16384
"""Distinct tokens that are computed at one time."""
MAX_ROLLOUTS = 256
"""Rollouts over which the mismatch is measured."""

_NEUTRAL = {"top_k": (None, 0), "top_p": (1.0,), "min_p": (0.0,), "repetition_penalty": (1.0,)}
"""Sampling parameters and the values that change no probability."""


def check_run(folder: Path) -> dict[str, Any]:
    """Check every file of a run folder, and find what the next start of the run would do; change nothing.

    Returns:
        `files`, each with its name, `damage` (None if whole) and contents; `resume`, what the next start does;
        `checkpoints`, names of the whole ones, newest first.

    Raises:
        InputError: the folder is not a run's.

    Example: a run of 20 steps with checkpoints at 10 and 20, the second one cut short, resumes after step 10.
    """
    if not (folder / RUN_FILE).exists() and not (folder / CHECKPOINTS_FOLDER).exists():
        raise InputError(f"{folder} has neither {RUN_FILE} nor {CHECKPOINTS_FOLDER}/; name a run folder")
    checkpoints = list(saved_steps(folder / CHECKPOINTS_FOLDER).values())[::-1]
    checks = [(folder / name, _settings) for name in (RUN_FILE, CONFIG_FILE)]
    checks += [(path, _log) for path in (folder / METRICS_FILE, *_rollout_files(folder))]
    checks += [(path, partial(_checkpoint, folder)) for path in checkpoints]
    checks += [(path, _history) for path in saved_steps(folder / HISTORY_FOLDER).values()]
    files = {path: _checked(folder, path, check) for path, check in checks if path.exists()}
    whole = [path for path in checkpoints if files[path]["damage"] is None]
    logged = max((row["step"] for row in read_rows(folder / METRICS_FILE)), default=0)
    return {
        "files": list(files.values()),
        "resume": _resume(logged, whole, len(checkpoints)),
        "checkpoints": [path.name for path in whole],
    }


def _rollout_files(folder: Path) -> list[Path]:
    return sorted((folder / ROLLOUTS_FOLDER).glob("epoch-*.jsonl"))


def _checked(folder: Path, path: Path, check: Callable[[Path], str]) -> dict[str, Any]:
    name = str(path.relative_to(folder))
    try:
        return {"name": name, "damage": None, "words": check(path)}
    except (TreeringError, OSError, ValueError, EOFError, LookupError) as error:
        return {"name": name, "damage": " ".join(str(error).split()), "words": ""}


def _settings(file: Path) -> str:
    return plural(len(read_object(file)), "entry", "entries")


def _checkpoint(folder: Path, path: Path) -> str:
    facts = read_facts(path)
    if (folder / RUN_FILE).exists():
        check_identity(facts["identity"], read_object(folder / RUN_FILE), where=path)
    return f"step {facts['step']}, checksums match"


def _history(file: Path) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prompts = read_saved(file)
    if caught:
        raise ValueError(f"{caught[0].message}; this costs only speed")
    return plural(len(prompts), "prompt")


def _log(file: Path) -> str:
    lines = file.read_bytes().split(b"\n")
    # A kill leaves an unfinished last line, which is not damage.
    num_whole = sum(1 for line in lines[:-1] if line)
    rows = list(read_rows(file))
    if len(rows) < num_whole:
        raise ValueError(f"{num_whole - len(rows)} of {num_whole} lines cannot be read")
    unfinished = ", and an unfinished one" if lines[-1] else ""
    return f"{plural(len(rows), 'line')} of steps {spans({row['step'] for row in rows})}{unfinished}"


def _resume(logged: int, whole: list[Path], num_checkpoints: int) -> str:
    if not whole and num_checkpoints:
        return "it does not start: every checkpoint is damaged; restore one from a copy, or remove the run folder"
    if not whole:
        again = f"; steps 1 to {logged} are trained again" if logged else ""
        return f"it begins with step 1, because there is no checkpoint{again}"
    step = int(read_facts(whole[0])["step"])
    again = f"; steps {step + 1} to {logged} are trained again, with the same result" if logged > step else ""
    return f"it resumes after step {step}, from {whole[0].name}{again}"


def measure_mismatch(folder: Path, checkpoints: list[str]) -> dict[str, Any]:
    """Measure |engine's log-prob - trainer's| on rollouts that the newest possible checkpoint has sampled.

    Stored rollouts have the engine's log-probs, and a checkpoint has the weights that sampled the rollouts of the steps
    until the next update. Both sides therefore have the same weights, and only arithmetic differs.

    Returns:
        The checkpoint, the numbers of rollouts and tokens, the mean and largest difference in nats, and `words` that
        report or explain it; only `words` and a null checkpoint if nothing can be compared.

    Example: a run with `run.save_every` 10 that was stopped after step 14 has rollouts of step 11 from the weights of
    `step-000010`.
    """
    files = _rollout_files(folder)[::-1]
    if not files or not checkpoints:
        return _unmeasured("it needs rollouts and a whole checkpoint")
    try:
        settings = read_object(folder / CONFIG_FILE)
        sampling, dtype = dict(settings["sampling"]), settings["model"]["dtype"]
        temperature = float(sampling["temperature"])
    except (InputError, ValueError, LookupError, TypeError) as error:
        return _unmeasured(f"{CONFIG_FILE} lacks the sampling settings of the rollouts ({error!r})")
    changed = [name for name, neutral in _NEUTRAL.items() if sampling.get(name, neutral[0]) not in neutral]
    if changed:
        return _unmeasured(f"the log-probs of rollouts include {', '.join(changed)}, but a trainer's do not")
    for checkpoint in (folder / CHECKPOINTS_FOLDER / name for name in checkpoints):
        state = torch.load(checkpoint / STATE_FILE, map_location="cpu", weights_only=True)
        rollouts = list(islice(_sampled_by(files, state["loop"].get("version")), MAX_ROLLOUTS))
        if not rollouts:
            continue
        try:
            gaps = _gaps(checkpoint, rollouts, temperature, has_autocast=dtype == "bfloat16")
        except InputError as error:
            # For example a model that takes images, without which rollouts are stored.
            return _unmeasured(f"the trainer computes stored rollouts as text, but {error}")
        mean, largest = float(gaps.mean()), float(gaps.max())
        return {
            "checkpoint": checkpoint.name,
            "num_rollouts": len(rollouts),
            "num_tokens": gaps.size,
            "mean": mean,
            "largest": largest,
            "words": f"|engine's log-prob - trainer's| is {mean:.1e} on average and {largest:.1e} at most, over "
            f"{gaps.size:,} tokens of {len(rollouts)} rollouts under the weights of {checkpoint.name}",
        }
    return _unmeasured("no stored rollout was sampled by the weights of a remaining checkpoint; raise run.keep")


def _unmeasured(why: str) -> dict[str, Any]:
    return {"checkpoint": None, "words": f"not measured: {why}"}


def _sampled_by(files: list[Path], version: int | None) -> Iterator[Trajectory]:
    for file in files if version is not None else ():
        try:
            rows = read_trajectories(file, may_be_torn=True)
            yield from (row for row in rows if row.version == version and row.logprobs is not None)
        except InputError:
            # The list of files reports a damaged file; others may serve.
            continue


def _gaps(checkpoint: Path, rollouts: list[Trajectory], temperature: float, *, has_autocast: bool) -> Float64Array:
    """Return |engine's log-prob - trainer's|, float64 [sampled tokens of all rollouts], which come prompt by prompt."""
    model = load_checkpoint(checkpoint).eval()
    prompts = [list(group) for _, group in groupby(rollouts, key=lambda rollout: rollout.task_id)]
    forests = [Forest.from_sequences([np.asarray(rollout.tokens) for rollout in group]) for group in prompts]
    masks = [np.asarray(rollout.loss_mask) for rollout in rollouts]
    with precision(model, "bfloat16" if has_autocast else "none"):
        own = branch_logprobs(model, forests, masks, max_tokens=MAX_TOKENS, temperature=temperature)
    return np.concatenate(
        [
            np.abs(np.asarray(rollout.logprobs) - found)[mask]
            for rollout, found, mask in zip(rollouts, own, masks, strict=True)
        ]
    )
