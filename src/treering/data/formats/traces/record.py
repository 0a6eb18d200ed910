"""Traces of verifiers v1 to and from JSON values: one run of an agent, or an episode of several.

The fields are those of `Trace`, `MessageNode` and `Episode` in verifiers 0.4 (`verifiers/v1`).
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np

from treering.data.formats.codec import decode_task_id
from treering.data.formats.fields import array, integer_field, is_blank, number_field, placed, show
from treering.data.formats.token_arrays import decode_floats, token_ids
from treering.data.trace import Trace, TraceNode
from treering.data.trajectory import TaskId
from treering.errors import InputError
from treering.types import LossMask

_NODE_KEYS = {"parent", "token_ids", "mask", "sampled", "semantic_parents"}


def looks_like_trace(record: object) -> bool:
    """Whether a JSON value is a trace of verifiers v1, or an episode with traces.

    Example: `{"nodes": [{"token_ids": [5], "mask": [False]}], "task": {"key": "a"}}` is one, `{"messages": [...]}` not.
    """
    return _is_run(record) or _is_episode(record)


def decode_traces(record: object) -> list[Trace]:
    """The traces of a line: one, or those of an episode.

    Raises:
        InputError: neither, or a bad trace; the message has the trace, the node, the field and the rule.
    """
    if _is_run(record):
        return [decode_trace(record)]
    if not _is_episode(record):
        found = show(sorted(record)) if isinstance(record, dict) else show(record)
        raise InputError(f"a trace of verifiers v1 has nodes and an episode has traces, got {found}; check the format")
    episode = {**record, "traces": None}
    traces = []
    for i, run in enumerate(record["traces"]):
        with placed(f"traces[{i}]"):
            traces.append(decode_trace(run, episode))
    return traces


def decode_trace(record: object, episode: Mapping[str, Any] | None = None) -> Trace:
    """Parses one run; fields that Treering has no use for stay in its record.

    Args:
        record: a trace of verifiers v1.
        episode: the episode that it belongs to, without its traces: gives the step, and the task where the trace has
            none.

    Raises:
        InputError: a bad field; the message has the node, the field, its value and the rule.

    Example: `decode_trace({"task": {"key": "a"}, "rewards": {"exact": {"score": 1, "weight": 0.5}}, "nodes":
    []}).reward` is 0.5.
    """
    if not isinstance(record, dict) or not isinstance(record.get("nodes"), list):
        raise InputError(f"a trace has a list of nodes, got {show(record)}; check the format")
    agent, work = _object(record, "agent"), _object(_object(episode or {}, "run"), "work")
    trace = Trace(
        task_id=_task_id(record, episode or {}),
        nodes=_nodes(record["nodes"]),
        is_trainable=flag(agent, "trainable", default=True),
        # An attempt that was repeated with success leaves its errors behind.
        has_failed=bool(record.get("errors")) and not flag(record, "ok", default=False),
        reward=_reward(_object(record, "rewards")),
        step=integer_field(work, "step"),
        version=integer_field(_object(work, "policy"), "start"),
        record={**record, "nodes": None},
        episode=episode,
    )
    for i in sorted({i for path in trace.paths() for i in path}):
        with placed(f"nodes[{i}]"):
            check_readable(trace.nodes[i])
    return trace


def encode_trace(trace: Trace) -> dict[str, Any]:
    """The JSON value of a run, without its episode.

    Example: encoding what `decode_trace` gave is the value that it was given.
    """
    return {**trace.record, "nodes": [encode_node(node) for node in trace.nodes]}


def _is_run(record: object) -> TypeGuard[dict[str, Any]]:
    if not isinstance(record, dict) or not isinstance(record.get("nodes"), list):
        return False
    nodes = record["nodes"]
    if not nodes:
        return isinstance(record.get("task"), dict)
    return isinstance(nodes[0], dict) and not _NODE_KEYS.isdisjoint(nodes[0])


def _is_episode(record: object) -> TypeGuard[dict[str, Any]]:
    if not isinstance(record, dict) or not isinstance(record.get("traces"), list):
        return False
    # A run that failed early has no trace.
    return _is_run(record["traces"][0]) if record["traces"] else isinstance(record.get("task"), dict)


def _nodes(records: list[object]) -> tuple[TraceNode, ...]:
    nodes = []
    for i, record in enumerate(records):
        with placed(f"nodes[{i}]"):
            nodes.append(decode_node(record))
    return tuple(nodes)


def _task_id(record: Mapping[str, Any], episode: Mapping[str, Any]) -> TaskId:
    task = _object(record, "task") or _object(episode, "task")
    for key in ("key", "hash"):
        if (found := decode_task_id(task, key)) is not None:
            return found
    if is_blank(task.get("data")):
        raise InputError(f"a trace has task.key, task.hash or task.data, got {show(task)}; name the task in task.key")
    # The hash of verifiers' Task: of the data as a line has them.
    return hashlib.sha256(json.dumps(task["data"], sort_keys=True).encode()).hexdigest()


def _reward(rewards: Mapping[str, Any]) -> float | None:
    """The sum of score x weight over what was scored; None, where verifiers says 0, if nothing was."""
    values = []
    for name in rewards:
        reward = _object(rewards, name)
        if not reward:
            continue
        score, weight = number_field(reward, "score"), number_field(reward, "weight")
        if score is None:
            raise InputError(f"rewards.{name} has a score and a weight, got {show(reward)}; add the score")
        values.append(score * (1.0 if weight is None else weight))
    return sum(values) if values else None


def _object(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = record.get(key)
    if value is not None and not isinstance(value, dict):
        raise InputError(f"{key} must be a JSON object, got {show(value)}; correct it or drop it")
    return value or {}


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
