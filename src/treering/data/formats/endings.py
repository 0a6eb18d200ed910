"""How a record says that its run ended: with a turn that was cut, which has no end to train, or in a failure."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from treering.data.formats.messages import ROLES

CUT_TURN = (
    "a turn was cut by a limit of tokens or a filter (finish_reason, stop_reason, status or is_truncated say so) and "
    "would be trained to end in the middle, so these are left out; give token ids to train them without an end"
)
"""The note on records that are left out because of a cut turn."""
FAILED_RUN = (
    "the record says that its run failed or was not completed (error, status, exit_status or is_completed say so), so "
    'these are left out; data.failed = "kept" of treering sft, or failed="kept" from Python, keeps them'
)
"""The note on records that are left out because of a failure."""

CUT_FLAGS = ("is_truncated", "truncated", "was_truncated", "is_cut")
CUT_REASONS = ("finish_reason", "finishReason", "stop_reason", "done_reason", "finish_type", "termination_reason")
_LIMITS = frozenset(
    {
        "length",
        "max_tokens",
        "max_output_tokens",
        "max_length",
        "model_length",
        "token_limit",
        "max_response_length_exceeded",
        "content_filter",
    }
)
_TURNS = (
    "messages",
    "completion",
    "conversations",
    "conversation",
    "steps",
    "trajectory",
    "history",
    "output",
    "choices",
)
_INNER = ("response", "extra", "extra_info", "metadata", "response_metadata", "message", "info")


ERROR_KEYS = ("error", "errors", "error_message", "exception", "traceback", "has_error")
COMPLETED_KEYS = ("is_completed", "completed", "is_complete")
END_KEYS = (
    "status",
    "exit_status",
    "exit_reason",
    "termination_reason",
    "stop_reason",
    "stop_condition",
    "finish_reason",
)
_FAILURE = re.compile(
    r"\b(error(ed)?|fail(ed|ure)?|crash(ed)?|abort(ed)?|cancell?ed|time ?out|timed out|exception|interrupted|killed)\b"
)
_FAILURE_KEYS = frozenset((*ERROR_KEYS, *COMPLETED_KEYS, *END_KEYS))
_CUT_KEYS = frozenset((*CUT_FLAGS, *CUT_REASONS, "incomplete_details", "status"))


def has_failed(record: Mapping[str, Any]) -> bool:
    """Whether the record says that its run ended in an error or was not completed.

    An answer that got a low reward is no failure, and neither is an error that a tool reported to the policy.

    Example: `{"messages": [...], "status": "timeout"}` has failed; `{"messages": [...], "reward": 0.0}` has not.
    """
    inner = [record[key] for key in _INNER if isinstance(record.get(key), dict)]
    return any(_says_failed(part) for part in (record, *inner))


def _says_failed(part: Mapping[str, Any]) -> bool:
    if _FAILURE_KEYS.isdisjoint(part):
        return False
    ends = [_words(part[key]) for key in END_KEYS if isinstance(part.get(key), str)]
    return (
        any(part.get(key) for key in ERROR_KEYS)
        # Tables may have 0 for False.
        or any(part.get(key) == 0 for key in COMPLETED_KEYS)
        or any(_FAILURE.search(end) for end in ends)
    )


def _words(text: str) -> str:
    """An identifier as lower-case words, such as "retry error" of RetryError."""
    return re.sub(r"[_\-.]+|(?<=[a-z])(?=[A-Z])", " ", text).lower()


def has_cut_turn(record: Mapping[str, Any]) -> bool:
    """Whether the record, or a turn of the policy in it, says that it was cut by a limit of tokens.

    Results of tools may be truncated too, so turns of other roles are not asked.

    Example: `{"messages": [...], "finish_reason": "length"}` has one; a tool's message with "truncated" has none.
    """
    return any(_says_cut(part) for part in _parts(record))


def _parts(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield part
    for key in _INNER:
        if isinstance(part.get(key), dict):
            yield from _parts(part[key])
    for key in _TURNS:
        turns = part.get(key)
        for turn in turns if isinstance(turns, list) else ():
            if isinstance(turn, dict) and _may_be_policys(turn):
                yield from _parts(turn)


def _may_be_policys(turn: Mapping[str, Any]) -> bool:
    role = turn.get("role", turn.get("from", turn.get("source")))
    return role is None or role == "agent" or ROLES.get(str(role).strip().lower()) == "assistant"


def _says_cut(part: Mapping[str, Any]) -> bool:
    if _CUT_KEYS.isdisjoint(part):
        return False
    details = part.get("incomplete_details")
    reasons = [part.get(key) for key in CUT_REASONS] + [details.get("reason") if isinstance(details, dict) else None]
    return (
        any(part.get(key) is True or part.get(key) == 1 for key in CUT_FLAGS)
        or any(isinstance(reason, str) and reason.lower() in _LIMITS for reason in reasons)
        or part.get("status") in ("incomplete", "truncated")
    )
