"""Metrics of a run: their names and the sinks that they are written to.

A run never reads metrics back, so no decision depends on a sink. This module imports no torch.
"""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

from treering.errors import InputError, StateError, UnsupportedError

LOSS: Final = "train/loss"
GRAD_NORM: Final = "train/grad_norm"
LEARNING_RATE: Final = "train/learning_rate"
EPOCH: Final = "train/epoch"
NUM_TREES: Final = "train/num_trees"
NUM_BRANCHES: Final = "train/num_branches"
NUM_TOKENS: Final = "train/num_tokens"
NUM_BRANCH_TOKENS: Final = "train/num_branch_tokens"
NUM_LOSS_TOKENS: Final = "train/num_loss_tokens"
SHARING: Final = "train/sharing"
NUM_RECOMPUTED_TOKENS: Final = "train/num_recomputed_tokens"
NUM_UNSHARED_TREES: Final = "train/num_unshared_trees"
REWARD_MEAN: Final = "reward/mean"
REWARD_STD: Final = "reward/std"
NUM_REWARD_ERRORS: Final = "reward/num_errors"
ZERO_VARIANCE_SHARE: Final = "reward/zero_variance_share"
NUM_ROLLOUTS: Final = "rollout/num_rollouts"
NUM_EMPTY: Final = "rollout/num_empty"
NUM_EMPTY_GROUPS: Final = "rollout/num_empty_groups"
NUM_OVERLONG: Final = "rollout/num_overlong"
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
STEP_S: Final = "time/step_s"
ROLLOUT_S: Final = "time/rollout_s"
TRAIN_S: Final = "time/train_s"
UPDATE_S: Final = "time/update_s"
TRAINER_WAIT_S: Final = "time/trainer_wait_s"
SAMPLED_PER_S: Final = "time/sampled_per_s"
TOKENS_PER_S: Final = "time/tokens_per_s"
PEAK_MEMORY_BYTES: Final = "memory/peak_bytes"

Number = int | float


class Sink(Protocol):
    """Stores rows of metrics."""

    def write(self, step: int, values: Mapping[str, Number]) -> None:
        """Store the values of one step; once it returns, a killed process does not lose them."""

    def close(self) -> None:
        """Close the file; a second call does nothing."""


class JsonlSink:
    """One JSON object a line: `{"step": 7, "train/loss": 1.25}`.

    JSON has no NaN and no infinity, so these are written as the strings "nan", "inf" and "-inf", which Python's `float`
    reads back; null would be ambiguous.

    Args:
        path: the file; its folder is created.
        resume_step: the last step that the run keeps. Rows after it, and an incomplete last line, are cut
            off, so that no step occurs twice. None means a new run.

    Raises:
        StateError: a new run finds rows in the file.

    Example: a file with steps 1 to 9 opened with `resume_step=6` holds steps 1 to 6, and the next row is step 7.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step is not None and path.exists():
            cut_rows(path, resume_step)
        if resume_step is None and path.exists() and path.stat().st_size > 0:
            raise StateError(
                f"a new run starts with an empty metrics file, and {path} holds rows of another run; choose another "
                "run folder, resume that run, or remove the file"
            )
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, Number]) -> None:
        """Append one line and flush it; values: metric name to number."""
        row = {"step": step} | {name: _json_number(value) for name, value in values.items()}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


class TensorBoardSink:
    """Scalars in a TensorBoard event file, written without torch.

    Args:
        folder: the log folder; each opened sink adds a file to it.
        resume_step: the last step that the run keeps; the new file tells TensorBoard to drop later points of earlier
            files. None means a new run.

    Raises:
        UnsupportedError: the optional package `tensorboard` is not installed.

    Example: `TensorBoardSink(Path("runs/a"), resume_step=6)` after a file with steps 1 to 9 shows steps 1 to 6.
    """

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise UnsupportedError(
                f"TensorBoard logs need the package 'tensorboard', and it cannot be imported ({error}); install it "
                "with pip install 'treering[tensorboard]', or leave \"tensorboard\" out of run.log"
            ) from error
        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        self._writer: Any = EventFileWriter(str(folder))
        if resume_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(self._event(wall_time=time.time(), step=resume_step + 1, session_log=start))
            self._writer.flush()

    def write(self, step: int, values: Mapping[str, Number]) -> None:
        """Add one event with a scalar (float32) per metric and flush it."""
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars)))
        self._writer.flush()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._writer.close()


class Metrics:
    """Sends each step's values to every sink; use it in a `with` statement.

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

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def cut_rows(path: Path, last_step: int) -> None:
    """Cuts a JSONL file after the rows of steps up to `last_step`; an incomplete last line is cut too.

    Example: a file with rows of steps 1, 1, 2 and 3 cut at 2 holds those of 1, 1 and 2.
    """
    os.truncate(path, _num_bytes_until(path, last_step))


def _num_bytes_until(path: Path, last_step: int) -> int:
    """Length of the leading part of the file whose lines are complete and belong to steps up to `last_step`."""
    num_bytes = 0
    with path.open("rb") as lines:
        for line in lines:
            step = _step_of(line)
            if step is None or step > last_step:
                break
            num_bytes += len(line)
    return num_bytes


def _step_of(line: bytes) -> int | None:
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return step if isinstance(step, int) else None


def _json_number(value: Number) -> Number | str:
    # repr of a float that is not finite is 'nan', 'inf' or '-inf'.
    return value if math.isfinite(value) else repr(value)


def _checked_name(name: str) -> str:
    if not name or name == "step":
        raise InputError(f'a metric needs a name other than "step", which every row has; got {name!r}; rename it')
    return name


def _number(name: str, value: Any) -> Number:
    if isinstance(value, Integral):
        return int(value)
    # A tensor is not a registered Real, and float() of a tensor with several elements raises, as it should.
    if isinstance(value, Real) or (hasattr(value, "item") and getattr(value, "ndim", None) == 0):
        return float(value)
    raise InputError(f"a metric is one number: {name!r} is {value!r}; log its mean, or each part under its own name")
