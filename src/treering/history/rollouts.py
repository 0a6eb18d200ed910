"""Rollouts of one prompt and version as the store takes them in: checked, as one text, with a reward each.

Knows what a rollout may be. Knows nothing of other versions, of indexes and of files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from treering.errors import InputError
from treering.history.index import Float32Array, Int32Array, as_text
from treering.types import MAX_TOKEN_ID, PromptId, TokenIds

RolloutKey: TypeAlias = tuple[PromptId, int]
"""(prompt_id, version)."""

_MAX_VERSION = int(np.iinfo(np.int32).max)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollouts:
    """Rollouts of one prompt and version, in the order in which they were added.

    Attributes:
        text: int32, for each rollout a marker (-1) and its tokens.
        rewards: float32, one per rollout; NaN where it is not known.

    Example: [5, 6] with reward 1 and [7] of unknown reward are the text [-1, 5, 6, -1, 7] and the rewards [1, nan].
    """

    text: Int32Array
    rewards: Float32Array

    @classmethod
    def of(cls, prompt_id: PromptId, rollouts: Sequence[TokenIds], rewards: Sequence[float] | None) -> "Rollouts":
        """Checked copies; rollouts without tokens are left out, with their rewards.

        Raises:
            InputError: a rollout or the rewards break a rule of `HistoryStore.add`.
        """
        checked = [_as_token_ids(prompt_id, i, rollout) for i, rollout in enumerate(rollouts)]
        known = _as_rewards(prompt_id, len(checked), rewards)
        kept = np.array([tokens.size > 0 for tokens in checked], bool)
        return cls(text=as_text(tokens for tokens in checked if tokens.size), rewards=known[kept])

    @classmethod
    def joined(cls, parts: Sequence["Rollouts"]) -> "Rollouts":
        """All of them, one after another."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            text=np.concatenate([part.text for part in parts]), rewards=np.concatenate([part.rewards for part in parts])
        )


def key_of(prompt_id: PromptId, version: int) -> RolloutKey:
    """The pair, checked.

    Raises:
        InputError: no string or integer, or no integer in [0, 2**31).
    """
    if type(prompt_id) not in (str, int):
        raise InputError(f"a prompt_id is a string or an integer, got {prompt_id!r}; convert it")
    is_integer = isinstance(version, int | np.integer) and not isinstance(version, bool)
    if not is_integer or not 0 <= version <= _MAX_VERSION:
        raise InputError(f"a policy version is an integer in [0, {_MAX_VERSION}], got {version!r}; correct it")
    return prompt_id, int(version)


def _as_token_ids(prompt_id: PromptId, i: int, rollout: TokenIds) -> Int32Array:
    try:
        tokens = np.asarray(rollout)
    except ValueError as error:
        raise InputError(
            f"rollout {i} of {prompt_id!r} is ragged ({error}); give one list of token ids each"
        ) from error
    if tokens.ndim == 1 and tokens.size == 0:
        return np.empty(0, np.int32)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InputError(
            f"a rollout is one dimension of integer token ids, got {tokens.dtype} of shape {tokens.shape} as rollout "
            f"{i} of {prompt_id!r}; pass its token ids alone"
        )
    if int(tokens.min()) < 0 or int(tokens.max()) > MAX_TOKEN_ID:
        raise InputError(
            f"token ids lie in [0, {MAX_TOKEN_ID}], got {tokens.min()}..{tokens.max()} in rollout {i} of "
            f"{prompt_id!r}; take padding out"
        )
    return tokens.astype(np.int32, copy=False)


def _as_rewards(prompt_id: PromptId, num_rollouts: int, rewards: Sequence[float] | None) -> Float32Array:
    if rewards is None:
        return np.full(num_rollouts, np.nan, np.float32)
    given = np.asarray(rewards)
    if given.shape != (num_rollouts,) or (given.size and given.dtype.kind not in "iuf"):
        raise InputError(
            f"rewards are one number for each of the {num_rollouts} rollouts of {prompt_id!r}, got {given.dtype} of "
            f"shape {given.shape}; give one float each, or None"
        )
    if not (np.abs(given) <= np.finfo(np.float32).max).all():
        raise InputError(
            f"rewards are finite numbers that float32 can hold, got {given.tolist()} for {prompt_id!r}; "
            "leave rewards out where one is not known"
        )
    return given.astype(np.float32)
