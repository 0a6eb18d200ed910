"""Trajectories of the token ids that calls of a model recorded, which are never rendered again."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from treering.data.formats.fields import is_blank
from treering.data.formats.model_calls import TokenCall, token_branches
from treering.data.formats.token_arrays import decode_floats, token_ids
from treering.data.trajectory import Trajectory
from treering.errors import InputError


def token_call(record: Mapping[str, Any], keys: tuple[str, str, str], where: str) -> TokenCall:
    """A call from its prompt's ids, its completion's ids and its log-probabilities, under the names of `keys`.

    Raises:
        InputError: no ids, or log-probabilities of another length.
    """
    prompt, completion = (token_ids(record.get(key), f"{where}.{key}") for key in keys[:2])
    logprobs = None if is_blank(record.get(keys[2])) else decode_floats(record, keys[2])
    if not completion.size:
        raise InputError(f"{where}.{keys[1]} must hold the ids of the call, got []; drop the record")
    if logprobs is not None and logprobs.size != completion.size:
        raise InputError(
            f"{where}.{keys[2]} has one entry per sampled token: {completion.size} tokens, {logprobs.size} entries; "
            "align them"
        )
    return TokenCall(prompt=prompt, completion=completion, logprobs=logprobs)


def token_trajectories(calls: Sequence[TokenCall], **known: Any) -> list[Trajectory]:
    """One trajectory per branch of the calls; `known` are further fields of each."""
    return [
        Trajectory(
            tokens=branch.tokens,
            loss_mask=branch.loss_mask,
            logprobs=None if branch.logprobs is None else np.asarray(branch.logprobs, np.float64),
            **known,
        )
        for branch in token_branches(calls)
    ]
