"""Tasks: prompts, rewards of rollouts, and the values that a reward may return."""

import copy
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import Any, Self, TypeAlias

from treering.data.image import PlacedImage
from treering.engine.protocol import Rollout, check_images, check_prompt
from treering.errors import InputError
from treering.types import PromptId, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A reward and numbers to log with it."""

    reward: float | None
    """Finite; None abstains, and the rollout is dropped from its group."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Numbers by name; the run logs their means as "rewards/NAME"."""


RewardValue: TypeAlias = float | Mapping[str, Any] | Score | None
"""Values that a reward may return; see `as_score`."""


def as_score(value: object) -> Score:
    """Validate the value that a reward returned.

    A mapping has the reward under "reward", which may be None, and numbers under other names; None means no number.

    Raises:
        InputError: a number is not one finite number, or a name is not text.

    Example: `as_score({"reward": 1, "length": 7, "tools": None})` is `Score(reward=1.0, numbers={"length": 7.0})`.
    """
    if isinstance(value, Score):
        return value
    if not isinstance(value, Mapping) or "reward" not in value:
        return Score(reward=None if value is None else checked_reward(value))
    if not all(isinstance(name, str) and name for name in value):
        raise InputError(f"numbers returned with a reward need names, got {list(value)!r:.60}; use text as keys")
    numbers = {name: checked_reward(number) for name, number in value.items() if number is not None}
    return Score(reward=numbers.pop("reward", None), numbers=numbers)


def checked_reward(reward: object) -> float:
    """Validate a reward and return it as float: a number of any type, or an array or tensor of one element.

    Raises:
        InputError: the reward is not one finite number.

    Example: 1, True, Decimal("0.5"), np.float32(0.5) and torch.tensor([0.5]) are numbers; "1", None, [1.0], NaN and
    a tensor of two elements are refused.
    """
    number = _item(reward)
    try:
        value = float(number) if isinstance(number, Real | Decimal) else math.nan
    except (OverflowError, ValueError):
        # An integer or fraction is too large, or this is a signalling NaN.
        value = math.nan
    if not math.isfinite(value):
        raise InputError(
            f"a reward must be one finite number, an array or tensor that holds one, or None, got {reward!r:.60} "
            f"({type(reward).__name__}); return a float"
        )
    return value


def _item(reward: object) -> object:
    """Return the one element of an array or tensor of any library, and other objects as they are."""
    item = getattr(reward, "item", None)
    if not callable(item):
        return reward
    try:
        return item()
    except (ValueError, RuntimeError, TypeError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """Prompt of a group of rollouts.

    Example: `Prompt(prompt_id="17+5", tokens=np.array([1, 7, 10, 5], np.int32), answer="22")`
    """

    prompt_id: PromptId
    """Stable across epochs and machines: a dataset key, else `prompt_id_of(tokens)`."""
    tokens: TokenIds
    """int32 [P], P >= 1."""
    images: tuple[PlacedImage, ...] = ()
    """Images, each at the model's placeholders among the tokens."""
    answer: str | None = None
    """Reference answer for the reward; None if it needs none."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """All fields of the prompt in its file, by name and unchanged, for the reward to read."""
    where: str = ""
    """Place in a file, such as FILE:LINE; "" without a file."""

    def __post_init__(self) -> None:
        if self.prompt_id == "":
            raise InputError('a prompt_id must be an integer or nonempty text, got ""; name the prompt')
        check_prompt(self.prompt_id, self.tokens)
        check_images(self.prompt_id, self.images, self.tokens)

    @property
    def name(self) -> str:
        """Name in errors: the id, and the location, since the id may be a hash.

        Example: "'4f1a' (prompts.jsonl:3)".
        """
        return f"{self.prompt_id!r} ({self.where})" if self.where else repr(self.prompt_id)

    @property
    def content(self) -> bytes:
        """Tokens and image contents as bytes, equal only for equal prompts."""
        return _content(self.tokens, self.images)


def prompt_id_of(tokens: TokenIds, images: Sequence[PlacedImage] = ()) -> str:
    """Return the id of a prompt without a key: 32 hexadecimal digits, a hash of its token ids and images.

    Example: the prompts [5, 6] and [5, 6, 0] have different ids, the same on every machine.
    """
    return hashlib.blake2b(_content(tokens, images), digest_size=16).hexdigest()


def _content(tokens: TokenIds, images: Sequence[PlacedImage]) -> bytes:
    digests = b"".join(one.start.to_bytes(4, "little") + one.image.digest for one in images)
    return tokens.astype("<i4").tobytes() + digests


class Task(ABC):
    """Prompts with a reward for one response; several turns need an environment (`treering.rl.environments`)."""

    _prompts: Sequence[Prompt] = ()

    @property
    def prompts(self) -> Sequence[Prompt]:
        """All prompts of an epoch, in a fixed order, with distinct ids."""
        return self._prompts

    def subset(self, prompts: Sequence[Prompt]) -> Self:
        """Return the same task with some of its prompts, in their order.

        Example: `ChainedSums(64).subset(ChainedSums(64).prompts[:8])` has eight sums.
        """
        part = copy.copy(self)
        part._prompts = prompts
        assert part.prompts is prompts, "a task keeps its prompts as _prompts"
        return part

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Upper bound of the prompts' token ids; a policy needs at least this vocabulary."""

    @property
    @abstractmethod
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end a response."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end a response; the engine needs a tokenizer for them."""
        return ()

    @property
    def reward_name(self) -> str:
        """Name of the reward function in errors."""
        return f"{type(self).__module__}.{type(self).__qualname__}.reward"

    @abstractmethod
    def reward(self, prompt: Prompt, rollout: Rollout) -> RewardValue:
        """Return the reward of a finished rollout: a finite number, None to abstain, or a mapping; see `as_score`."""

    @property
    def rewards_groups(self) -> bool:
        """Whether finished rollouts wait for their group and go to `reward_group` instead of `reward`."""
        return False

    def reward_group(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Sequence[RewardValue | Exception]:
        """Return the rewards of a prompt's finished rollouts, in order of their samples.

        Rollouts without tokens are not passed. An exception in the result drops its rollout; a raised one drops all.
        """
        return [self.reward(prompt, rollout) for rollout in rollouts]
