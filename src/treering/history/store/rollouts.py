"""Rollouts of one prompt and version, checked and joined into one text, with a reward each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from treering.arrays import Float32Array, Int32Array
from treering.errors import InputError
from treering.history.store.prompt_index import as_text
from treering.types import MAX_TOKEN_ID, PromptId, TokenIds, is_count

RolloutKey: TypeAlias = tuple[PromptId, int]
"""(prompt_id, version)."""

_MAX_VERSION = int(np.iinfo(np.int32).max)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollouts:
    """Rollouts of one prompt and version, in the order in which they were added.

    Attributes:
        text: int32, for each rollout a marker (-1) and its tokens.
        rewards: float32, one per rollout; NaN if unknown.

    Example: [5, 6] with reward 1 and [7] with unknown reward give the text [-1, 5, 6, -1, 7] and rewards [1, nan].
    """

    text: Int32Array
    rewards: Float32Array

    @classmethod
    def of(cls, prompt_id: PromptId, rollouts: Sequence[TokenIds], rewards: Sequence[float] | None) -> "Rollouts":
        """Checked copies; rollouts without tokens are left out, with their rewards.

        Raises:
            InputError: a rollout or the rewards break a rule of `HistoryStore.add`.
        """
        checked = [_as_token_ids(prompt_id, i, rollout) for i, rollout in enumerate(_each(prompt_id, rollouts))]
        known = _as_rewards(prompt_id, len(checked), rewards)
        kept = np.array([tokens.size > 0 for tokens in checked], bool)
        return cls(text=as_text(tokens for tokens in checked if tokens.size), rewards=known[kept])

    @classmethod
    def joined(cls, parts: Sequence["Rollouts"]) -> "Rollouts":
        """The parts joined in order."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            text=np.concatenate([part.text for part in parts]), rewards=np.concatenate([part.rewards for part in parts])
        )


def key_of(prompt_id: object, version: object) -> RolloutKey:
    """The checked pair.

    Raises:
        InputError: the prompt_id is no string or integer, or the version no integer in [0, 2**31).
    """
    if isinstance(prompt_id, np.integer):
        prompt_id = int(prompt_id)
    if not isinstance(prompt_id, str | int) or isinstance(prompt_id, bool):
        raise InputError(f"a prompt_id is a string or an integer, got {prompt_id!r}; convert it")
    if not is_count(version, least=0) or version > _MAX_VERSION:
        raise InputError(f"a policy version is an integer in [0, {_MAX_VERSION}], got {version!r}; correct it")
    return str(prompt_id) if isinstance(prompt_id, str) else prompt_id, int(version)


def _each(prompt_id: PromptId, rollouts: object) -> Iterable[object]:
    if not isinstance(rollouts, Iterable) or isinstance(rollouts, str | bytes):
        raise InputError(
            f"rollouts of {prompt_id!r} are a list with the token ids of each, got {rollouts!r}; write [tokens] for one"
        )
    return rollouts


def _as_token_ids(prompt_id: PromptId, i: int, rollout: object) -> Int32Array:
    try:
        # An engine's rollouts have more fields than their token ids.
        tokens = np.asarray(getattr(rollout, "tokens", rollout))
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
    try:
        given = np.asarray(rewards)
    except ValueError as error:
        raise InputError(
            f"a rollout has one reward, got {rewards!r} for {prompt_id!r}; give one number each"
        ) from error
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
