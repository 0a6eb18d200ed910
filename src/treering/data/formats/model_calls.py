"""Trajectories from the calls of a model. A call that continues the previous one extends it; another starts a branch.

Recorded token ids are never rendered again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from treering.data.formats.json_fields import (
    MASK_KEYS,
    PROMPT_IDS,
    SAMPLED_IDS,
    are_ids,
    are_logprobs,
    array,
    check_masks_are_known,
    check_size,
    decode_floats,
    decode_mask,
    is_blank,
    plain_key,
    the_mask,
    token_ids,
)
from treering.data.formats.record_format import Note
from treering.data.trajectory import Message, Trajectory
from treering.errors import InputError
from treering.types import LossMask, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenCall:
    """One call of a model with token ids, of which at least one is sampled."""

    prompt: TokenIds
    """int32 [P], ids before the sampled ones."""
    completion: TokenIds
    """int32 [C], sampled ids."""
    logprobs: npt.NDArray[np.float64] | None
    """float64 [C], log-probs of the sampled tokens; None if unknown."""
    mask: LossMask | None = None
    """bool [C], True for trained tokens; None trains all."""


def as_context(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Return the messages with `trained` False in the assistant's."""
    return tuple(replace(message, trained=False) if message.is_trained else message for message in messages)


def message_branches(calls: Iterable[tuple[Message, ...]]) -> Iterator[tuple[Message, ...]]:
    """Yield one conversation per chain of calls that continue each other; each answer is trained once.

    A call is its prompt and, last, its answer.

    Example: the calls [u, a] and [u, a, t, b] are one conversation [u, a, t, b]. If the second call is [u, t, b] there
    are two: [u, a] and [u, t, b].
    """
    branch: tuple[Message, ...] = ()
    for call in calls:
        is_next = len(call) > len(branch) and all(map(_is_same, call, branch))
        if branch and not is_next:
            yield branch
        begin = branch if is_next else ()
        branch = (*begin, *as_context(call[len(begin) : -1]), call[-1])
    if branch:
        yield branch


def _is_same(one: Message, other: Message) -> bool:
    return replace(one, trained=True) == replace(other, trained=True)


def token_trajectories(calls: Iterable[TokenCall], **known: Any) -> list[Trajectory]:
    """Return one trajectory of token ids per chain of calls that continue each other, see `message_branches`.

    `known` has further fields of each trajectory. Log-probs are 0.0 at tokens that no call sampled, and None if a call
    has none.

    Example: prompts [1] and [1, 2, 3] with the completions [2] and [4] are one branch [1, 2, 3, 4] that trains 2 and 4.
    """
    runs: list[list[TokenCall]] = []
    whole = np.zeros(0, np.int32)
    for call in calls:
        if not runs or not np.array_equal(call.prompt[: whole.size], whole):
            runs.append([])
        runs[-1].append(call)
        whole = np.concatenate([call.prompt, call.completion])
    return [Trajectory(**_joined(run), **known) for run in runs]


def _joined(run: Sequence[TokenCall]) -> dict[str, Any]:
    tokens = np.concatenate([run[-1].prompt, run[-1].completion])
    mask = np.zeros(tokens.size, np.bool_)
    logprobs = np.zeros(tokens.size)
    for call in run:
        span = slice(call.prompt.size, call.prompt.size + call.completion.size)
        mask[span] = True if call.mask is None else call.mask
        if call.logprobs is not None:
            logprobs[span] = call.logprobs
    is_known = all(call.logprobs is not None for call in run)
    return {"tokens": tokens, "loss_mask": mask, "logprobs": logprobs if is_known else None}


IDS_USED = "token ids next to the text are trained as they were sampled, and the text is not rendered"
"""Note on records of text that also have the ids of their call."""


