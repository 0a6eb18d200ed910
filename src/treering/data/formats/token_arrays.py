"""Token ids, loss masks, log-probabilities and advantages of JSON records, under the names that trainers give them."""

import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from treering.data.formats.fields import array, is_blank, show
from treering.errors import InputError
from treering.types import MAX_TOKEN_ID, LossMask, TokenIds

TOKEN_KEYS = ("tokens", "input_ids", "token_ids")
"""Names of a trajectory's token ids; all mean the same."""
MASK_KEYS = (
    *(
        "loss_mask",
        "loss_masks",
        "response_mask",
        "action_mask",
        "completion_mask",
        "assistant_mask",
        "assistant_masks",
    ),
)
"""Names of a mask with 1 where a token is trained."""
_OTHER_MASK = re.compile(r"(^|_)(masks?|weights)$")
_LENGTH = re.compile(r"(prompt|response|completion)s?_(len|lens|length|lengths)$")
# Those that say nothing on training: padding, which has a check of its own, and what a tokenizer adds.
_HARMLESS = ("attention_mask", "special_tokens_mask")
IGNORED_LABEL = -100
"""The label of a token that is not trained, as torch's cross entropy ignores it."""


def decode_tokens(record: Mapping[str, Any]) -> TokenIds | None:
    """int32 [T]: the token ids of a record; None if it has none.

    Raises:
        InputError: ids that are no integers in range, two fields that differ, or padding.

    Example: `{"input_ids": [5, 6]}` has the tokens [5, 6].
    """
    given = {key: record[key] for key in TOKEN_KEYS if record.get(key) is not None}
    if not given:
        return None
    (key, value), *others = given.items()
    for other, again in others:
        if again != value:
            raise InputError(f"{key} and {other} both hold the token ids, and they differ; keep one of them")
    tokens = token_ids(value, key)
    _check_padding(record)
    return tokens


def token_ids(value: object, key: str) -> TokenIds:
    """int32 [T]: the token ids of the field `key`.

    Raises:
        InputError: not a list of integers in range.
    """
    for i, token in enumerate(array(key, value)):
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise InputError(f"{key}[{i}] must be an integer in [0, {MAX_TOKEN_ID}], got {show(token)}; correct it")
    return np.array(value, dtype=np.int32)


def decode_loss_mask(record: Mapping[str, Any], tokens: TokenIds | None) -> LossMask | None:
    """Which tokens are trained, bool [T], from masks and labels; None if the record has neither.

    Raises:
        InputError: a mask of another length, labels that are neither -100 nor the token, two that differ, or a key that
            may be a mask and whose meaning differs between trainers.

    Example: tokens [5, 6] with the labels [-100, 6] and tokens [5, 6] with response_mask [0, 1] have the mask [0, 1].
    """
    if tokens is not None:
        check_masks_are_known(record, but=MASK_KEYS, with_lengths=True)
    masks = {key: decode_mask(record[key], key) for key in MASK_KEYS if record.get(key) is not None}
    if not is_blank(record.get("labels")):
        masks["labels"] = _mask_of_labels(record["labels"], tokens)
    if not masks:
        return None
    (key, mask), *others = masks.items()
    if tokens is not None and mask.size != tokens.size:
        raise InputError(
            f"{key} has one entry per token: {tokens.size} tokens, {mask.size} entries; align them, zeros on the prompt"
        )
    for other, again in others:
        if not np.array_equal(mask, again):
            raise InputError(f"{key} and {other} both say which tokens are trained, and they differ; keep one of them")
    return mask


def decode_floats(record: Mapping[str, Any], key: str) -> npt.NDArray[np.float64] | None:
    """float64 [T]: a field with one number per token; None if it is null or absent.

    Raises:
        InputError: not a list of numbers.
    """
    value = record.get(key)
    if value is None:
        return None
    for i, entry in enumerate(array(key, value)):
        if type(entry) not in (int, float):
            raise InputError(f"{key}[{i}] must be a number, got {show(entry)}; use 0.0 where a token is not trained")
    return np.array(value, dtype=np.float64)


def check_masks_are_known(record: Mapping[str, Any], *, but: Collection[str] = (), with_lengths: bool = False) -> None:
    """Refuses keys that may be masks, except those of `but`: what they mean differs between trainers.

    Lengths of prompt or response say what is trained where one list of ids holds both, `with_lengths`.

    Raises:
        InputError: names the key.

    Example: `{"tokens": [5, 6], "env_mask": [0, 1]}` is refused.
    """
    for key, value in record.items():
        is_mask = _OTHER_MASK.search(key.lower()) or (with_lengths and _LENGTH.search(key.lower()))
        if not is_mask or key in but or key in _HARMLESS or is_blank(value):
            continue
        raise InputError(
            f"{key} seems to say which tokens are trained, and what it means differs between trainers, got "
            f"{show(value)}; write it as loss_mask beside tokens, one entry per token with 1 where it is trained, or "
            "remove it"
        )


def decode_mask(value: object, key: str) -> LossMask:
    """Which tokens a mask trains, bool [T], from 0, 1, true or false for each.

    Raises:
        InputError: another entry, with its place.
    """
    for i, entry in enumerate(array(key, value)):
        if type(entry) not in (int, bool, float) or entry not in (0, 1):
            raise InputError(f"{key}[{i}] must be 0, 1, true or false, got {show(entry)}; correct it")
    return np.array(value, dtype=np.bool_)


def _mask_of_labels(value: object, tokens: TokenIds | None) -> LossMask:
    labels = array("labels", value)
    if tokens is None or len(labels) != tokens.size:
        size = 0 if tokens is None else tokens.size
        raise InputError(
            f"labels has one entry per token: {size} tokens, {len(labels)} entries; give tokens and align them"
        )
    for i, (label, token) in enumerate(zip(labels, tokens.tolist(), strict=True)):
        if type(label) is not int or label not in (IGNORED_LABEL, token):
            raise InputError(
                f"labels[{i}] must be {IGNORED_LABEL} or the token at its own place, {token}, got {show(label)}; "
                "give labels that are not shifted"
            )
    return np.array([label != IGNORED_LABEL for label in labels], np.bool_)


def _check_padding(record: Mapping[str, Any]) -> None:
    mask = record.get("attention_mask")
    if isinstance(mask, list) and 0 in mask:
        raise InputError(
            f"tokens hold no padding, and attention_mask is 0 at place {mask.index(0)}; cut the padding off"
        )
