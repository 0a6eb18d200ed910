"""Rollouts of verifiers: traces of v1, one run of an agent or an episode of several, and rows of v0's `results.jsonl`.

The fields are those of `Trace`, `MessageNode` and `Episode` in verifiers 0.4, and of `RolloutOutput` and
`state_to_output` in verifiers 0.1. The package need not be installed.
"""

import hashlib
import json
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from treering.data.agent_trace import AgentTrace, Reason, TraceNode
from treering.data.formats.adapters.trl_rows import prompt_and_completion
from treering.data.formats.chat_messages import nested_tools
from treering.data.formats.codec import check_readable, decode_task_id
from treering.data.formats.containers import read_records
from treering.data.formats.json_fields import (
    array,
    decode_floats,
    integer_field,
    is_blank,
    number_field,
    object_in,
    parsed,
    placed,
    show,
    token_ids,
)
from treering.data.formats.model_calls import ids_or_text, token_calls, token_trajectories
from treering.data.formats.record_files import write_lines
from treering.data.formats.record_format import NO_ANSWER, Note, RecordFormat, task_of
from treering.data.trajectory import RAW_FORMAT, TaskId, Trajectory
from treering.errors import DataWarning, InputError, plural
from treering.types import LossMask

_NODE_KEYS = {"parent", "token_ids", "mask", "sampled", "semantic_parents"}


def looks_like_trace(record: object) -> bool:
    """Return whether a JSON value is a trace of verifiers v1, or an episode with traces."""
    return _is_run(record) or _is_episode(record)


def decode_traces(record: object) -> list[AgentTrace]:
    """Decode the traces of a line: one trace, or those of an episode."""
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


def decode_trace(record: object, episode: Mapping[str, Any] | None = None) -> AgentTrace:
    """Decode one run; fields that Treering does not use stay in its record.

    The episode, without its traces, gives the step, and the task if the trace has none.

    Raises:
        InputError: a bad field; the message has the node, the field, its value and the rule.

    Example: `decode_trace({"task": {"key": "a"}, "rewards": {"exact": {"score": 1, "weight": 0.5}}, "nodes":
    []}).reward` is 0.5.
    """
    if not isinstance(record, dict) or not isinstance(record.get("nodes"), list):
        raise InputError(f"a trace has a list of nodes, got {show(record)}; check the format")
    agent, work = _object(record, "agent"), _object(_object(episode or {}, "run"), "work")
    trace = AgentTrace(
        task_id=_task_id(record, episode or {}),
        nodes=tuple(_node(one, f"nodes[{i}]") for i, one in enumerate(record["nodes"])),
        is_trainable=_flag(agent, "trainable", default=True),
        # A successful retry keeps the errors of the failed attempts.
        has_failed=bool(record.get("errors")) and not _flag(record, "ok", default=False),
        reward=_reward(_object(record, "rewards")),
        step=integer_field(work, "step"),
        version=integer_field(_object(work, "policy"), "start"),
        record={**record, "nodes": None},
        episode=episode,
    )
    for i in sorted({i for path in trace.paths() for i in path}):
        with placed(f"nodes[{i}]"):
            _check_node(trace.nodes[i])
    return trace


def encode_trace(trace: AgentTrace) -> dict[str, Any]:
    """Return the JSON value of a run, without its episode, as `decode_trace` read it."""
    return {**trace.record, "nodes": [_encode_node(node) for node in trace.nodes]}


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
    # A run that failed early has no traces.
    return _is_run(record["traces"][0]) if record["traces"] else isinstance(record.get("task"), dict)


def _task_id(record: Mapping[str, Any], episode: Mapping[str, Any]) -> TaskId:
    task = _object(record, "task") or _object(episode, "task")
    for key in ("key", "hash"):
        if (found := decode_task_id(task, key)) is not None:
            return found
    if is_blank(task.get("data")):
        raise InputError(f"a trace has task.key, task.hash or task.data, got {show(task)}; name the task in task.key")
    # The hash of verifiers' Task.
    return hashlib.sha256(json.dumps(task["data"], sort_keys=True).encode()).hexdigest()


def _reward(rewards: Mapping[str, Any]) -> float | None:
    """Return the sum of score x weight; None without scores, for which verifiers has 0."""
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


