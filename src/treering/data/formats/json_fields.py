"""Typed fields of JSON records, with errors that name the field, its value and the rule; and per-token arrays.

Token ids, loss masks, log-probabilities and advantages are found under the names that trainers use.
"""

import json
import re
from collections.abc import Collection, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from treering.data.routed_experts import as_routes
from treering.data.trajectory import valid_text
from treering.errors import InputError
from treering.types import MAX_TOKEN_ID, LossMask, TokenIds


def text_field(record: Mapping[str, Any], key: str, where: str | None = None) -> str | None:
    """Return the text of a field, None if it is null or absent; `where` names it in errors."""
    value = record.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        raise InputError(f"{where or key} must be text, got {show(value)}; quote it or drop it")
    return valid_text(value, where or key)


def integer_field(record: Mapping[str, Any], key: str) -> int | None:
    """Return the whole number of a field, None if it is null or absent; 3.0 counts as 3."""
    value = record.get(key)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if value is not None and type(value) is not int:
        raise InputError(f"{key} must be an integer, got {show(value)}; correct it or drop it")
    return value


def number_field(record: Mapping[str, Any], key: str) -> float | None:
    """Return the number of a field as float, None if it is null or absent."""
    value = record.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{key} must be a number, got {show(value)}; correct it or drop it")
    return float(value)


@contextmanager
def placed(where: str) -> Iterator[None]:
    """Begin the block's InputErrors with a location, unless it is "" or the error has it already.

    Raises:
        InputError: the error of the block; also for a value that is nested too deeply or a number that is too large.
    """
    try:
        yield
    except InputError as error:
        if not where or str(error).startswith(f"{where}: "):
            raise
        raise InputError(f"{where}: {error}") from error
    except (RecursionError, OverflowError) as error:
        raise InputError(f"{where}: a record that cannot be read ({error}); repair it") from error


def parsed(value: object, where: str) -> Any:
    """Return the value of a JSON text, in which tables and some tools store lists and objects; else the value."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} must be JSON where it is text, got {show(value)} ({error}); repair it") from error


def array(name: str, value: object) -> list[Any]:
    """Check that a value is a list and return it."""
    if not isinstance(value, list):
        raise InputError(f"{name} must be a list, got {show(value)}; wrap it in one")
    return value


def checked_object(name: str, value: object, *, fields: str) -> dict[str, Any]:
    """Check that a value is an object and return it; errors say that it has `fields`."""
    if not isinstance(value, dict):
        raise InputError(f"{name} must be an object with {fields}, got {show(value)}; repair it")
    return value


def object_in(record: object, key: str) -> Mapping[str, Any]:
    """Return the object under a key of a record; {} if the record or the value is not an object."""
    value = record.get(key) if isinstance(record, dict) else None
    return value if isinstance(value, dict) else {}


def is_blank(value: object) -> bool:
    """Return whether a value is null, or an empty text, list or object.

    Example: None, "", [] and {} are blank; False and 0 are not.
    """
    return value is None or (isinstance(value, str | list | dict) and not value)


def filled(record: Mapping[str, Any], keys: Container[str]) -> list[str]:
    """Return the keys of a record that are in `keys` and have values that are not blank, in the record's order."""
    return [key for key, value in record.items() if key in keys and not is_blank(value)]


