"""Which format a record has, by its keys, and what is said of a record that has none."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from treering.data.formats.fields import is_blank, show
from treering.data.formats.traces import looks_like_trace
from treering.errors import InputError

FormatName: TypeAlias = Literal[
    "auto",
    "treering",
    "chat",
    "sharegpt",
    "trl",
    "verifiers",
    "swe_agent",
    "openhands",
    "nemo_gym",
    "verl",
    "atif",
    "prime_rl",
    "skyrl",
    "nemo_rl",
    "art",
    "rllm",
]
"""A format of records; "auto" finds it from the keys."""

NEEDED: Mapping[str, tuple[tuple[str, ...], ...]] = MappingProxyType(
    {
        "treering": (("task_id", "messages"), ("task_id", "tokens"), ("messages",), ("tokens",)),
        "chat": (("messages",),),
        "sharegpt": (("conversations",),),
        "trl": (("prompt", "completion"), ("prompt", "chosen", "rejected"), ("chosen", "rejected"), ("messages",)),
        "verifiers": (("prompt", "completion", "example_id", "reward"), ("prompt", "completion")),
        "swe_agent": (
            ("history", "trajectory", "info"),
            ("history",),
            ("attempts",),
            ("messages", "trajectory_format"),
        ),
        "openhands": (
            *(("instance_id", "history"), ("history",), ("events",), ("trajectory",), ("messages",)),
            ("messages", "response"),
        ),
        "nemo_gym": (("responses_create_params", "response"),),
        "verl": (("input", "output", "score"), ("input", "output")),
        "atif": (("schema_version", "agent", "steps"), ("steps",)),
        "prime_rl": (("prompt_ids", "completion_ids"),),
        "skyrl": (("prompt_token_ids", "response_ids"),),
        "nemo_rl": (("message_log",),),
        "art": (("messages_and_choices",),),
        "rllm": (("trajectories",),),
    }
)
"""Keys of a record of each format: one of the groups, of which the first is the whole one."""

_TRAINERS: tuple[FormatName, ...] = ("prime_rl", "skyrl", "nemo_rl", "art")
"""Formats whose keys no other has."""
_TOKENS = ("tokens", "input_ids", "token_ids")
_OTHER: tuple[tuple[frozenset[str], str], ...] = (
    (
        frozenset({"instruction", "output"}),
        "it is Alpaca's; write instruction and input as prompt, output as completion",
    ),
    (frozenset({"role", "content"}), 'it is one message; write a conversation as {"messages": [...]} in one record'),
    (frozenset({"from", "value"}), 'it is one turn; write a conversation as {"conversations": [...]} in one record'),
    (frozenset({"source", "action"}), 'it is one event of OpenHands; write a run as {"history": [...]} in one record'),
    (frozenset({"source", "observation"}), 'it is one event of OpenHands; write a run as {"history": [...]}'),
    (frozenset({"type", "function"}), "it is the schema of a tool; give it as one of the tools of a trajectory"),
    (frozenset({"text"}), "it is a text in which nothing says what the policy wrote; give prompt and completion"),
    (frozenset({"question"}), "it is of a prompts file for `treering train`; a trajectory has the response too"),
    (frozenset({"prompt", "length"}), "it is of a log of lengths for `treering simulate`; a trajectory has the text"),
    (frozenset({"prompt"}), "it is of a prompts file for `treering train`; a trajectory has the completion too"),
    (frozenset({"responses_create_params"}), "it is of NeMo Gym's prompts; a rollout has the response too"),
)


def detect(record: Mapping[str, Any]) -> FormatName:
    """The format of a record; keys with null, empty lists and empty objects do not count.

    Raises:
        InputError: a record of no format; the message has its keys, what it looks like and what is missing.

    Example: `{"conversations": [...]}` is "sharegpt".
    """
    name = _find(record, {key for key, value in record.items() if not is_blank(value)})
    if name is None:
        raise InputError(_unknown(record))
    return name


def check_format(record: Mapping[str, Any], name: FormatName) -> None:
    """Checks that a record has the keys of a named format.

    Raises:
        InputError: it has not; the message has its keys and those that are missing.
    """
    keys = set(record)
    if (name == "treering" and keys & set(_TOKENS)) or (name == "verifiers" and looks_like_trace(record)):
        return
    if not any(keys.issuperset(group) for group in NEEDED[name]):
        missing = [key for key in NEEDED[name][0] if key not in keys]
        raise InputError(
            f'format "{name}" needs {" and ".join(NEEDED[name][0])}, got the keys {_names(record)} without '
            f'{" and ".join(missing)}; give the format that the file has, or "auto"'
        )


def _find(record: Mapping[str, Any], keys: set[str]) -> FormatName | None:
    if str(record.get("schema_version")).startswith("ATIF") and "steps" in keys:
        return "atif"
    if looks_like_trace(record):
        return "verifiers"
    if "responses_create_params" in keys and isinstance(record.get("response"), dict):
        return "nemo_gym"
    if name := _find_trainer(record, keys):
        return name
    if name := _find_agent(record, keys):
        return name
    if "conversations" in keys:
        return "sharegpt"
    if {"chosen", "rejected"} <= keys:
        return "trl"
    if {"prompt", "completion"} <= set(record) and ("example_id" in keys or {"reward", "task"} <= set(record)):
        return "verifiers"
    if {"prompt", "completion"} <= keys and "messages" not in keys:
        return "trl"
    if {"input", "output"} <= set(record) and {"score", "step", "gts"} & set(record):
        return "verl"
    if "messages" in record or keys.intersection(_TOKENS):
        return "treering" if keys.intersection(("task_id", *_TOKENS)) else "chat"
    # A record of Treering's own with its content lost: its decoder says what is missing.
    return "treering" if "task_id" in keys else None


def _find_trainer(record: Mapping[str, Any], keys: set[str]) -> FormatName | None:
    if name := next((name for name in _TRAINERS if keys.issuperset(NEEDED[name][0])), None):
        return name
    agents = record.get("trajectories")
    first = agents[0] if isinstance(agents, list) and agents else None
    return "rllm" if isinstance(first, dict) and "steps" in first else None


def _find_agent(record: Mapping[str, Any], keys: set[str]) -> FormatName | None:
    if "attempts" in keys or str(record.get("trajectory_format")).startswith("mini-swe-agent"):
        return "swe_agent"
    response = record.get("response")
    if "messages" in keys and isinstance(response, dict) and "choices" in response:
        return "openhands"
    if "messages" in keys:
        return None
    for key in ("history", "events", "trajectory"):
        first = next((one for one in record[key] if one), None) if isinstance(record.get(key), list) else None
        first = first[0] if isinstance(first, list) else first
        if not isinstance(first, dict):
            continue
        if key == "history" and "role" in first:
            return "swe_agent"
        if "kind" in first or ("source" in first and ("action" in first or "observation" in first)):
            return "openhands"
        if "action" in first and ("response" in first or "thought" in first):
            return "swe_agent"
    # A run that failed before its first event.
    return "openhands" if "instance_id" in keys and "history" in record and "test_result" in record else None


def _unknown(record: Mapping[str, Any]) -> str:
    keys = {key for key, value in record.items() if not is_blank(value)}
    begin = f"no format has a record with the keys {_names(record)}"
    if hint := next((hint for group, hint in _OTHER if group <= keys), None):
        return f"{begin}: {hint}"
    if nearest := _nearest(set(record), keys):
        return f"{begin}; {nearest}"
    formats = "; ".join(f"{name} has {' and '.join(groups[0])}" for name, groups in list(NEEDED.items())[:4])
    return f"{begin}: {formats}; write it as one of these"


def _nearest(keys: set[str], filled: set[str]) -> str | None:
    """What the keys look like most, by the share of keys that are there."""
    shares = [(len(keys.intersection(groups[0])) / len(groups[0]), name) for name, groups in NEEDED.items()]
    share, name = max(shares, key=lambda pair: pair[0])
    if share:
        missing = [key for key in NEEDED[name][0] if key not in filled]
        return f"it looks most like {name}, and {' and '.join(missing)} is missing or empty; add it"
    return None


def _names(record: Mapping[str, Any]) -> str:
    return show(", ".join(map(str, record))).strip("'\"") if record else "none"
