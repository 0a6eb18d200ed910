"""What the page of a run shows, as one JSON object: the page draws its figures and tables from it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from treering import metrics
from treering.data import Trajectory
from treering.errors import InputError, TreeringError
from treering.report import epochs
from treering.report.episodes import episodes_of
from treering.report.facts import facts_of
from treering.report.forest import bounds_of, draw
from treering.report.origins import GIVEN, SAMPLED, has_drafts, num_history_epochs, token_origins
from treering.report.rollouts import Rollouts, choose_prompts, groups_of, read_newest, read_samples, tokens_of
from treering.report.run import METRICS_FILE, RunData, number, read_demo, read_runs
from treering.report.timeline import read_timeline
from treering.types import PromptId, read_shape

TextOf = Callable[[int], str]
"""The text of a token id."""

CHECKPOINTS_FOLDER = "checkpoints"


def page_content(
    folder: Path, find_text: Callable[[RunData], TextOf | None], *, others: Sequence[Path] = ()
) -> dict[str, Any]:
    """Everything that the page of a folder shows.

    Args:
        folder: of a run, or of a demo.
        find_text: gives the texts of a run's tokens; None where they are not known, then ids are shown.
        others: folders of runs to compare it with; the page then has their curves, and no rollouts.

    Raises:
        InputError: a folder holds no run, or some runs are supervised and others not.

    Example: `page_content(folder, lambda run: None)["runs"][0]["rows"]` are the rows of the run's metrics.jsonl.
    """
    runs = _compared([folder, *others]) if others else read_runs(folder)
    ours = runs[-1]
    notes = [note if len(runs) == 1 else f"{run.name}: {note}" for run in runs for note in run.notes]
    content = {
        "title": " · ".join(run.name for run in runs) if others else folder.resolve().name,
        "compared": bool(others),
        "kind": "sft" if ours.is_supervised else "rl",
        "made": datetime.now().isoformat(" ", "minutes"),
        "status": f"{len(runs)} runs" if others else _status(ours),
        "runs": [_run_content(run) for run in runs],
        "demo": {} if others else read_demo(folder),
        "bounds": [],
        "prompts": [],
        "episodes": [],
        "texts": {},
        "replayed": False,
        "notes": notes,
    }
    if not others:
        content |= _rollout_content(ours, find_text, notes)
    return {name: _finite(part) for name, part in content.items()}


def _compared(folders: Sequence[Path]) -> tuple[RunData, ...]:
    """One run of each folder, ours of a demo's; runs of one name have their folder's name before it."""
    found = [read_runs(folder)[-1] for folder in folders]
    if len({run.is_supervised for run in found}) > 1:
        kinds = ", ".join(f"{run.name} of {'sft' if run.is_supervised else 'train'}" for run in found)
        raise InputError(f"runs of one kind are compared, got {kinds}; compare those of sft and of train apart")
    names = [run.name for run in found]
    return tuple(
        replace(run, name=f"{run.folder.resolve().parent.name}/{run.name}") if names.count(run.name) > 1 else run
        for run in found
    )


def _finite(value: Any) -> Any:
    """The value with NaN and infinities as texts, which JSON has no numbers for."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


def _run_content(run: RunData) -> dict[str, Any]:
    return {
        "name": run.name,
        "rows": run.rows,
        "facts": facts_of(run),
        "names": epochs.names_of(run.rows),
        "epochs": epochs.by_epoch(run.rows),
        "phases": [{"step": row["step"], **epochs.phase_seconds(row)} for row in run.rows],
        "account": epochs.account(run.rows, has_branches=run.runs_episodes),
        "faults": epochs.faults(run.rows),
        "timeline": read_timeline(run.folder),
        "has_workers": any(metrics.BUBBLE in row for row in run.rows),
    }


def _status(run: RunData) -> str:
    """How far the run is, and when it wrote last.

    Example: "16 of 32 steps, last written 2026-03-01 10:20".
    """
    done = run.rows[-1]["step"] if run.rows else 0
    planned = "" if run.num_planned is None else f" of {run.num_planned}"
    file = run.folder / METRICS_FILE
    if not file.is_file():
        return f"{done}{planned} steps"
    written = datetime.fromtimestamp(file.stat().st_mtime).isoformat(" ", "minutes")
    return f"{done}{planned} step{'' if done == 1 and not planned else 's'}, last written {written}"


