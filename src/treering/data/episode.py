"""What a run logs of an episode beside the tokens of its branches: whose calls they are, and how long it waited."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

from treering.errors import InputError
from treering.types import is_count


class CallSpan(NamedTuple):
    """The tokens of a branch that one call sampled."""

    number: int
    """Of its agent's calls in the run, from 0."""
    start: int
    """Index of its first token."""
    stop: int
    """One past its last token."""


class Turn(NamedTuple):
    """What a run sampled without waiting, and how long it then waited."""

    num_tokens: int
    """Of all its agents; 0 of a first turn is waiting before the first call."""
    wait_s: float
    """Seconds without an open call, until the next one or the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePart:
    """What is known of a branch as part of an episode.

    Example: a branch [5, 6, 7, 8, 9] whose calls sampled 7 and 9 has the calls (0, 2, 3) and (1, 4, 5).
    """

    agent: str
    """Whose calls they are."""
    calls: tuple[CallSpan, ...]
    """Those that train a part of this branch, in the order of its tokens."""
    turns: tuple[Turn, ...] = ()
    """Of the whole run, on its first branch; () on its others."""


def is_episode(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether a field "episode" of a record is one that `encode_episode` wrote; others have numbers or names there."""
    return isinstance(value, dict) and {"agent", "calls"} <= value.keys()


def encode_episode(part: EpisodePart) -> dict[str, Any]:
    """The JSON value of a part; `decode_episode` reads it back.

    >>> encode_episode(EpisodePart(agent="policy", calls=(CallSpan(0, 2, 3),), turns=(Turn(1, 0.5),)))
    {'agent': 'policy', 'calls': [[0, 2, 3]], 'turns': [[1, 0.5]]}
    """
    record: dict[str, Any] = {"agent": part.agent, "calls": [list(call) for call in part.calls]}
    return record | ({"turns": [list(turn) for turn in part.turns]} if part.turns else {})


def decode_episode(record: Mapping[str, Any]) -> EpisodePart | None:
    """The part in a record's field "episode"; None where it has none, or another meaning.

    Raises:
        InputError: calls or turns that `encode_episode` does not write.
    """
    value = record.get("episode")
    if not is_episode(value):
        return None
    agent, calls, turns = value["agent"], value["calls"], value.get("turns") or []
    if not (isinstance(agent, str) and isinstance(calls, list) and all(map(_is_call, calls))):
        raise InputError(
            f"an episode has an agent's name and calls as [number, start, stop], got {agent!r:.40} and {calls!r:.80}; "
            "write the line as the run did"
        )
    return EpisodePart(agent=agent, calls=tuple(CallSpan(*call) for call in calls), turns=decode_turns(turns))


def decode_turns(value: object) -> tuple[Turn, ...]:
    """Turns of their JSON value.

    Raises:
        InputError: no list of `[tokens, seconds]`, each at least 0.

    >>> decode_turns([[8, 2.5], [5, 0]])
    (Turn(num_tokens=8, wait_s=2.5), Turn(num_tokens=5, wait_s=0.0))
    """
    if not isinstance(value, list) or not all(map(_is_turn, value)):
        raise InputError(
            f"turns are a list of [tokens, seconds of waiting after them], each at least 0, got {value!r:.80}; correct "
            "the line"
        )
    return tuple(Turn(num_tokens, float(wait_s)) for num_tokens, wait_s in value)


def _is_call(value: object) -> bool:
    is_whole = isinstance(value, list) and len(value) == 3 and all(is_count(number, least=0) for number in value)
    return is_whole and value[1] < value[2]  # type: ignore[index]


def _is_turn(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2 or not is_count(value[0], least=0) or value[0] >= 1 << 31:
        return False
    is_number = isinstance(value[1], int | float) and not isinstance(value[1], bool)
    return is_number and 0 <= value[1] < float("inf")
