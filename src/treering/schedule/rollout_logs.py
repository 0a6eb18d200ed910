"""Read logs of rollouts for traces: lines with lengths, folders of runs, trajectories."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from treering.data import Trajectory
from treering.data.formats.arrow import is_dataset_folder
from treering.data.formats.containers import read_records
from treering.data.formats.json_fields import placed
from treering.data.formats.reader import FormatName, RecordReader
from treering.data.trajectory import Turn, decode_turns, is_episode
from treering.errors import InputError
from treering.schedule.turns import Turns
from treering.types import PromptId, TokenIds, is_count, num_common

EXAMPLE = '{"prompt": "a", "epoch": 0, "length": 812}'
"""An example line of the shorter format."""

# Largest value of numpy's int32.
_MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoggedStep:
    """Rollouts of a logged step."""

    prompts: tuple[PromptId, ...]
    """Prompt of each of R rollouts; rollouts of one prompt are adjacent."""
    lengths: NDArray[np.int64]
    """int64 [R] >= 1: sampled tokens."""
    num_prompt_tokens: NDArray[np.int64]
    """int64 [R] >= 0: tokens before the first sampled one; 0 if not logged."""
    turns: Turns | None = None
    """Turns of the same rollouts; None if they are not logged."""


def read_log(
    path: str | os.PathLike[str], *, num_rollouts: int | None = None, format: FormatName = "auto"
) -> list[LoggedStep]:
    """Read the steps of a log, earliest first.

    A record is `{"prompt", "epoch", "length"}`, with `step` and `prompt_tokens` if known, or a trajectory of a Treering
    run: `{"task_id", "epoch", "step", "tokens", "loss_mask"}`, whose sampled tokens are where the mask is true. It may
    also be a trajectory in another format with token ids (`treering.data.read_trajectories`), which belongs to epoch 0
    if it only has a step. A record may have `turns` instead of a length, a list of `[tokens, seconds of waiting after
    them]`. The first branch of an episode has the turns of the whole episode; its other branches are not counted.
    Rollouts of one epoch and step are a step. Without `step` an epoch's prompts are cut into steps in file order, and a
    prompt's rollouts stay together.

    Args:
        path: a file, a folder with files `epoch-*.jsonl`, or a run's folder with such files in `rollouts`.
        num_rollouts: rollouts of a step if lines have no `step`: prompts are added until there are this many; None
            makes each epoch one step.
        format: format of the records; "auto" also reads the shorter format.

    Raises:
        InputError: a line is wrong ("FILE:LINE: rule, value, fix"), or the path has no rollouts.

    Example: four lines of prompts "a", "b", "c" and "a" again, of epoch 0, with `num_rollouts=2` make the steps
    a, a and b, c.
    """
    may_be_torn = Path(path).is_dir()
    rows = [row for file in _files(Path(path)) for row in _rows(file, format, may_be_torn=may_be_torn)]
    if not rows:
        raise InputError(f"{path}: a log must have a rollout with a token, got none; check the file")
    with_step = sum(row.step is not None for row in rows)
    if 0 < with_step < len(rows):
        raise InputError(
            f"{path}: either all lines or none may have a step, got {with_step} of {len(rows)}; add it or drop it"
        )
    parts: dict[tuple[int, int], list[_Row]] = {}
    for row in rows:
        parts.setdefault((row.epoch, row.step or 0), []).append(row)
    limit = None if with_step else num_rollouts
    return [_as_step(groups) for key in sorted(parts) for groups in _cut(parts[key], limit)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    prompt: PromptId
    epoch: int
    step: int | None
    length: int
    num_prompt_tokens: int
    turns: tuple[Turn, ...] = ()


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    folder = path / "rollouts" if (path / "rollouts").is_dir() else path
    files = sorted([*folder.glob("epoch-*.jsonl"), *folder.glob("epoch-*.jsonl.gz")])
    # A run's folder may also hold tables that were written from it.
    if not files and is_dataset_folder(path):
        return [path]
    if not files:
        raise InputError(f"{path}: a run keeps rollouts in rollouts/epoch-*.jsonl, found none; give a run or a file")
    return files


def _rows(file: Path, format: FormatName, *, may_be_torn: bool) -> Iterator[_Row]:
    reader = RecordReader(str(file), format)
    for where, record in read_records(file, may_be_torn=may_be_torn):
        if format == "auto" and _is_line(record):
            with placed(where):
                row = _row(record)
        else:
            row = _counted(reader.decode(where, record), where)
        # A rollout that ended without a token took no time.
        if row is not None and row.length:
            yield row
    reader.warn()


def _is_line(record: object) -> TypeGuard[dict[str, Any]]:
    """Return whether a record is a line of a log or of a Treering run, whose lengths need no decoding."""
    if not isinstance(record, dict):
        return False
    return bool({"task_id", "length"} & record.keys()) or (
        "prompt" in record and not {"completion", "chosen"} & record.keys()
    )


def _counted(branches: list[Trajectory], where: str) -> _Row:
    """Return the row of a decoded rollout: tokens that several of its branches share count once."""
    if not branches:
        return _Row(prompt="", epoch=0, step=None, length=0, num_prompt_tokens=0)
    first, length, earlier = branches[0], 0, list[TokenIds]()
    for one in branches:
        if one.tokens is None:
            raise InputError(
                f"{where}: a rollout needs tokens to count its length, got messages only; log token ids, or lines like "
                f"{EXAMPLE}"
            )
        mask = np.ones(one.tokens.size, np.bool_) if one.loss_mask is None else one.loss_mask
        length += int(mask[max((num_common(one.tokens, other) for other in earlier), default=0) :].sum())
        earlier.append(one.tokens)
    if first.epoch is None and first.step is None:
        raise InputError(f"{where}: a rollout needs an epoch or a step to order the log, got neither; add one")
    assert first.tokens is not None, "each branch was checked"
    mask = np.ones(first.tokens.size, np.bool_) if first.loss_mask is None else first.loss_mask
    return _Row(
        prompt=first.task_id,
        epoch=first.epoch or 0,
        step=first.step,
        length=length,
        num_prompt_tokens=int(mask.argmax()) if mask.any() else mask.size,
    )


def _row(record: Mapping[str, Any]) -> _Row | None:
    """Return the row of a line; None for a branch of an episode whose row is elsewhere."""
    if not {"task_id", "prompt"} & record.keys():
        raise InputError(f"a line must have a prompt, or a task_id and tokens; write it like {EXAMPLE}")
    turns: tuple[Turn, ...] = ()
    if "prompt" in record:
        # A mere number of turns does not give their tokens.
        turns = decode_turns(record["turns"]) if isinstance(record.get("turns"), list) else ()
        length = sum(turn.num_tokens for turn in turns) if turns else _count(record, "length")
        prompt, before = record["prompt"], _count(record, "prompt_tokens", default=0)
    else:
        prompt, (length, before) = record["task_id"], _sampled(record)
        if is_episode(record.get("episode")):
            turns = decode_turns(record["episode"].get("turns") or [])
            if not turns:
                return None
            length = sum(turn.num_tokens for turn in turns)
    if isinstance(prompt, bool) or not isinstance(prompt, str | int):
        raise InputError(f"a prompt must be text or an integer, got {prompt!r}; name it by its key")
    step = _count(record, "step") if record.get("step") is not None else None
    return _Row(
        prompt=prompt, epoch=_count(record, "epoch"), step=step, length=length, num_prompt_tokens=before, turns=turns
    )


def _count(record: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = default if record.get(key) is None else record[key]
    if not isinstance(value, int) or not is_count(value, least=0):
        raise InputError(f"{key} must be an integer of at least 0, got {value!r}; correct the line, such as {EXAMPLE}")
    if value > _MAX_COUNT:
        raise InputError(f"{key} must be at most {_MAX_COUNT}, got {value}; correct the line, such as {EXAMPLE}")
    return value


def _sampled(record: Mapping[str, Any]) -> tuple[int, int]:
    """Return the sampled tokens of a trajectory, and the tokens before the first of them."""
    tokens, mask = record.get("tokens"), record.get("loss_mask")
    if not isinstance(tokens, list):
        raise InputError("a trajectory needs tokens to count its length, got messages only; log token ids")
    if mask is None:
        return len(tokens), 0
    if not isinstance(mask, list) or len(mask) != len(tokens) or not all(entry in (0, 1) for entry in mask):
        raise InputError(f"loss_mask must have 0, 1, true or false for each of {len(tokens)} tokens; correct it")
    return int(sum(mask)), mask.index(1) if 1 in mask else len(mask)


def _cut(rows: list[_Row], num_rollouts: int | None) -> Iterator[list[list[_Row]]]:
    """Yield steps of groups of one prompt each; a step ends when it has enough rollouts."""
    groups: dict[PromptId, list[_Row]] = {}
    for row in rows:
        groups.setdefault(row.prompt, []).append(row)
    step: list[list[_Row]] = []
    size = 0
    for group in groups.values():
        step.append(group)
        size += len(group)
        if num_rollouts is not None and size >= num_rollouts:
            yield step
            step, size = [], 0
    if step:
        yield step


def _as_step(groups: list[list[_Row]]) -> LoggedStep:
    rows = [row for group in groups for row in group]
    # A row without turns is one turn without waiting.
    turns = [row.turns or ((row.length, 0.0),) for row in rows] if any(row.turns for row in rows) else None
    return LoggedStep(
        prompts=tuple(row.prompt for row in rows),
        lengths=np.array([row.length for row in rows], np.int64),
        num_prompt_tokens=np.array([row.num_prompt_tokens for row in rows], np.int64),
        turns=None if turns is None else Turns.of(turns),
    )