def _rollout_content(run: RunData, find_text: Callable[[RunData], TextOf | None], notes: list[str]) -> dict[str, Any]:
    """Bounds, forests and colours, from the newest rollouts; adds what is missing to `notes`."""
    if run.is_supervised:
        rollouts = read_samples(run.folder)
    else:
        rollouts = read_newest(run.folder, num_history_epochs(run.config) + 1)
    notes.extend(rollouts.notes)
    if not rollouts.epochs:
        return {}
    groups, chosen = rollouts.newest, choose_prompts(rollouts.newest)
    text_of = find_text(run)
    if text_of is None:
        notes.append("The tokenizer of the run was not found here, so tokens are shown as ids.")
    origins, replayed = _origins(run, rollouts, chosen, notes)
    drawn = {prompt: groups[prompt] for prompt in chosen}
    ids = sorted({token for group in drawn.values() for each in group for token in tokens_of(each).tolist()})
    return {
        "epoch": max(rollouts.epochs),
        "num_prompts": len(groups),
        "bounds": [] if run.is_supervised else _bounds(run, rollouts, notes),
        "episodes": [] if run.is_supervised else episodes_of(rollouts.epochs[max(rollouts.epochs)], text_of),
        "prompts": [_prompt_content(prompt, group, origins[prompt]) for prompt, group in drawn.items()],
        "texts": {} if text_of is None else {str(token): text_of(token) for token in ids},
        "replayed": replayed,
    }


def _prompt_content(prompt: PromptId, group: Sequence[Trajectory], origins: Sequence[str]) -> dict[str, Any]:
    return {
        "id": str(prompt),
        "forest": draw(group),
        "rollouts": [
            {"tokens": tokens_of(each).tolist(), "origins": letters, "logprobs": _logprobs(each)}
            for each, letters in zip(group, origins, strict=True)
        ],
    }


def _logprobs(each: Trajectory) -> list[float] | None:
    return None if each.logprobs is None else [round(value, 3) for value in each.logprobs.tolist()]


def _origins(
    run: RunData, rollouts: Rollouts, chosen: Sequence[PromptId], notes: list[str]
) -> tuple[dict[PromptId, list[str]], bool]:
    """The letters of the chosen prompts' rollouts, and whether they are those of a replay."""
    if has_drafts(run.config):
        try:
            return token_origins(rollouts.epochs, chosen, run.config), True
        except (TreeringError, TypeError, ValueError) as error:
            notes.append(f"The drafts could not be replayed: {error}")
    return {prompt: [_undrafted(each) for each in rollouts.newest[prompt]] for prompt in chosen}, False


def _undrafted(each: Trajectory) -> str:
    mask = [True] * tokens_of(each).size if each.loss_mask is None else each.loss_mask.tolist()
    return "".join(SAMPLED if is_sampled else GIVEN for is_sampled in mask)


def _bounds(run: RunData, rollouts: Rollouts, notes: list[str]) -> list[dict[str, float]]:
    folders = sorted((run.folder / CHECKPOINTS_FOLDER).glob("*/config.json"))
    if not folders:
        notes.append("The FLOP bound needs the shape of the model, and there is no checkpoint yet.")
        return []
    try:
        shape = read_shape(folders[-1])
    except TreeringError as error:
        notes.append(f"The FLOP bound is not known: {error}")
        return []
    return [
        {"epoch": epoch, **bounds_of(list(groups_of(found).values()), shape)}
        for epoch, found in rollouts.epochs.items()
    ]


def tiles_of(content: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The figures at the top of the page: label, value and what it says.

    Example: a run whose epochs have rewards 0.41 to 0.93 has ("reward", "0.93", "mean of the newest epoch; 0.41 in the
    first").
    """
    run = content["runs"][-1]
    found = run["epochs"]
    if not found or content["compared"]:
        return []
    first, last = found[0], found[-1]
    tiles: list[tuple[str, str, str]] = []
    if last["reward"] is not None:
        start = "" if first["reward"] is None else f"; {first['reward']:.2f} in the first"
        tiles.append(("reward", f"{last['reward']:.2f}", f"mean of the newest epoch{start}"))
    loss = number(epochs.last_values(run["rows"]).get(metrics.LOSS))
    if content["kind"] == "sft" and loss is not None:
        tiles.append(("loss", f"{loss:.3f}", "of the newest step"))
    if last["tokens_per_forward"] is not None:
        words = "in the newest epoch; 1.00 is decoding without drafts"
        tiles.append(("tokens per forward", f"{last['tokens_per_forward']:.2f}", words))
    if last["acceptance"] is not None:
        tiles.append(("drafts accepted", f"{last['acceptance']:.0%}", "of drafted tokens in the newest epoch"))
    if last["sharing"] is not None:
        words = "of trained tokens are computed for another branch already"
        tiles.append(("sharing", f"{last['sharing']:.0%}", words))
    ratio = number(content["demo"].get("step_ratio"))
    if ratio is not None:
        tiles.insert(0, ("as fast as plain", f"{ratio:.2f}x", "seconds of all steps, plain over Treering"))
    return tiles
