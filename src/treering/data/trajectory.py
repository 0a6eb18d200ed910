"""Trajectories as they are stored: the messages or tokens of a rollout, with rewards and metadata."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from treering.data.image import MessageImage, PlacedImage, check_image_positions
from treering.data.routed_experts import as_routes
from treering.errors import InputError
from treering.types import MAX_TOKEN_ID, LossMask, TokenIds, is_count


def valid_text(text: str, where: str) -> str:
    r"""Check that a text is valid Unicode and return it.

    Raises:
        InputError: the text has lone surrogates, which tokenizers and files cannot hold.

    Example: "ä" is valid; "\ud83d" alone, half of an emoji, is not.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = repr(text) if len(text) <= 76 else f"{text[:73]!r}..."
        raise InputError(f"{where} must be valid Unicode, got {shown} ({error.reason}); repair it") from error
    return text


def valid_texts(value: Any, where: str) -> None:
    """Check every text of a JSON value, keys too."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=dict)
    except (TypeError, ValueError):
        # Values that are not JSON are refused with a better message where they are written or rendered.
        return
    valid_text(text, where)


class CallSpan(NamedTuple):
    """The tokens of a branch that a call sampled."""

    number: int
    """Index of the call among its agent's calls in the run, from 0."""
    start: int
    """Index of the first token."""
    stop: int
    """Index after the last token."""


