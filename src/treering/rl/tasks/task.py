"""The task protocol: prompts and rewards."""

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from treering.data.picture import PlacedPicture
from treering.engine.request import check_pictures, check_prompt
from treering.engine.rollout import Rollout
from treering.errors import InputError
from treering.rl.tasks.score import RewardValue
from treering.types import PromptId, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """The prompt of a group of rollouts.

    Example: `Prompt(prompt_id="17+5", tokens=np.array([1, 7, 10, 5], np.int32), answer="22")`
    """

    prompt_id: PromptId
    """Stable across epochs and machines: a data set key, else `prompt_id_of(tokens)`."""
    tokens: TokenIds
    """int32 [P], P >= 1."""
    pictures: tuple[PlacedPicture, ...] = ()
    """Its pictures, at the model's own placeholders among the tokens."""
    answer: str | None = None
    """The reference answer for the reward; None if it needs none."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """What else the reward may read, by name: every field of the prompt in its file, as it stands there."""

    def __post_init__(self) -> None:
        if self.prompt_id == "":
            raise InputError('a prompt_id is an integer or text with a character, got ""; name the prompt')
        check_prompt(self.prompt_id, self.tokens)
        check_pictures(self.prompt_id, self.pictures, self.tokens)

    @property
    def content(self) -> bytes:
        """Its tokens and what its pictures show: equal only for equal prompts."""
        return _content(self.tokens, self.pictures)


def prompt_id_of(tokens: TokenIds, pictures: Sequence[PlacedPicture] = ()) -> str:
    """The id of a prompt without a key: 32 hexadecimal digits, a hash of its token ids and of what its pictures show.

    Example: the prompts [5, 6] and [5, 6, 0] have different ids, the same on every machine.
    """
    return hashlib.blake2b(_content(tokens, pictures), digest_size=16).hexdigest()


def _content(tokens: TokenIds, pictures: Sequence[PlacedPicture]) -> bytes:
    digests = b"".join(one.start.to_bytes(4, "little") + one.picture.digest for one in pictures)
    return tokens.astype("<i4").tobytes() + digests


class Task(ABC):
    """Prompts with a reward for a response; several turns are an environment's (`treering.rl.environments`)."""

    _prompts: Sequence[Prompt] = ()

    @property
    def prompts(self) -> Sequence[Prompt]:
        """All prompts of an epoch, in a fixed order, with distinct ids."""
        return self._prompts

    def subset(self, prompts: Sequence[Prompt]) -> Self:
        """The same task with some of its prompts, in their order.

        Example: `ChainedSums(64).subset(ChainedSums(64).prompts[:8])` has eight sums.
        """
        part = copy.copy(self)
        part._prompts = prompts
        assert part.prompts is prompts, "a task keeps its prompts as _prompts"
        return part

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Upper bound of the token ids of prompts; a policy needs at least this vocabulary."""

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
        """The name of the reward function in errors."""
        return f"{type(self).__module__}.{type(self).__qualname__}.reward"

    @abstractmethod
    def reward(self, prompt: Prompt, rollout: Rollout) -> RewardValue:
        """The reward of a finished rollout: a finite number, None to abstain, or either with more; see `as_score`."""

    @property
    def rewards_groups(self) -> bool:
        """Whether finished rollouts wait for their group, which `reward_group` then gets in place of `reward`."""
        return False

    def reward_group(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Sequence[RewardValue | Exception]:
        """The rewards of a prompt's finished rollouts, in order of their samples.

        Rollouts without a token are not among them. An exception in the result leaves its rollout out; one that is
        raised leaves all out.
        """
        return [self.reward(prompt, rollout) for rollout in rollouts]