def _node(record: object, where: str) -> TraceNode:
    """Decode a node; fields that Treering does not use stay in its record."""
    with placed(where):
        if not isinstance(record, dict):
            raise InputError(f"a node is a JSON object, got {show(record)}; repair it")
        logprobs, advantages = decode_floats(record, "logprobs"), decode_floats(record, "advantages")
        return TraceNode(
            parent=integer_field(record, "parent"),
            token_ids=token_ids(record.get("token_ids", []), "token_ids"),
            mask=_mask(record.get("mask", [])),
            sampled=_flag(record, "sampled", default=False),
            # verifiers writes an empty list if none were recorded.
            logprobs=None if logprobs is None or logprobs.size == 0 else logprobs,
            advantages=advantages,
            semantic_parents=_semantic_parents(record),
            record={key: None if key in _ARRAYS else value for key, value in record.items()},
        )


def _encode_node(node: TraceNode) -> dict[str, Any]:
    values = {
        "token_ids": node.token_ids.tolist(),
        "mask": node.mask.tolist(),
        "logprobs": [] if node.logprobs is None else node.logprobs.tolist(),
        "advantages": None if node.advantages is None else node.advantages.tolist(),
    }
    return dict(node.record) | {key: value for key, value in values.items() if key in node.record or value}


def _flag(record: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = record.get(key)
    if value is not None and not isinstance(value, bool):
        raise InputError(f"{key} must be true or false, got {show(value)}; correct it")
    return default if value is None else value


def _check_node(node: TraceNode) -> None:
    """Refuse images and loss weights, which would change the training of a node and are not read."""
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


_DECIMALS = 4
"""Digits of the log-probs and advantages that verifiers writes (`RECORD_FLOAT_DECIMALS`)."""


def read_traces(path: str | os.PathLike[str]) -> list[AgentTrace]:
    """Read the traces of a `traces.jsonl` of verifiers v1, or another file that `read_records` reads, in file order.

    A line is an episode, whose traces belong together, or one trace. Episodes without traces are skipped.

    Raises:
        InputError: a line is bad, as "FILE:LINE: rule, value, fix"; or the file is missing, corrupt or without traces.

    Warns:
        DataWarning: some paths are not trained, with counts and reasons; log-probs are rounded.

    Example: `[t for trace in read_traces("traces.jsonl") for t in trace.trajectories()]`.
    """
    file = Path(path)
    lines = []
    for where, record in read_records(file):
        with placed(where):
            lines.append(decode_traces(record))
    traces = [trace for found in lines for trace in found]
    if not traces:
        raise InputError(
            f"{file}: a file of traces holds at least one trace, got 0 in {plural(len(lines), 'line')}; check it"
        )
    if num_empty := sum(not found for found in lines):
        warnings.warn(
            f"{file}: {plural(num_empty, 'episode without traces is', 'episodes without traces are')} left out",
            DataWarning,
            stacklevel=2,
        )
    tally = TraceTally()
    tally.add(traces)
    for note in tally.notes():
        warnings.warn(f"{file}: {note}", DataWarning, stacklevel=2)
    return traces


def write_traces(path: str | os.PathLike[str], traces: Iterable[AgentTrace]) -> None:
    """Write a file that `read_traces` and verifiers read; compress it if its name ends in .gz.

    Traces of one episode become one line. Numbers keep all digits; verifiers itself rounds to four decimals. The write
    is atomic: an error or a kill leaves the old file.

    Raises:
        InputError: the file cannot be written.

    Example: `write_traces("copy.jsonl", read_traces("traces.jsonl"))` writes the same JSON values.
    """
    episodes: dict[int, list[AgentTrace]] = {}
    for trace in traces:
        episodes.setdefault(id(trace if trace.episode is None else trace.episode), []).append(trace)
    write_lines(Path(path), (_line(runs) for runs in episodes.values()))


class TraceTally:
    """Counts of untrained paths by reason, and a check for rounded log-probs."""

    def __init__(self) -> None:
        self._left_out: Counter[Reason] = Counter()
        self._num_trained = 0
        self._are_rounded = True
        self._any_nonzero = False

    def add(self, traces: Iterable[AgentTrace]) -> None:
        """Count more traces of the same source."""
        for trace in traces:
            self._left_out += trace.left_out()
            self._num_trained += trace.num_trajectories
            # Every log-prob of a trained path is a multiple of 1e-4, and not all are 0.
            for i in {i for path in trace.paths() for i in path} if self._are_rounded else ():
                logprobs = trace.nodes[i].logprobs
                if logprobs is not None:
                    self._are_rounded &= np.array_equal(np.round(logprobs, _DECIMALS), logprobs)
                    self._any_nonzero |= bool(logprobs.any())

    def notes(self) -> list[str]:
        """Return a sentence on untrained paths and one on rounded log-probs, if there are any."""
        found = []
        if self._left_out:
            num_left_out = self._left_out.total()
            reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self._left_out.items()))
            found.append(f"{num_left_out} of {num_left_out + self._num_trained} paths are not trained ({reasons})")
        if self._are_rounded and self._any_nonzero:
            found.append(
                f"log-probs are rounded to {_DECIMALS} decimals, so the ratio of a token is off by up to 5e-5, and a "
                "product of T ratios by T times that; for exact ratios recompute them with treering.forward before "
                "the first update"
            )
        return found