def ids_or_text(
    record: Mapping[str, Any], note: Note, decode: Callable[[Mapping[str, Any], Note], list[Trajectory]]
) -> list[Trajectory]:
    """Decode a record of text; if it has the ids of its call, train these, because the text may tokenize differently.

    Many names of prompt ids and sampled ids are known, such as prompt_token_ids and response_ids.

    Raises:
        InputError: the ids of prompt or completion are missing, a name is ambiguous, or the text has several turns of
            the policy for the ids of one call.

    Example: the prompt "2+2=" and the completion "4" with prompt_token_ids [5, 6] and completion_token_ids [7] train 7.
    """
    _check_messages(record)
    given = [key for key, value in record.items() if are_ids(key, value)]
    if not given:
        return decode(record, note)
    prompt, sampled = (
        [key for key in given if pattern.fullmatch(plain_key(key))] for pattern in (PROMPT_IDS, SAMPLED_IDS)
    )
    others = [key for key in given if key not in (*prompt, *sampled)]
    if others or len(prompt) != 1 or len(sampled) != 1:
        raise InputError(
            f"token ids next to text are trained in place of it, as prompt_token_ids and completion_token_ids, got "
            f"{' and '.join(given)}; rename them, or remove the ids or the text"
        )
    keys = (prompt[0], sampled[0])
    logprobs = [key for key, value in record.items() if are_logprobs(key, value)]
    if len(logprobs) > 1:
        raise InputError(f"{' and '.join(logprobs)} are log-probs of the same tokens; keep one of them")
    call = token_call(record, (*keys, logprobs[0] if logprobs else ""))
    if call.completion[: call.prompt.size].tolist() == call.prompt.tolist():
        raise InputError(f"{keys[1]} begin with {keys[0]}, so they are not sampled ids alone; cut the prompt off")
    about_ids = {*keys, *logprobs, *MASK_KEYS, "prompt_mask", "attention_mask"}
    found = decode({key: value for key, value in record.items() if key not in about_ids}, note)
    if not found or found[0].tokens is not None:
        return found
    messages = found[0].messages or ()
    num_turns = sum(message.is_trained for message in messages)
    if len(found) != 1 or (call.mask is None and (num_turns != 1 or not messages[-1].is_trained)):
        raise InputError(
            f"{keys[1]} are of one call, which ends the record, and the text trains {num_turns} turns; give one record "
            "per call, or a completion_mask with 1 where the policy sampled"
        )
    note(IDS_USED)
    return [replace(found[0], messages=None, tools=(), format="chat", **_joined([call]))]


def _check_messages(record: Mapping[str, Any]) -> None:
    """Refuse ids of single messages, which would be lost."""
    for name in ("messages", "prompt", "completion", "conversations"):
        messages = record.get(name)
        for i, one in enumerate(messages if isinstance(messages, list) else []):
            ids = [key for key, value in one.items() if are_ids(key, value)] if isinstance(one, dict) else []
            if ids:
                raise InputError(
                    f"{name}[{i}].{ids[0]} would be lost, since messages are rendered; give the ids of the call in the "
                    "record, as prompt_token_ids and completion_token_ids, or remove them"
                )


def token_calls(records: Sequence[object], keys: tuple[str, str, str], where: Callable[[int], str]) -> list[TokenCall]:
    """Return the calls of records if all have ids; else an empty list, so that all are read as text.

    `where` returns the location of a record for its index.
    """
    known = [one for one in records if isinstance(one, dict) and not any(is_blank(one.get(key)) for key in keys[:2])]
    return [token_call(one, keys, where(i)) for i, one in enumerate(known)] if len(known) == len(records) else []


def token_call(record: Mapping[str, Any], keys: tuple[str, str, str], where: str = "") -> TokenCall:
    """Decode a call from the ids of prompt and completion and the log-probs, under the names in `keys`.

    A mask over the completion, under a name in `MASK_KEYS`, excludes sampled tokens from training.

    Raises:
        InputError: ids are missing, log-probs or a mask have another length, a mask trains the prompt, or a key may be
            a mask whose meaning is uncertain.
    """
    where = f"{where}." if where else ""
    prompt, completion = (token_ids(record.get(key), f"{where}{key}") for key in keys[:2])
    logprobs = None if is_blank(record.get(keys[2])) else decode_floats(record, keys[2])
    if not completion.size:
        raise InputError(f"{where}{keys[1]} must hold the ids of the call, got []; drop the record")
    if logprobs is not None:
        check_size(logprobs, completion.size, f"{where}{keys[2]}", "sampled token")
    return TokenCall(
        prompt=prompt, completion=completion, logprobs=logprobs, mask=_mask(record, completion.size, where)
    )


def _mask(record: Mapping[str, Any], size: int, where: str) -> LossMask | None:
    if any(array(f"{where}prompt_mask", record.get("prompt_mask") or [])):
        raise InputError(f"{where}prompt_mask trains what the call was shown; give 0 for each token of the prompt")
    check_masks_are_known(record, but=(*MASK_KEYS, "prompt_mask"))
    given = {f"{where}{key}": record[key] for key in MASK_KEYS if not is_blank(record.get(key))}
    return the_mask({key: decode_mask(value, key) for key, value in given.items()}, size, "sampled token")
