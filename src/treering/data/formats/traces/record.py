"""Traces of verifiers v1 to and from JSON values: one run of an agent, or an episode of several.

The fields are those of `Trace`, `MessageNode` and `Episode` in verifiers 0.4 (`verifiers/v1`).
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeGuard

from treering.data.formats.codec import decode_task_id
from treering.data.formats.fields import integer_field, is_blank, number_field, show
from treering.data.formats.traces.nodes import check_readable, decode_node, encode_node, flag
from treering.data.trace import Trace
from treering.data.trace_node import TraceNode
from treering.data.trajectory import TaskId
from treering.errors import InputError

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
        with _naming(f"traces[{i}]"):
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
        with _naming(f"nodes[{i}]"):
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


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Begins what is refused inside with its place."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}") from error


def _nodes(records: list[object]) -> tuple[TraceNode, ...]:
    nodes = []
    for i, record in enumerate(records):
        with _naming(f"nodes[{i}]"):
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
