"""Metrics of a run: their names and the sinks that store them.

Training does not depend on any sink. This module does not import torch.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final, Protocol

from treering.closing import Closing
from treering.errors import InputError, StateError
from treering.files.step_lines import append, read_rows, reopen
from treering.files.writing import check_regular, writing

LOSS: Final = "train/loss"
GRAD_NORM: Final = "train/grad_norm"
LEARNING_RATE: Final = "train/learning_rate"
EPOCH: Final = "train/epoch"
NUM_BRANCHES: Final = "train/num_branches"
NUM_TOKENS: Final = "train/num_tokens"
NUM_BRANCH_TOKENS: Final = "train/num_branch_tokens"
NUM_LOSS_TOKENS: Final = "train/num_loss_tokens"
SHARING: Final = "train/sharing"
NUM_RECOMPUTED_TOKENS: Final = "train/num_recomputed_tokens"
REWARD_MEAN: Final = "reward/mean"
REWARD_STD: Final = "reward/std"
NUM_REWARD_ERRORS: Final = "reward/num_errors"
NUM_UNSCORED: Final = "reward/num_unscored"
REWARD_NUMBERS: Final = "rewards/"
"""Prefix of the metrics that a task reports with its rewards."""
ZERO_VARIANCE_SHARE: Final = "reward/zero_variance_share"
NUM_ROLLOUTS: Final = "rollout/num_rollouts"
NUM_EMPTY: Final = "rollout/num_empty"
NUM_EMPTY_GROUPS: Final = "rollout/num_empty_groups"
NUM_OVERLONG: Final = "rollout/num_overlong"
NUM_LOGGED: Final = "rollout/num_logged"
"""Lines in the rollout log; absent if the run keeps no log."""
NUM_TURNS: Final = "rollout/num_turns"
NUM_SAMPLED: Final = "rollout/num_sampled"
LENGTH_MEAN: Final = "rollout/length_mean"
VERSION: Final = "rollout/version"
TOKENS_PER_FORWARD: Final = "rollout/tokens_per_forward"
NUM_DRAFTED: Final = "rollout/num_drafted"
ACCEPTANCE: Final = "rollout/acceptance"
BUBBLE: Final = "rollout/bubble"
STALENESS: Final = "rollout/staleness"
NUM_STOLEN: Final = "rollout/num_stolen"
NUM_MOVED: Final = "rollout/num_moved"
NUM_RESAMPLED: Final = "rollout/num_resampled"
REHEARSED: Final = "rehearsal/tokens"
"""Tokens sampled early in a step, for the next one."""
REHEARSAL_KEPT: Final = "rehearsal/kept"
"""Share of the tokens that a step sampled again and that stayed the same."""
REHEARSAL_SAVED_S: Final = "rehearsal/seconds_saved"
STEP_S: Final = "time/step_s"
ROLLOUT_S: Final = "time/rollout_s"
TRAIN_S: Final = "time/train_s"
UPDATE_S: Final = "time/update_s"
TRAINER_WAIT_S: Final = "time/trainer_wait_s"
SAMPLED_PER_S: Final = "time/sampled_per_s"
TOKENS_PER_S: Final = "time/tokens_per_s"
PEAK_MEMORY_BYTES: Final = "memory/peak_bytes"
EVAL_LOSS: Final = "eval/loss"
EVAL_NUM_TOKENS: Final = "eval/num_tokens"
EVAL_REWARD: Final = "eval/reward"
EVAL_LENGTH_MEAN: Final = "eval/length_mean"
EVAL_NUM_REWARD_ERRORS: Final = "eval/num_reward_errors"
EVAL_PASS_AT: Final = "eval/pass_at_"
"""Prefix of a name that ends with the number of samples: "eval/pass_at_4"."""

Number = int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A rollout as trackers show it.

    Attributes:
        prompt: text of the prompt.
        completion: text after the prompt, messages of the environment included.
        reward: None if the rollout has none.
        advantage: None if the rollout has none.
    """

    prompt: str
    completion: str
    reward: float | None
    advantage: float | None


COMPLETIONS: Final = "completions"
"""Name of the table of rollouts in trackers."""
COLUMNS: Final = tuple(field.name for field in fields(Completion))


METRICS_FILE = "metrics.jsonl"
"""File of a run that `JsonlSink` writes."""