def show(value: object) -> str:
    """Return the repr of a value for an error message, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


TOKEN_KEYS = ("tokens", "input_ids", "token_ids")
"""Names of a trajectory's token ids."""
MASK_KEYS = (
    "loss_mask",
    "loss_masks",
    "response_mask",
    "action_mask",
    "completion_mask",
    "assistant_mask",
    "assistant_masks",
)
"""Names of a mask with 1 where a token is trained."""
_OTHER_MASK = re.compile(r"(^|_)(masks?|weights)$")
_LENGTH = re.compile(r"(prompt|response|completion)s?_(len|lens|length|lengths)$")
# These masks are not about training: padding has its own check, and the other one marks added tokens.
_HARMLESS = ("attention_mask", "special_tokens_mask")
_SAMPLED = "(completion|response|output|generated|generation|answer|sampled|rollout|action)"
PROMPT_IDS = re.compile("prompt(input)?(token)?(ids|tokens)")
"""Names of the prompt ids of a call, as `plain_key` writes them."""
SAMPLED_IDS = re.compile(f"{_SAMPLED}(token)?(ids|tokens)")
"""Names of the sampled ids of a call, as `plain_key` writes them."""
_OTHER_IDS = re.compile("(input|context|query|chosen|rejected|all|full|sequence)?(input)?((token)?ids|tokens)")
_LOGPROBS = re.compile(f"{_SAMPLED}?(token)?(logprobs|logps)")
IGNORED_LABEL = -100
"""The label of a token that is not trained, as torch's cross entropy ignores it."""


def plain_key(key: str) -> str:
    """Return the letters of a key, in lower case.

    Example: "promptTokenIds" and "prompt_token_ids" are both "prompttokenids".
    """
    return re.sub("[^a-z]", "", key.lower())


def are_ids(key: str, value: object) -> bool:
    """Return whether a field holds the token ids of a call or of a sequence, by its name and value.

    Example: `"completion_tokens": [7, 8]` does; `"completion_tokens": 2`, a count, does not.
    """
    if not any(pattern.fullmatch(plain_key(key)) for pattern in (PROMPT_IDS, SAMPLED_IDS, _OTHER_IDS)):
        return False
    if isinstance(value, dict):
        return any(are_ids(name, inner) for name, inner in value.items())
    # Tables may turn integers into floats, and lists into text.
    if isinstance(value, str):
        return value.lstrip().startswith("[") and any(letter.isdigit() for letter in value)
    return isinstance(value, list) and bool(value) and all(type(one) in (int, float, list) for one in value)


def are_logprobs(key: str, value: object) -> bool:
    """Return whether a field holds a log-prob for each sampled token, by its name and value."""
    is_named = _LOGPROBS.fullmatch(plain_key(key)) is not None
    return is_named and isinstance(value, list) and bool(value) and all(type(one) in (int, float) for one in value)


def decode_tokens(record: Mapping[str, Any]) -> TokenIds | None:
    """Return the token ids of a record, int32 [T]; None if it has none."""
    given = {key: record[key] for key in TOKEN_KEYS if record.get(key) is not None}
    if not given:
        return None
    (key, value), *others = given.items()
    for other, again in others:
        if again != value:
            raise InputError(f"{key} and {other} both hold the token ids, and they differ; keep one of them")
    tokens = token_ids(value, key)
    mask = record.get("attention_mask")
    if isinstance(mask, list) and 0 in mask:
        raise InputError(
            f"tokens hold no padding, and attention_mask is 0 at index {mask.index(0)}; cut the padding off"
        )
    return tokens


def token_ids(value: object, key: str) -> TokenIds:
    """Return token ids as int32 [T]; `key` names the field in errors."""
    for i, token in enumerate(array(key, value)):
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise InputError(f"{key}[{i}] must be an integer in [0, {MAX_TOKEN_ID}], got {show(token)}; correct it")
    return np.array(value, dtype=np.int32)


def decode_loss_mask(record: Mapping[str, Any], tokens: TokenIds | None) -> LossMask | None:
    """Return the mask of trained tokens, bool [T], from masks and labels; None if the record has neither.

    Raises:
        InputError: a mask has another length, a label is neither -100 nor the token, two masks differ, or a key may be
            a mask whose meaning differs between trainers.

    Example: tokens [5, 6] with the labels [-100, 6] and tokens [5, 6] with response_mask [0, 1] have the mask [0, 1].
    """
    if tokens is not None:
        check_masks_are_known(record, but=MASK_KEYS, with_lengths=True)
    masks = {key: decode_mask(record[key], key) for key in MASK_KEYS if record.get(key) is not None}
    if not is_blank(record.get("labels")):
        masks["labels"] = _mask_of_labels(record["labels"], tokens)
    return the_mask(masks, None if tokens is None else tokens.size)


