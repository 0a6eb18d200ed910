"""Nodes of verifiers v1 traces to and from JSON values."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from treering.data.formats.fields import array, integer_field, is_blank, show
from treering.data.formats.token_arrays import decode_floats, token_ids
from treering.data.trace_node import TraceNode
from treering.errors import InputError
from treering.types import LossMask

_ARRAYS = ("token_ids", "mask", "logprobs", "advantages")


def decode_node(record: object) -> TraceNode:
    """Parses a node; fields that Treering has no use for stay in its record.

    Raises:
        InputError: a bad field, with its name, value and rule.

    Example: `decode_node({"parent": 0, "sampled": True, "token_ids": [3, 4], "mask": [False, True], "logprobs":
    [-0.5]}).mask` is `[False, True]`.
    """
    if not isinstance(record, dict):
        raise InputError(f"a node is a JSON object, got {show(record)}; repair it")
    logprobs, advantages = decode_floats(record, "logprobs"), decode_floats(record, "advantages")
    return TraceNode(
        parent=integer_field(record, "parent"),
        token_ids=token_ids(record.get("token_ids", []), "token_ids"),
        mask=_mask(record.get("mask", [])),
        sampled=flag(record, "sampled", default=False),
        # verifiers writes an empty list where none were recorded.
        logprobs=None if logprobs is None or logprobs.size == 0 else logprobs,
        advantages=advantages,
        semantic_parents=_semantic_parents(record),
        record={key: None if key in _ARRAYS else value for key, value in record.items()},
    )


def encode_node(node: TraceNode) -> dict[str, Any]:
    """The JSON value of a node: its record with the entries of its arrays, at the precision that they have.

    Example: encoding what `decode_node` gave is the value that it was given.
    """
    values = {
        "token_ids": node.token_ids.tolist(),
        "mask": node.mask.tolist(),
        "logprobs": [] if node.logprobs is None else node.logprobs.tolist(),
        "advantages": None if node.advantages is None else node.advantages.tolist(),
    }
    return dict(node.record) | {key: value for key, value in values.items() if key in node.record or value}


def flag(record: Mapping[str, Any], key: str, *, default: bool) -> bool:
    """A field that is true or false; the default if it is null or absent.

    Raises:
        InputError: another value.
    """
    value = record.get(key)
    if value is not None and not isinstance(value, bool):
        raise InputError(f"{key} must be true or false, got {show(value)}; correct it")
    return default if value is None else value


def check_readable(node: TraceNode) -> None:
    """Refuses what changes the training of a node and is not read: images, and weights of a loss.

    Raises:
        InputError: a node with one of them.
    """
    message = node.record.get("message")
    content = message.get("content") if isinstance(message, dict) else None
    kinds = [part.get("type") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    if "image_url" in kinds:
        raise InputError('content has a part of type "image_url", and Treering trains on text; leave the run out')
    if not is_blank(node.record.get("loss_weights")):
        raise InputError(
            f"loss_weights changes what is trained and is not read, got the streams "
            f"{show(list(node.record['loss_weights']))}; remove it, or multiply the weights into advantages"
        )


def _mask(value: object) -> LossMask:
    entries = array("mask", value)
    for i, entry in enumerate(entries):
        if entry is not True and entry is not False:
            raise InputError(f"mask[{i}] must be true or false, got {show(entry)}; correct it")
    return np.array(entries, dtype=np.bool_)


def _semantic_parents(record: Mapping[str, Any]) -> tuple[tuple[int, str], ...]:
    links = array("semantic_parents", record.get("semantic_parents") or [])
    for i, link in enumerate(links):
        is_link = isinstance(link, dict) and type(link.get("node")) is int and isinstance(link.get("type"), str)
        if not is_link:
            raise InputError(f"semantic_parents[{i}] has a node and a type, got {show(link)}; repair it")
    return tuple((link["node"], link["type"]) for link in links)