class Sink(Protocol):
    """Store for rows of metrics."""

    def write(self, step: int, values: Mapping[str, Number]) -> None:
        """Store the values of one step; once it returns, a killed process does not lose them."""

    def write_completions(self, step: int, rows: Sequence[Completion]) -> None:
        """Store some rollouts of a step, before its values."""

    def close(self) -> None:
        """Close the file; a second call does nothing."""


class JsonlSink:
    """File with one JSON object per line: `{"step": 7, "train/loss": 1.25}`.

    JSON has no NaN and no infinity, so they are written as the strings "nan", "inf" and "-inf", which Python's `float`
    reads; null would be ambiguous.

    Args:
        path: the file; its folder is created.
        resume_step: last step that the run keeps. Rows after it, and an incomplete last line, are removed, so that
            no step occurs twice; other damage is a warning (`treering.files.step_lines.reopen`). None means a new run.

    Raises:
        StateError: the file has rows and the run is new, or the file cannot be read or written.

    Example: a file with steps 1 to 9 opened with `resume_step=6` holds steps 1 to 6, and the next row is step 7.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        self._path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            check_regular(path)
        if resume_step is not None:
            reopen([path], resume_step, dict.fromkeys(range(1, resume_step + 1), 1), log=path, one_per_step=True)
        if resume_step is None and path.exists() and path.stat().st_size > 0:
            raise StateError(
                f"a new run starts with an empty metrics file, and {path} holds rows of another run; choose another "
                "run folder, resume that run, or remove the file"
            )
        with writing(path):
            # With a buffer, `close` would repeat a write that failed.
            self._file = path.open("ab", buffering=0)

    def write(self, step: int, values: Mapping[str, Number]) -> None:
        """Append one line and flush it.

        Raises:
            StateError: the disk is full.
        """
        row = {"step": step} | {name: _json_number(value) for name, value in values.items()}
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        with writing(self._path, len(line)):
            append(self._file, line)

    def write_completions(self, step: int, rows: Sequence[Completion]) -> None:
        """Do nothing; the rollout log of the run has all completions."""

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


class Metrics(Closing):
    """Writer of each step's values to every sink; use it in a `with` statement.

    Example: `with Metrics([JsonlSink(path)]) as metrics: metrics.log(1, {LOSS: 2.5, GRAD_NORM: float("inf")})` writes
    `{"step": 1, "train/loss": 2.5, "train/grad_norm": "inf"}`.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self._last_step = -1

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the values of one step: Python, numpy or zero-dimensional torch numbers by metric name.

        Raises:
            StateError: the step is not greater than the previous one.
            InputError: a name is empty or "step", or a value is not a single number.
        """
        if step <= self._last_step:
            raise StateError(
                f"steps are logged once and in order: step {step} comes after step {self._last_step}; log all values "
                "of a step in one call"
            )
        numbers = {_checked_name(name): _number(name, value) for name, value in values.items()}
        self._last_step = step
        for sink in self._sinks:
            sink.write(step, numbers)

    def log_completions(self, step: int, rows: Sequence[Completion]) -> None:
        """Write some rollouts of a step; call it before `log` of the same step."""
        for sink in self._sinks:
            sink.write_completions(step, rows)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


def num_logged(path: Path) -> dict[int, int | None]:
    """Return the number of lines in the rollout log by step, from a metrics file; None if its value is not an int.

    Raises:
        StateError: the file cannot be read.

    Example: the rows `{"step": 1, "rollout/num_logged": 8}` and `{"step": 2}` give {1: 8, 2: 0}.
    """
    counts = {row["step"]: row.get(NUM_LOGGED, 0) for row in read_rows(path)}
    return {step: number if type(number) is int else None for step, number in counts.items()}


def _json_number(value: Number) -> Number | str:
    # The repr is 'nan', 'inf' or '-inf'.
    return value if math.isfinite(value) else repr(value)


def _checked_name(name: str) -> str:
    if not name or name == "step":
        raise InputError(f'a metric needs a name other than "step", which every row has; got {name!r}; rename it')
    return name


def _number(name: str, value: Any) -> Number:
    if isinstance(value, Integral):
        return int(value)
    # A tensor is not a registered Real.
    if isinstance(value, Real) or (hasattr(value, "item") and getattr(value, "ndim", None) == 0):
        return float(value)
    raise InputError(f"a metric is one number: {name!r} is {value!r}; log its mean, or each part under its own name")
