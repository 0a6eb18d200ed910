"""Trajectories as they are stored: the messages or tokens of one rollout, and what is known about it."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from treering.data.episode import EpisodePart
from treering.data.picture import PlacedPicture, check_places
from treering.data.pictures.source import MessagePicture
from treering.data.unicode import valid_text, valid_texts
from treering.errors import InputError
from treering.types import MAX_TOKEN_ID, LossMask, TokenIds

TaskId: TypeAlias = str | int
"""A dataset key, the same for all trials of a task."""

MAX_COUNT = 2**31 - 1
"""Largest number of a trial, step, epoch or version."""

RAW_FORMAT = "raw"
"""The format whose text is the concatenated contents; every other format is a chat."""

_PER_TOKEN = ("loss_mask", "logprobs", "advantages")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool by an assistant."""

    name: str
    """Name of the tool."""
    arguments: Mapping[str, Any] | str
    """The text that the model wrote, or a JSON object where the source has only its values."""
    id: str | None = None
    """Identifier that the tool's answer refers to; None if the source has none."""

    @property
    def arguments_text(self) -> str:
        """The arguments as JSON text; those that the model wrote as they are."""
        if isinstance(self.arguments, str):
            return self.arguments
        return json.dumps(dict(self.arguments), ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message."""

    role: str
    """The speaker: "system", "user", "assistant", "tool" or the source's own word."""
    content: str | None
    """The text; None if the message only calls tools."""
    pictures: tuple[MessagePicture, ...] = ()
    """Pictures at their places in the text, in order; only of messages that are not the assistant's."""
    reasoning: str | None = None
    """The thought before the text, where the source keeps it apart."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls in order."""
    name: str | None = None
    """Name of the speaker or of the answering tool, for templates that show it."""
    tool_call_id: str | None = None
    """The call that a tool message answers."""
    trained: bool = True
    """False for an assistant's message that is context only."""

    @property
    def stretches(self) -> tuple[str, ...]:
        """The text cut at its pictures, one stretch more than there are pictures.

        Example: of "Here:What is it?" with a picture at 5 they are "Here:" and "What is it?".
        """
        text = self.content or ""
        bounds = pairwise([0, *(picture.at for picture in self.pictures), len(text)])
        return tuple(text[start:stop] for start, stop in bounds)

    @property
    def is_trained(self) -> bool:
        """Whether the loss covers it: an assistant's message, unless `trained` is False."""
        return self.role == "assistant" and self.trained


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """One rollout, either as messages or as token ids.

    Raises:
        InputError: neither or both of messages and tokens, arrays of different lengths, token ids out of range, raw
            text with tool calls, a text with lone surrogates, a number that is not finite, or a count that is negative
            or huge.

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
    advantages: npt.NDArray[np.float64] | None = None
    """float64 [T], the advantage of each token, 0.0 where none is trained; only with tokens, and instead of
    `advantage`."""
    pictures: tuple[PlacedPicture, ...] = ()
    """Pictures in order, at whose tokens stands the model's own image token; only with tokens. No such token is
    trained."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the tools that the policy was shown, for chat templates; only with messages."""
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
    preference: Literal["chosen", "rejected"] | None = None
    """Its side of a preference pair: a chosen trajectory and the rejected one that follows it."""
    episode: EpisodePart | None = None
    """What it is part of, as a branch of an environment's episode; only with tokens."""

    def __post_init__(self) -> None:
        _check_source(self)
        _check_texts(self)
        _check_arrays(self)
        for name in ("reward", "advantage"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise InputError(f"{name} must be a finite number, got {value!r}; drop it or repair the source")
        for name in ("trial", "step", "epoch", "version"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_COUNT:
                raise InputError(f"{name} lies in [0, {MAX_COUNT}], got {value}; correct it or drop it")


def _check_source(trajectory: Trajectory) -> None:
    messages, tokens = trajectory.messages, trajectory.tokens
    if (messages is None) == (tokens is None):
        both = "neither" if messages is None else "both"
        raise InputError(f"a trajectory has either messages or tokens, got {both}; keep exactly one of them")
    if messages is None:
        if trajectory.tools:
            raise InputError("tools are rendered with messages, and tokens were given; drop tools")
        return
    if not messages:
        raise InputError("messages must hold at least one message, got []; drop the trajectory")
    if trajectory.format != RAW_FORMAT:
        for i, message in enumerate(messages):
            _check_says_something(message, f"messages[{i}]")
            _check_no_drawing(message, f"messages[{i}]")
    elif any(message.tool_calls or message.reasoning for message in messages):
        raise InputError('format "raw" joins contents and has no form for tool_calls or reasoning; use format "chat"')
    elif any(message.pictures for message in messages):
        raise InputError('format "raw" joins contents and has no form for pictures; use format "chat"')
    if trajectory.episode is not None:
        raise InputError(
            "the calls of an episode sampled tokens, and messages were given; give tokens instead of messages"
        )
    for name in _PER_TOKEN:
        if getattr(trajectory, name) is not None:
            raise InputError(f"{name} has one entry per token and messages were given; give tokens instead of messages")


def _check_no_drawing(message: Message, where: str) -> None:
    if message.pictures and message.role == "assistant":
        raise InputError(
            f"{where} of the assistant has a picture, and models are trained to write text; give it to another role, "
            "or remove it"
        )


def _check_says_something(message: Message, where: str) -> None:
    if message.tool_calls or message.reasoning:
        return
    if message.is_trained and not message.content:
        raise InputError(
            f"{where} of the assistant has neither text nor a tool call, so training it would teach to end a turn at "
            "once; drop the message, or give it weight 0"
        )
    if message.content is None:
        raise InputError(f'content may be null only beside a tool call, and {where} has none; write "" or the text')


def _check_texts(trajectory: Trajectory) -> None:
    if isinstance(trajectory.task_id, str):
        valid_text(trajectory.task_id, "task_id")
    if trajectory.tools:
        valid_texts(trajectory.tools, "tools")
    for i, message in enumerate(trajectory.messages or ()):
        for name in ("role", "content", "reasoning", "name", "tool_call_id"):
            if (text := getattr(message, name)) is not None:
                valid_text(text, f"messages[{i}].{name}")
        for call in message.tool_calls:
            valid_texts([call.name, call.id, call.arguments], f"messages[{i}].tool_calls")


def _check_arrays(trajectory: Trajectory) -> None:
    tokens = trajectory.tokens
    if tokens is None:
        if trajectory.pictures:
            raise InputError("pictures stand at tokens, and messages were given; render them first")
        return
    if tokens.ndim != 1 or tokens.size == 0:
        raise InputError(f"tokens must hold at least one token id, got shape {tokens.shape}; drop the trajectory")
    if int(tokens.min()) < 0:
        raise InputError(f"token ids lie in [0, {MAX_TOKEN_ID}], got {int(tokens.min())}; correct tokens")
    for name in _PER_TOKEN:
        values = getattr(trajectory, name)
        if values is not None and values.shape != tokens.shape:
            raise InputError(f"{name} has one entry per token: {tokens.size} tokens, {values.size} entries; align them")
    for name in ("logprobs", "advantages"):
        values = getattr(trajectory, name)
        if values is not None and not np.isfinite(values).all():
            raise InputError(
                f"{name} must be finite numbers, got NaN or infinity; use 0.0 where a token is not trained"
            )
    if trajectory.episode is not None and any(call.stop > tokens.size for call in trajectory.episode.calls):
        raise InputError(
            f"calls sampled tokens of the trajectory, which has {tokens.size}, got {trajectory.episode.calls}; align "
            "them"
        )
    if trajectory.advantage is not None and trajectory.advantages is not None:
        raise InputError("a trajectory has one advantage or one per token, got both; drop advantage or advantages")
    _check_pictures(trajectory, tokens)


def _check_pictures(trajectory: Trajectory, tokens: TokenIds) -> None:
    check_places(trajectory.pictures, tokens)
    mask = trajectory.loss_mask
    for number, one in enumerate(trajectory.pictures):
        if mask is None or mask[one.start : one.stop].any():
            raise InputError(
                f"tokens {one.start} to {one.stop - 1} are picture {number}, and the loss would train them: a model is "
                "never trained to write pictures; give a loss_mask that is False there"
            )
