"""Trajectories of the token ids that calls of a model recorded, which are never rendered again."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from treering.data.formats.fields import array, is_blank
from treering.data.formats.model_calls import TokenCall, token_branches
from treering.data.formats.token_arrays import MASK_KEYS, check_masks_are_known, decode_floats, decode_mask, token_ids
from treering.data.trajectory import Trajectory
from treering.errors import InputError
from treering.types import LossMask


def token_calls(records: Sequence[object], keys: tuple[str, str, str], where: Callable[[int], str]) -> list[TokenCall]:
    """The calls of records that all have their ids; none where one has not, so that all are read as text.

    `where` names the place of a record by its number. Raises: as `token_call`.
    """
    known = [one for one in records if isinstance(one, dict) and not any(is_blank(one.get(key)) for key in keys[:2])]
    return [token_call(one, keys, where(i)) for i, one in enumerate(known)] if len(known) == len(records) else []


def token_call(record: Mapping[str, Any], keys: tuple[str, str, str], where: str = "") -> TokenCall:
    """A call from its prompt's ids, its completion's ids and its log-probabilities, under the names of `keys`.

    A mask over the completion under a name of `MASK_KEYS` leaves sampled tokens out.

    Raises:
        InputError: no ids, log-probabilities or a mask of another length, a mask that trains the prompt, or a key that
            may be a mask and whose meaning is not certain.
    """
    where = f"{where}." if where else ""
    prompt, completion = (token_ids(record.get(key), f"{where}{key}") for key in keys[:2])
    logprobs = None if is_blank(record.get(keys[2])) else decode_floats(record, keys[2])
    if not completion.size:
        raise InputError(f"{where}{keys[1]} must hold the ids of the call, got []; drop the record")
    if logprobs is not None and logprobs.size != completion.size:
        raise InputError(
            f"{where}{keys[2]} has one entry per sampled token: {completion.size} tokens, {logprobs.size} entries; "
            "align them"
        )
    return TokenCall(
        prompt=prompt, completion=completion, logprobs=logprobs, mask=_mask(record, completion.size, where)
    )


def _mask(record: Mapping[str, Any], size: int, where: str) -> LossMask | None:
    if any(array(f"{where}prompt_mask", record.get("prompt_mask") or [])):
        raise InputError(f"{where}prompt_mask trains what the call was shown; give 0 for each token of the prompt")
    check_masks_are_known(record, but=(*MASK_KEYS, "prompt_mask"))
    masks = {key: decode_mask(record[key], f"{where}{key}") for key in MASK_KEYS if not is_blank(record.get(key))}
    for key, mask in masks.items():
        if mask.size != size:
            raise InputError(
                f"{where}{key} has one entry per sampled token: {size} tokens, {mask.size} entries; align it"
            )
    if len({mask.tobytes() for mask in masks.values()}) > 1:
        raise InputError(f"{where}{' and '.join(masks)} are different masks; keep one of them")
    return next(iter(masks.values()), None)


def token_trajectories(calls: Sequence[TokenCall], **known: Any) -> list[Trajectory]:
    """One trajectory per branch of the calls; `known` are further fields of each."""
    return [
        Trajectory(
            tokens=branch.tokens,
            loss_mask=branch.loss_mask,
            logprobs=branch.logprobs,
            **known,
        )
        for branch in token_branches(calls)
    ]