def the_mask(masks: Mapping[str, LossMask], size: int | None, per: str = "token") -> LossMask | None:
    """Return the mask that is given under one or several names; None if there is none.

    Raises:
        InputError: a mask has another size, or two masks differ.
    """
    for key, mask in masks.items():
        if size is not None:
            check_size(mask, size, key, per)
    if len({mask.tobytes() for mask in masks.values()}) > 1:
        raise InputError(f"{' and '.join(masks)} say which tokens are trained, and they differ; keep one of them")
    return next(iter(masks.values()), None)


def check_size(values: npt.NDArray[Any], size: int, key: str, per: str = "token") -> None:
    """Check that a field has one entry per token."""
    if values.size != size:
        raise InputError(f"{key} has one entry per {per}, got {values.size} for {size}; align them")


def decode_floats(record: Mapping[str, Any], key: str) -> npt.NDArray[np.float64] | None:
    """Return a field with one number per token as float64 [T]; None if it is null or absent."""
    value = record.get(key)
    if value is None:
        return None
    for i, entry in enumerate(array(key, value)):
        if type(entry) not in (int, float):
            raise InputError(f"{key}[{i}] must be a number, got {show(entry)}; use 0.0 where a token is not trained")
    return np.array(value, dtype=np.float64)


def decode_routes(record: Mapping[str, Any], tokens: TokenIds | None) -> npt.NDArray[np.int16] | None:
    """Return the experts that each token of a record with `routed_experts` was routed to; see `as_routes`."""
    if tokens is None:
        raise InputError("routed_experts has one entry per token and messages were given; give tokens instead")
    try:
        routes = np.array(array("routed_experts", record["routed_experts"]))
    except ValueError as error:
        raise InputError(f"routed_experts must be lists of equal lengths, and {error}; write one per token") from error
    return as_routes(routes, tokens.size)


def check_masks_are_known(record: Mapping[str, Any], *, but: Collection[str] = (), with_lengths: bool = False) -> None:
    """Refuse keys that may be masks and whose meaning differs between trainers, except the keys in `but`.

    `with_lengths` also refuses lengths of prompt or response, which split a list of ids that holds both.

    Raises:
        InputError: the record has such a key.

    Example: `{"tokens": [5, 6], "env_mask": [0, 1]}` is refused.
    """
    for key, value in record.items():
        is_mask = _OTHER_MASK.search(key.lower()) or (with_lengths and _LENGTH.search(key.lower()))
        if not is_mask or key in but or key in _HARMLESS or is_blank(value):
            continue
        raise InputError(
            f"{key} seems to say which tokens are trained, and what it means differs between trainers, got "
            f"{show(value)}; write it as loss_mask next to tokens, one entry per token with 1 where it is trained, or "
            "remove it"
        )


def decode_mask(value: object, key: str) -> LossMask:
    """Return a mask, bool [T], from a list of 0, 1, true or false."""
    for i, entry in enumerate(array(key, value)):
        if type(entry) not in (int, bool, float) or entry not in (0, 1):
            raise InputError(f"{key}[{i}] must be 0, 1, true or false, got {show(entry)}; correct it")
    return np.array(value, dtype=np.bool_)


def _mask_of_labels(value: object, tokens: TokenIds | None) -> LossMask:
    labels = array("labels", value)
    if tokens is None or len(labels) != tokens.size:
        size = 0 if tokens is None else tokens.size
        raise InputError(f"labels has one entry per token, got {len(labels)} for {size}; give tokens and align them")
    for i, (label, token) in enumerate(zip(labels, tokens.tolist(), strict=True)):
        if type(label) is not int or label not in (IGNORED_LABEL, token):
            raise InputError(
                f"labels[{i}] must be {IGNORED_LABEL} or the token at its own position, {token}, got {show(label)}; "
                "give labels that are not shifted"
            )
    return np.array([label != IGNORED_LABEL for label in labels], np.bool_)
