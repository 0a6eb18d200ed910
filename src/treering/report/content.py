"""Data of a run's page: charts, tiles, facts, the forest, origins of tokens, episodes."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from treering import metrics
from treering.analysis.recording import record
from treering.analysis.replay import replay
from treering.arrays import Int64Array
from treering.data import Trajectory, render
from treering.data.trajectory import EpisodePart
from treering.errors import InputError, TreeringError, plural
from treering.files.writing import CHECKPOINTS_FOLDER
from treering.history.features import SOURCES
from treering.history.store.store import MAX_EPOCHS
from treering.metrics import METRICS_FILE
from treering.report.rollout_views import (
    MAX_DRAWN_TOKENS,
    Rollouts,
    choose_prompts,
    groups_of,
    read_newest,
    read_samples,
    tokens_of,
)
from treering.report.run_data import (
    RunData,
    account,
    by_epoch,
    facts_of,
    faults,
    number,
    phase_seconds,
    read_demo,
    read_runs,
    read_timeline,
    section_of,
)
from treering.tree.forest import Forest
from treering.tree.stats import flat_work, tree_work, work_bounds
from treering.types import ModelShape, PromptId, TokenIds, read_shape

TextOf = Callable[[int], str]
"""Returns the text of a token id."""


def page_content(
    folder: Path, find_text: Callable[[RunData], TextOf | None], *, others: Sequence[Path] = ()
) -> dict[str, Any]:
    """Return all data of the page of a folder.

    Args:
        folder: folder of a run or a demo.
        find_text: returns a function from a run's token ids to texts, or None to show ids.
        others: folders of runs to compare it with; the page then has their curves and no rollouts.

    Raises:
        InputError: a folder holds no run, or only some of the runs are supervised.

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
    """Return one run per folder, ours for a demo; runs with equal names get their parent folder's name in front."""
    found = [read_runs(folder)[-1] for folder in folders]
    if len({run.is_supervised for run in found}) > 1:
        kinds = ", ".join(f"{run.name} of {'sft' if run.is_supervised else 'train'}" for run in found)
        raise InputError(
            f"compared runs must be of one kind, got {kinds}; compare those of sft and of train separately"
        )
    names = [run.name for run in found]
    return tuple(
        replace(run, name=f"{run.folder.resolve().parent.name}/{run.name}") if names.count(run.name) > 1 else run
        for run in found
    )


def _finite(value: Any) -> Any:
    """Return the value with NaN and infinities as texts, because JSON has no such numbers."""
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
        "names": sorted({name for row in run.rows for name in row if name != "step"}),
        "epochs": by_epoch(run.rows),
        "phases": [{"step": row["step"], **phase_seconds(row)} for row in run.rows],
        "account": account(run.rows, has_branches=run.runs_episodes),
        "faults": faults(run.rows),
        "timeline": read_timeline(run.folder),
        "has_workers": any(metrics.BUBBLE in row for row in run.rows),
    }


def _status(run: RunData) -> str:
    """Return how far the run is, and when it last wrote.

    Example: "16 of 32 steps, last written 2026-03-01 10:20".
    """
    done = run.rows[-1]["step"] if run.rows else 0
    steps = plural(done, "step") if run.num_total is None else f"{done} of {run.num_total} steps"
    file = run.folder / METRICS_FILE
    if not file.is_file():
        return steps
    return f"{steps}, last written {datetime.fromtimestamp(file.stat().st_mtime).isoformat(' ', 'minutes')}"


def _rollout_content(run: RunData, find_text: Callable[[RunData], TextOf | None], notes: list[str]) -> dict[str, Any]:
    """Return bounds, forests and colours from the newest rollouts; add missing data to `notes`."""
    rollouts = read_samples(run.folder) if run.is_supervised else read_newest(run.folder, MAX_EPOCHS + 1)
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
            {
                "tokens": tokens_of(each).tolist(),
                "origins": letters,
                "logprobs": None if each.logprobs is None else [round(value, 3) for value in each.logprobs.tolist()],
                "rehearsed": rehearsal_marks(each),
            }
            for each, letters in zip(group, origins, strict=True)
        ],
    }