def _line(runs: Sequence[AgentTrace]) -> bytes:
    records = [encode_trace(trace) for trace in runs]
    episode = runs[0].episode
    # ASCII escapes can hold lone surrogates, which a model may write and UTF-8 cannot encode.
    return json.dumps(records[0] if episode is None else {**episode, "traces": records}).encode() + b"\n"


_TOOLS = ("tools", "tool_defs", "oai_tools")
_IDS = ("prompt_ids", "completion_ids", "completion_logprobs")


def decode_verifiers(record: Mapping[str, Any], note: Note) -> list[Trajectory]:
    """Decode the traces of a line, or the rollout of a row, as token ids if its `trajectory` has them."""
    if looks_like_trace(record):
        traces = decode_traces(record)
        note.tallies.setdefault(TraceTally, TraceTally()).add(traces)
        return [trajectory for trace in traces for trajectory in trace.trajectories()]
    return ids_or_text(record, note, _decode_row)


def _decode_row(record: Mapping[str, Any], note: Note) -> list[Trajectory]:
    check_readable(record, but=_TOOLS)
    if is_blank(record.get("completion")):
        note(NO_ANSWER)
        return []
    steps = record.get("trajectory")
    given = steps if isinstance(steps, list) else []
    recorded = [step.get("tokens") if isinstance(step, dict) else None for step in given]
    calls = token_calls(recorded, _IDS, lambda i: f"trajectory[{i}].tokens")
    chats = {key: _parsed_calls(record.get(key), key) for key in ("prompt", "completion")}
    text_format, prompt, completion = prompt_and_completion({**record, **chats})
    messages = (*prompt, *completion)
    known: dict[str, Any] = {
        "task_id": task_of(record, note, messages=messages),
        "reward": number_field(record, "reward"),
    }
    if calls:
        return token_trajectories(calls, **known)
    tools = () if text_format == RAW_FORMAT else _tools(record)
    return [Trajectory(messages=messages, tools=tools, format=text_format, **known)]


def _tools(record: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    for source in (record, object_in(record, "info")):
        for key in _TOOLS:
            if not is_blank(source.get(key)):
                return nested_tools(source[key], key)
    return ()


def _parsed_calls(messages: object, key: str) -> object:
    if not isinstance(messages, list):
        return messages
    found = []
    for i, message in enumerate(messages):
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        if isinstance(calls, list) and any(isinstance(call, str) for call in calls):
            message = {**message, "tool_calls": [parsed(call, f"{key}[{i}].tool_calls") for call in calls]}
        found.append(message)
    return found


def _is_row(record: Mapping[str, Any], filled: Set[str]) -> bool:
    keys = record.keys()
    return keys >= {"prompt", "completion"} and ("example_id" in filled or keys >= {"reward", "task"})


FORMATS = (
    RecordFormat(
        name="verifiers",
        decode=decode_verifiers,
        keys=(("prompt", "completion", "example_id", "reward"), ("prompt", "completion")),
        signs=((20, lambda record, filled: looks_like_trace(record)), (81, _is_row)),
        has_traces=looks_like_trace,
    ),
)
