"""Checks rollouts of one prompt and version, and joins them into one text."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np

from treering.arrays import Int32Array
from treering.errors import InputError
from treering.history.store.prompt_index import as_text
from treering.types import MAX_TOKEN_ID, PromptId, TokenIds, is_count

RolloutKey: TypeAlias = tuple[PromptId, int]
"""(prompt_id, version)."""

_MAX_VERSION = int(np.iinfo(np.int32).max)


def checked_text(prompt_id: PromptId, rollouts: Sequence[TokenIds]) -> Int32Array:
    """Rollouts as one text, copied: for each a marker (-1) and its tokens; those without tokens are left out.

    Raises:
        InputError: a rollout breaks a rule of `HistoryStore.add`.

    Example: [5, 6], [] and [7] give [-1, 5, 6, -1, 7].
    """
    checked = [_as_token_ids(prompt_id, i, rollout) for i, rollout in enumerate(_each(prompt_id, rollouts))]
    return as_text(tokens for tokens in checked if tokens.size)


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