def _origins(
    run: RunData, rollouts: Rollouts, chosen: Sequence[PromptId], notes: list[str]
) -> tuple[dict[PromptId, list[str]], bool]:
    if has_drafts(run.config):
        try:
            return token_origins(rollouts.epochs, chosen, run.config), True
        except (TreeringError, TypeError, ValueError) as error:
            notes.append(f"The drafts could not be replayed: {error}")

    def undrafted(each: Trajectory) -> str:
        mask = [True] * tokens_of(each).size if each.loss_mask is None else each.loss_mask.tolist()
        return "".join(SAMPLED if is_sampled else GIVEN for is_sampled in mask)

    return {prompt: [undrafted(each) for each in rollouts.newest[prompt]] for prompt in chosen}, False


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
    return [{"epoch": epoch, **bounds_of(trained_groups(found), shape)} for epoch, found in rollouts.epochs.items()]


def tiles_of(content: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the figures at the top of the page: label, value and explanation.

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
    scores = {metrics.EVAL_LOSS: "held-out loss", metrics.EVAL_REWARD: "held-out reward"}
    if content["kind"] == "sft":
        scores = {metrics.LOSS: "loss", **scores}
    for name, label in scores.items():
        values = [value for row in run["rows"] if (value := number(row.get(name))) is not None]
        if values:
            tiles.append((label, f"{values[-1]:.3f}", f"the newest; {values[0]:.3f} at first"))
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


class Bars(NamedTuple):
    """Placement of a forest's tokens: bars over the rows of their branches."""

    rows: list[int]
    """Branch of each row; branches that share most are neighbours."""
    rectangles: list[tuple[int, int, int, int]]
    """First token in the forest, number of tokens, first row, and end of the rows; parents before children."""


def place_bars(forest: Forest, cuts: Int64Array | None = None) -> Bars:
    """Lay out a forest with a bar for each segment.

    Args:
        forest: forest of one group or episode.
        cuts: tokens at which a new bar begins; None for no cuts.
    """
    rows = np.argsort(forest.branch_end, kind="stable")
    ends = forest.branch_end[rows]
    # A rollout may end inside a segment, as a prefix of others: a new bar begins after it.
    starts = np.union1d(forest.segment_start, ends[ends + 1 < forest.num_tokens] + 1)
    starts = starts if cuts is None else np.union1d(starts, cuts)
    lengths = np.diff(starts, append=forest.num_tokens)
    tops = np.searchsorted(ends, starts)
    bottoms = np.searchsorted(ends, forest.subtree_end[starts])
    columns = (starts.tolist(), lengths.tolist(), tops.tolist(), bottoms.tolist())
    return Bars(rows.tolist(), list(zip(*columns, strict=True)))


def draw(group: Sequence[Trajectory]) -> dict[str, Any]:
    """Return the forest of a group as the page draws it: segments over the rows of their branches.

    Returns:
        "rows", the rollout of each row; "segments", each with the depth of its first token, its number of tokens, its
        first row, the end of its rows, and the mean advantage of its branches or None; "rewards" and "advantages" by
        rollout; "num_tokens", the distinct tokens, and "num_branch_tokens".

    Example: [5, 6, 7] and [5, 6, 8, 9] give a segment of 2 tokens over both rows, and segments of 1 and 2 tokens at
    depth 2, each in its own row.
    """
    forest = forest_of(group)
    bars = place_bars(forest)
    advantages = [mean_advantage(each) for each in group]
    return {
        "rows": bars.rows,
        "segments": [
            [
                int(forest.position[start]),
                num_tokens,
                top,
                bottom,
                _mean([advantages[row] for row in bars.rows[top:bottom]]),
            ]
            for start, num_tokens, top, bottom in bars.rectangles
        ],
        "rewards": [each.reward for each in group],
        "advantages": advantages,
        "num_tokens": forest.num_tokens,
        "num_branch_tokens": forest.num_branch_tokens,
    }


def mean_advantage(trajectory: Trajectory) -> float | None:
    """Return a trajectory's advantage or its mean over trained tokens; None without an advantage."""
    if trajectory.advantages is None:
        return trajectory.advantage
    mask = trajectory.loss_mask
    values = trajectory.advantages if mask is None else trajectory.advantages[mask]
    return float(values.mean()) if values.size else 0.0


def trained_groups(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """Return the rollouts of each prompt whose rewards differ."""
    return [group for group in groups_of(trajectories).values() if any(map(mean_advantage, group))]


def forest_of(group: Sequence[Trajectory]) -> Forest:
    """Return the tree of a prompt's rollouts, or of an episode's branches."""
    return Forest.from_sequences([tokens_of(each) for each in group])


def bounds_of(groups: Sequence[Sequence[Trajectory]], shape: ModelShape) -> dict[str, float]:
    """Return the token bound and the FLOP bound of training groups as trees.

    Example: a prompt of 1,024 tokens with 8 responses of 64 has a token bound of 5.67.
    """
    flat = flat_work(np.array([tokens_of(each).size for group in groups for each in group], np.int64))
    found = work_bounds(flat, tree_work(map(forest_of, groups)), shape)
    return {"token_bound": found.token_bound, "flop_bound": found.flop_bound}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


KEPT, CHANGED, UNMARKED = "kc-"


def rehearsal_marks(each: Trajectory) -> str | None:
    """Return a letter per token of a rollout: `KEPT`, `CHANGED` for the first changed one, or `UNMARKED`.

    None if nothing of the rollout was rehearsed, or its run did not log it.

    Example: with 3 rehearsed tokens, of which 2 were kept, a rollout of 5 tokens after a prompt of two is "--kkc--".
    """
    if each.rehearsed is None:
        return None
    num_tokens, start = tokens_of(each).size, 0 if each.loss_mask is None else int(each.loss_mask.argmax())
    marks = UNMARKED * start + KEPT * each.rehearsed.num_kept
    marks += CHANGED if each.rehearsed.num_kept < each.rehearsed.num_tokens else ""
    return marks[:num_tokens].ljust(num_tokens, UNMARKED)


LETTERS = "hsox"
"""Letters for `SOURCES`, in their order."""
GIVEN, SAMPLED = "g", "n"
_SETTINGS = ("max_draft", "min_acceptance", "shape", "sources")
_NOT_DRAFTED = -1


def has_drafts(config: Mapping[str, Any]) -> bool:
    """Return whether a run drafts."""
    return section_of(config, "history").get("drafts") == "on"


def token_origins(
    epochs: Mapping[int, list[Trajectory]], prompts: Collection[PromptId], config: Mapping[str, Any]
) -> dict[PromptId, list[str]]:
    """Return a letter per token of each rollout of the newest epoch, in the order of the group.

    Args:
        epochs: rollouts by epoch, ascending.
        prompts: prompts to replay.
        config: settings of the run.

    Returns:
        A text per rollout, by prompt: `GIVEN` for prompts and observations, `LETTERS` for drafted and accepted tokens,
        `SAMPLED` for the rest.

    Example: a rollout that repeats the one of the epoch before, after a prompt of two tokens, begins with "ggn" or
    "ggh" and continues with "h", except for one "n" per forward pass.
    """
    wanted = set(prompts)
    chosen = [each for rollouts in epochs.values() for each in rollouts if each.task_id in wanted]
    rendered = render(chosen)
    kept = [(each, one) for each, one in zip(chosen, rendered, strict=True) if one.loss_mask.any()]
    origins = np.full(sum(one.tokens.size for _, one in kept), _NOT_DRAFTED, np.int8)
    offsets = np.zeros(1, np.int64)
    if kept:
        recorded = record([each for each, _ in kept], [one for _, one in kept])
        replay(recorded, "all", settings=drafter_settings(config), origins=origins)
        offsets = recorded.offsets
    # A recording keeps the order within an epoch, because steps ascend in a run's files.
    pieces = iter([origins[begin:end] for begin, end in pairwise(offsets.tolist())])
    newest, found = max(epochs, default=0), dict[PromptId, list[str]]()
    for each, one in zip(chosen, rendered, strict=True):
        piece = next(pieces) if one.loss_mask.any() else np.zeros(one.tokens.size, np.int8)
        if each.epoch == newest:
            found.setdefault(each.task_id, []).append(_letters(piece, one.loss_mask))
    return found


def _letters(origins: np.ndarray[Any, np.dtype[np.int8]], mask: np.ndarray[Any, np.dtype[np.bool_]]) -> str:
    pairs = zip(origins.tolist(), mask.tolist(), strict=True)
    return "".join(
        GIVEN if not is_sampled else SAMPLED if origin == _NOT_DRAFTED else LETTERS[origin]
        for origin, is_sampled in pairs
    )


def drafter_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run's drafter; without sources, all of them, to replay what drafts would have done.

    Example: a run with only `history.max_draft = 5` in its settings has {"max_draft": 5} and all `SOURCES`.
    """
    given = {name: value for name, value in section_of(config, "history").items() if name in _SETTINGS}
    sources = tuple(given.get("sources", SOURCES))
    return given | {"sources": sources or SOURCES}


MAX_DRAWN_EPISODES = 40
_MAX_TEXT = 240
_READ = -1
"""Stands for no agent: tokens that no call of a trained agent sampled."""


def episodes_of(trajectories: Sequence[Trajectory], text_of: Callable[[int], str] | None) -> list[dict[str, Any]]:
    """Return the episodes of the newest step as the page draws them; those with the most branches come first.

    Args:
        trajectories: rollouts of a run; those that do not belong to episodes are dropped.
        text_of: returns a token's text; None shows ids.

    Returns:
        At most `MAX_DRAWN_EPISODES` with `MAX_DRAWN_TOKENS` in all, but at least one if there are any.
    """
    branches = [each for each in trajectories if each.episode is not None]
    newest = max((each.step or 0 for each in branches), default=0)
    found: dict[tuple[Any, ...], list[Trajectory]] = {}
    for each in branches:
        if (each.step or 0) == newest:
            found.setdefault((each.task_id, each.trial), []).append(each)
    ordered = sorted(found.values(), key=len, reverse=True)
    sizes = np.cumsum([sum(tokens_of(each).size for each in episode) for episode in ordered])
    num_fitting = max(1, int((sizes <= MAX_DRAWN_TOKENS).sum()))
    return [_drawn(episode, text_of) for episode in ordered[: min(MAX_DRAWN_EPISODES, num_fitting)]]


def _drawn(branches: Sequence[Trajectory], text_of: Callable[[int], str] | None) -> dict[str, Any]:
    parts = [_part(each) for each in branches]
    agents = list(dict.fromkeys(part.agent for part in parts))
    forest = forest_of(branches)
    owner, call = np.full(forest.num_tokens, _READ), np.full(forest.num_tokens, _READ)
    for branch, part in enumerate(parts):
        path = forest.path(branch)
        for span in part.calls:
            owner[path[span.start : span.stop]] = agents.index(part.agent)
            call[path[span.start : span.stop]] = span.number
    changes = np.flatnonzero((np.diff(owner) != 0) | (np.diff(call) != 0)) + 1
    bars = place_bars(forest, changes)
    turns = [turn for part in parts for turn in part.turns]
    return {
        "id": str(branches[0].task_id),
        "trial": branches[0].trial,
        "step": branches[0].step,
        "agents": agents,
        "spans": [
            [
                int(forest.position[start]),
                length,
                top,
                bottom,
                int(owner[start]),
                int(call[start]),
                _words(forest.tokens[start : start + length], text_of),
            ]
            for start, length, top, bottom in bars.rectangles
        ],
        "rows": [
            [agents.index(parts[row].agent), branches[row].reward, mean_advantage(branches[row])] for row in bars.rows
        ],
        "num_tokens": forest.num_tokens,
        "num_branch_tokens": forest.num_branch_tokens,
        "num_calls": sum(len(part.calls) for part in parts),
        "num_turns": len(turns),
        "wait_s": round(sum(turn.wait_s for turn in turns), 4),
    }


def _part(each: Trajectory) -> EpisodePart:
    assert each.episode is not None, "branches of episodes were chosen"
    return each.episode


def _words(tokens: TokenIds, text_of: Callable[[int], str] | None) -> str:
    words = [str(token) if text_of is None else text_of(token) for token in tokens[:_MAX_TEXT].tolist()]
    return ("" if text_of is not None else " ").join(words)[:_MAX_TEXT]