class Turn(NamedTuple):
    """Tokens that a run sampled without waiting, and the wait after them."""

    num_tokens: int
    """Sampled tokens of all agents; 0 in a first turn that is a wait before the first call."""
    wait_s: float
    """Seconds without an open call, until the next one or the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePart:
    """The part of an episode that a branch is.

    Example: a branch [5, 6, 7, 8, 9] whose calls sampled 7 and 9 has the calls (0, 2, 3) and (1, 4, 5).
    """

    agent: str
    """Name of the agent that made the calls."""
    calls: tuple[CallSpan, ...]
    """Calls that train tokens of this branch, in token order."""
    turns: tuple[Turn, ...] = ()
    """Turns of the whole run, on its first branch; () on the others."""


def is_episode(value: object) -> TypeGuard[dict[str, Any]]:
    """Return whether a field "episode" is a value of `encode_episode`; other tools store numbers or names there."""
    return isinstance(value, dict) and {"agent", "calls"} <= value.keys()


def encode_episode(part: EpisodePart) -> dict[str, Any]:
    """Return the JSON value of a part; `decode_episode` reads it.

    >>> encode_episode(EpisodePart(agent="policy", calls=(CallSpan(0, 2, 3),), turns=(Turn(1, 0.5),)))
    {'agent': 'policy', 'calls': [[0, 2, 3]], 'turns': [[1, 0.5]]}
    """
    record: dict[str, Any] = {"agent": part.agent, "calls": [list(call) for call in part.calls]}
    return record | ({"turns": [list(turn) for turn in part.turns]} if part.turns else {})


def decode_episode(record: Mapping[str, Any]) -> EpisodePart | None:
    """Decode the field "episode" of a record; None if it is absent or has another meaning.

    Raises:
        InputError: calls or turns are not as `encode_episode` writes them.
    """
    value = record.get("episode")
    if not is_episode(value):
        return None
    agent, calls, turns = value["agent"], value["calls"], value.get("turns") or []
    if not (isinstance(agent, str) and isinstance(calls, list) and all(map(_is_call, calls))):
        raise InputError(
            f"an episode has an agent's name and calls as [number, start, stop], got {agent!r:.40} and {calls!r:.80}; "
            "write the line as the run did"
        )
    return EpisodePart(agent=agent, calls=tuple(CallSpan(*call) for call in calls), turns=decode_turns(turns))


def decode_turns(value: object) -> tuple[Turn, ...]:
    """Decode turns from their JSON value.

    Raises:
        InputError: the value is not a list of `[tokens, seconds]`, each at least 0.

    >>> decode_turns([[8, 2.5], [5, 0]])
    (Turn(num_tokens=8, wait_s=2.5), Turn(num_tokens=5, wait_s=0.0))
    """
    if not isinstance(value, list) or not all(map(_is_turn, value)):
        raise InputError(
            f"turns are a list of [tokens, seconds of waiting after them], each at least 0, got {value!r:.80}; correct "
            "the line"
        )
    return tuple(Turn(num_tokens, float(wait_s)) for num_tokens, wait_s in value)


def _is_call(value: object) -> bool:
    is_whole = isinstance(value, list) and len(value) == 3 and all(is_count(number, least=0) for number in value)
    return is_whole and value[1] < value[2]  # type: ignore[index]


def _is_turn(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2 or not is_count(value[0], least=0) or value[0] >= 1 << 31:
        return False
    is_number = isinstance(value[1], int | float) and not isinstance(value[1], bool)
    return is_number and 0 <= value[1] < float("inf")


class Rehearsed(NamedTuple):
    """The first tokens of a rollout, if they were sampled before its step; see docs/rehearsal.md."""

    num_tokens: int
    """Tokens that were sampled early; the rollout may have fewer."""
    num_kept: int
    """Tokens before the first one that the weights of the step drew differently."""


def decode_rehearsed(record: Mapping[str, Any]) -> Rehearsed | None:
    """Decode the field "rehearsed" of a record; None if it is absent or has another meaning.

    >>> decode_rehearsed({"rehearsed": [12, 9]})
    Rehearsed(num_tokens=12, num_kept=9)
    """
    value = record.get("rehearsed")
    if not isinstance(value, list) or len(value) != 2 or not all(is_count(number, least=0) for number in value):
        return None
    return Rehearsed(*value) if value[1] <= value[0] else None


TaskId: TypeAlias = str | int
"""A dataset key, the same for all trials of a task."""

MAX_COUNT = 2**31 - 1
"""Largest number of a trial, step, epoch or version."""

RAW_FORMAT = "raw"
"""Format whose text is the concatenated contents; every other format is a chat."""

_BLANK = re.compile(r'\s*(?:null|"\s*(?:null)?\s*")?\s*')
_PER_TOKEN = ("loss_mask", "logprobs", "advantages")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool by an assistant."""

    name: str
    """Name of the tool."""
    arguments: Mapping[str, Any] | str
    """Text that the model wrote, or a JSON object if the source has only the values."""
    id: str | None = None
    """Identifier that the tool's answer refers to; None if the source has none."""

    @property
    def given(self) -> Mapping[str, Any] | str:
        """Arguments for templates and tools: {} for text that is blank, null or an empty JSON string.

        Example: the arguments "" and "null" become {}; "[1]" is unchanged.
        """
        return {} if isinstance(self.arguments, str) and _BLANK.fullmatch(self.arguments) else self.arguments

    @property
    def arguments_text(self) -> str:
        """Arguments as JSON text; text that the model wrote is unchanged."""
        given = self.given
        return given if isinstance(given, str) else json.dumps(dict(given), ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A chat message."""

    role: str
    """Speaker: "system", "user", "assistant", "tool" or another name of the source."""
    content: str | None
    """The text; None if the message only calls tools."""
    images: tuple[MessageImage, ...] = ()
    """Images with their positions in the text, in order; an assistant's message has none."""
    reasoning: str | None = None
    """Reasoning before the text, if the source separates it."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls in order."""
    name: str | None = None
    """Name of the speaker or tool, for templates that show it."""
    tool_call_id: str | None = None
    """Id of the call that a tool message answers."""
    trained: bool = True
    """False for an assistant's message that is context only."""

    @property
    def stretches(self) -> tuple[str, ...]:
        """The text split at its images, one piece more than images.

        Example: "Here:What is it?" with an image at 5 is split into "Here:" and "What is it?".
        """
        text = self.content or ""
        bounds = pairwise([0, *(image.at for image in self.images), len(text)])
        return tuple(text[start:stop] for start, stop in bounds)

    @property
    def is_trained(self) -> bool:
        """Whether the loss covers the message: it is the assistant's, and `trained` is not False."""
        return self.role == "assistant" and self.trained


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """A rollout, either as messages or as token ids.

    Raises:
        InputError: messages and tokens are both given or both missing, arrays differ in length, token ids are out of
            range, raw text has tool calls, a text has lone surrogates, or a number is not finite or out of range.

    Example: `Trajectory(task_id="a", tokens=np.array([5, 6, 7], np.int32), loss_mask=np.array([False, True, True]))`
    trains 6 and 7.
    """

    task_id: TaskId
    """Id of the task, whose trials form one tree."""
    messages: tuple[Message, ...] | None = None
    """The conversation in order; None with tokens."""
    tokens: TokenIds | None = None
    """int32 [T]; None with messages."""
    loss_mask: LossMask | None = None
    """bool [T], True for trained tokens; only with tokens. None trains all tokens."""
    logprobs: npt.NDArray[np.float64] | None = None
    """float64 [T], log-probabilities under the behaviour policy; only with tokens."""
    advantages: npt.NDArray[np.float64] | None = None
    """float64 [T], per-token advantages, 0.0 at untrained tokens; only with tokens, and instead of `advantage`."""
    images: tuple[PlacedImage, ...] = ()
    """Images in order, at the model's image tokens, which are not trained; only with tokens."""
    routed_experts: npt.NDArray[np.int16] | None = None
    """Experts that each token was routed to while sampling, integers [T, layers, experts per token], which training
    replays; only with tokens. See `as_routes`."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the policy's tools, for chat templates; only with messages."""
    format: str = "chat"
    """"raw" for text without chat markers; anything else is a chat."""
    adds_end: bool = False
    """Whether raw text ends with the tokenizer's `eos_token`, which is trained."""
    trial: int | None = None
    """Number of the trial within its task."""
    reward: float | None = None
    """Reward of the whole rollout."""
    advantage: float | None = None
    """Advantage of the whole rollout."""
    step: int | None = None
    """Optimizer step for which the rollout was sampled."""
    epoch: int | None = None
    """Pass over the prompts in which the rollout was sampled."""
    version: int | None = None
    """Policy version that sampled the rollout."""
    preference: Literal["chosen", "rejected"] | None = None
    """Side of a preference pair; the rejected trajectory follows the chosen one."""
    episode: EpisodePart | None = None
    """Part of an environment's episode that this branch is; only with tokens."""
    rehearsed: Rehearsed | None = None
    """What was sampled of the rollout before its step; None if nothing was."""
    where: str = ""
    """Place in a file, such as FILE:LINE, for errors; "" without a file."""

    def __post_init__(self) -> None:
        _check_source(self)
        _check_texts(self)
        _check_arrays(self)
        if self.tokens is not None and self.routed_experts is not None:
            object.__setattr__(self, "routed_experts", as_routes(self.routed_experts, self.tokens.size))
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
            _check_not_empty(message, f"messages[{i}]")
            if message.images and message.role == "assistant":
                raise InputError(
                    f"messages[{i}] of the assistant has an image, and models are trained to write text; give it to "
                    "another role, or remove it"
                )
    elif any(message.tool_calls or message.reasoning for message in messages):
        raise InputError('format "raw" joins contents and cannot hold tool_calls or reasoning; use format "chat"')
    elif any(message.images for message in messages):
        raise InputError('format "raw" joins contents and cannot hold images; use format "chat"')
    if trajectory.episode is not None:
        raise InputError(
            "the calls of an episode sampled tokens, and messages were given; give tokens instead of messages"
        )
    for name in (*_PER_TOKEN, "routed_experts"):
        if getattr(trajectory, name) is not None:
            raise InputError(f"{name} has one entry per token and messages were given; give tokens instead of messages")


def _check_not_empty(message: Message, where: str) -> None:
    if message.tool_calls or message.reasoning:
        return
    if message.is_trained and not message.content:
        raise InputError(
            f"{where} of the assistant has neither text nor a tool call, so training it would teach to end a turn at "
            "once; drop the message, or give it weight 0"
        )
    if message.content is None:
        raise InputError(f'content may be null only with a tool call, and {where} has none; write "" or the text')


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
        if trajectory.images:
            raise InputError("images stand at tokens, and messages were given; render them first")
        return
    if tokens.ndim != 1 or tokens.size == 0:
        raise InputError(f"tokens must hold at least one token id, got shape {tokens.shape}; drop the trajectory")
    if int(tokens.min()) < 0:
        raise InputError(f"token ids lie in [0, {MAX_TOKEN_ID}], got {int(tokens.min())}; correct tokens")
    for name in _PER_TOKEN:
        values = getattr(trajectory, name)
        if values is not None and values.shape != tokens.shape:
            raise InputError(f"{name} has one entry per token, got {values.size} for {tokens.size}; align them")
        if values is not None and name != "loss_mask" and not np.isfinite(values).all():
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
    check_image_positions(trajectory.images, tokens)
    for number, one in enumerate(trajectory.images):
        if trajectory.loss_mask is None or trajectory.loss_mask[one.start : one.stop].any():
            raise InputError(
                f"tokens {one.start} to {one.stop - 1} are image {number}, and the loss would train them: a model is "
                "never trained to write images; give a loss_mask that is False there"
            )
    if trajectory.images and trajectory.routed_experts is not None:
        raise InputError("routed_experts are replayed for text, and the trajectory has images; drop routed_experts")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RenderedTrajectory:
    """A trajectory as tokens, ready for merging and training.

    Fields that a `Trajectory` has too mean the same here.

    Example: tokens `[5, 6, 7, 8]` with mask `[0, 0, 1, 1]` have `num_prompt_tokens` 2 and `turn_ends` `[4]`.
    """

    task_id: TaskId
    tokens: TokenIds
    """int32 [T], T >= 1."""
    loss_mask: LossMask
    turn_ends: npt.NDArray[np.int32]
    """int32 [turns], ascending: index after the last trained token of each assistant turn."""
    index: int = 0
    """Index of the source trajectory among those rendered together; a rewritten chat has several rendered ones."""
    reward: float | None = None
    advantage: float | None = None
    epoch: int | None = None
    step: int | None = None
    advantages: npt.NDArray[np.float64] | None = None
    logprobs: npt.NDArray[np.float64] | None = None
    images: tuple[PlacedImage, ...] = ()
    routed_experts: npt.NDArray[np.int16] | None = None

    def __post_init__(self) -> None:
        assert self.tokens.shape == self.loss_mask.shape, "one mask entry per token"
        assert self.logprobs is None or self.logprobs.shape == self.tokens.shape, "one log-probability per token"

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens before the first trained one; all tokens if none is trained."""
        return int(self.loss_mask.argmax()) if self.loss_mask.any() else self.tokens.size


def by_task(trajectories: Iterable[RenderedTrajectory]) -> list[list[RenderedTrajectory]]:
    """Group trajectories by `task_id`, in order of first appearance.

    Example: trajectories of the tasks a, b, a form two groups: the two of a, then the one of b.
    """
    tasks: dict[TaskId, list[RenderedTrajectory]] = {}
    for trajectory in trajectories:
        tasks.setdefault(trajectory.task_id, []).append(trajectory)
    return list(tasks.values())


def cut_images(images: Sequence[PlacedImage], num_tokens: int) -> tuple[PlacedImage, ...]:
    """Return the images that are wholly within the first tokens of a sequence."""
    return tuple(placed for placed in images if placed.stop <= num_tokens)
