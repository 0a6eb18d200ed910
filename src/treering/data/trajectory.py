"""Trajectories as they are stored: the messages or tokens of one rollout, and what is known about it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treering.errors import InputError
from treering.types import MAX_TOKEN_ID, LossMask, TokenIds

TaskId: TypeAlias = str | int
"""A dataset key, the same for all trials of a task."""

RAW_FORMAT = "raw"
"""The format whose text is the concatenated contents; every other format is a chat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool by an assistant."""

    name: str
    """Name of the tool."""
    arguments: Mapping[str, Any] | str
    """A JSON object, or the model's text if it is not one."""
    id: str | None = None
    """Identifier that the tool's answer refers to; None if the source has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message."""

    role: str
    """The speaker: "system", "user", "assistant", "tool" or the source's own word."""
    content: str | None
    """The text; None if the message only calls tools."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls in order."""
    name: str | None = None
    """Name of the speaker or of the answering tool, for templates that show it."""
    tool_call_id: str | None = None
    """The call that a tool message answers."""

    @property
    def is_trained(self) -> bool:
        """Whether the policy wrote it: True for role "assistant"."""
        return self.role == "assistant"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """One rollout, either as messages or as token ids.

    Raises:
        InputError: neither or both of messages and tokens, arrays of different lengths, token ids out of range, raw
            text with tool calls, or a number that is not finite.

    Example: `Trajectory(task_id="a", tokens=np.array([5, 6, 7], np.int32), loss_mask=np.array([False, True, True]))`
    trains 6 and 7.
    """

    task_id: TaskId
    """The same for all trials of a task, which form one tree."""
    messages: tuple[Message, ...] | None = None
    """The conversation in order; None with tokens."""
    tokens: TokenIds | None = None
    """int32 [T]; None with messages."""
    loss_mask: LossMask | None = None
    """bool [T], True for trained tokens; only with tokens, all of which are trained if it is None."""
    logprobs: npt.NDArray[np.float64] | None = None
    """float64 [T], log-probabilities under the policy that sampled; only with tokens."""
    format: str = "chat"
    """"raw" is text without chat markers; anything else is a chat."""
    trial: int | None = None
    """Number of the trial within its task."""
    reward: float | None = None
    """Reward of the whole rollout."""
    advantage: float | None = None
    """Advantage of the whole rollout."""
    step: int | None = None
    """Optimizer step that it was sampled for."""
    epoch: int | None = None
    """Pass over the prompts in which it was sampled."""
    version: int | None = None
    """Policy version that sampled it."""

    def __post_init__(self) -> None:
        _check_source(self)
        _check_arrays(self)
        for name in ("reward", "advantage"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise InputError(f"{name} must be a finite number, got {value!r}; drop it or repair the source")


def _check_source(trajectory: Trajectory) -> None:
    messages, tokens = trajectory.messages, trajectory.tokens
    if (messages is None) == (tokens is None):
        both = "neither" if messages is None else "both"
        raise InputError(f"a trajectory has either messages or tokens, got {both}; keep exactly one of them")
    if messages is None:
        return
    if not messages:
        raise InputError("messages must hold at least one message, got []; drop the trajectory")
    if trajectory.format == RAW_FORMAT and any(message.tool_calls for message in messages):
        raise InputError('format "raw" concatenates contents and has no form for tool_calls; use format "chat"')
    for name in ("loss_mask", "logprobs"):
        if getattr(trajectory, name) is not None:
            raise InputError(f"{name} has one entry per token and messages were given; give tokens instead of messages")


def _check_arrays(trajectory: Trajectory) -> None:
    tokens = trajectory.tokens
    if tokens is None:
        return
    if tokens.ndim != 1 or tokens.size == 0:
        raise InputError(f"tokens must hold at least one token id, got shape {tokens.shape}; drop the trajectory")
    if int(tokens.min()) < 0:
        raise InputError(f"token ids lie in [0, {MAX_TOKEN_ID}], got {int(tokens.min())}; correct tokens")
    for name in ("loss_mask", "logprobs"):
        values = getattr(trajectory, name)
        if values is not None and values.shape != tokens.shape:
            raise InputError(f"{name} has one entry per token: {tokens.size} tokens, {values.size} entries; align them")
    if trajectory.logprobs is not None and not np.isfinite(trajectory.logprobs).all():
        raise InputError("logprobs must be finite numbers, got NaN or infinity; use 0.0 where a token was not sampled")
