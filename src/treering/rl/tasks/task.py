"""The task protocol: prompts, observations and rewards."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np

from treering.engine.request import check_prompt
from treering.engine.rollout import Rollout
from treering.errors import InputError
from treering.types import PromptId, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """What a group of rollouts continues.

    Example: `Prompt(prompt_id="17+5", tokens=np.array([1, 7, 10, 5], np.int32), answer="22")`
    """

    prompt_id: PromptId
    """The same in every epoch and on every machine: a key of the data set, else `prompt_id_of(tokens)`."""
    tokens: TokenIds
    """int32 [P], P >= 1."""
    answer: str | None = None
    """What a reward compares with; None where it needs nothing."""

    def __post_init__(self) -> None:
        if self.prompt_id == "":
            raise InputError('a prompt_id is an integer or text with a character, got ""; name the prompt')
        check_prompt(self.prompt_id, self.tokens)


def prompt_id_of(tokens: TokenIds) -> str:
    """A name for a prompt without a key: 32 hexadecimal digits that depend on its token ids alone.

    Example: the prompts [5, 6] and [5, 6, 0] have two different names, which are the same on every machine.
    """
    return hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=16).hexdigest()


class Task(ABC):
    """Prompts with a reward. A task that answers the policy between its turns is an environment."""

    @property
    @abstractmethod
    def prompts(self) -> Sequence[Prompt]:
        """All prompts of an epoch, in a fixed order, with distinct ids."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Token ids of prompts and observations lie below it, and a policy needs at least as many."""

    @property
    @abstractmethod
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end a turn of the policy."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts that end a turn of the policy; an engine needs a tokenizer for them."""
        return ()

    @abstractmethod
    def reward(self, prompt: Prompt, rollout: Rollout) -> float:
        """What a finished rollout is worth: a finite number."""

    def observe(self, prompt: Prompt, rollout: Rollout) -> TokenIds | None:
        """The environment's answer to the latest turn, after which the policy goes on; None where the rollout is over.

        Asked only after a turn that came to its own end. A single-turn task has no answers.
        """
        return None


def checked_observation(answer: TokenIds, vocab_size: int) -> TokenIds:
    """What a task has observed, as int32 [N].

    Raises:
        InputError: anything but a flat list of token ids below `vocab_size`.

    Example: with vocab_size=9 the list [3, 8] is an observation, and [3, 9] and [[3]] are none.
    """
    tokens = np.asarray(answer)
    is_flat = tokens.ndim == 1 and (tokens.dtype.kind in "iu" or tokens.size == 0)
    if not is_flat or (tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size):
        raise InputError(f"an observation is a flat list of token ids below {vocab_size}, got {answer!r}; correct it")
    return tokens.astype(np.int32)


def checked_reward(reward: object) -> float:
    """What a task has given as a reward.

    Raises:
        InputError: anything but a finite number.

    Example: 1 and True give 1.0; "1", None and NaN are refused.
    """
    if not isinstance(reward, Real) or not math.isfinite(reward):
        raise InputError(f"a reward is a finite number, got {reward!r}; correct the reward function")
    return float(reward)
