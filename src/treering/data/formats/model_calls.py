"""Branches from the calls of a model: a call that continues the one before makes it longer, another begins a branch."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from treering.data.trajectory import Message
from treering.types import LossMask, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageCall:
    """One call of a model with messages."""

    prompt: tuple[Message, ...]
    """What it was shown."""
    answer: tuple[Message, ...]
    """What it wrote."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenCall:
    """One call of a model with token ids, of which at least one is sampled."""

    prompt: TokenIds
    """int32 [P]: what it was shown."""
    completion: TokenIds
    """int32 [C]: what it sampled."""
    logprobs: npt.NDArray[np.float64] | None
    """float64 [C], of the sampled tokens; None if they are not known."""
    mask: LossMask | None = None
    """bool [C], which of the sampled tokens are trained; None trains all."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenBranch:
    """Calls of which each continues the one before, as one sequence."""

    tokens: TokenIds
    """int32 [T]."""
    loss_mask: LossMask
    """bool [T], True where a call sampled the token and its mask trains it."""
    logprobs: npt.NDArray[np.float64] | None
    """float64 [T], 0.0 where no call sampled the token; None if those of a call are not known."""


def as_context(messages: Iterable[Message]) -> tuple[Message, ...]:
    """The messages, none of them trained.

    Example: an assistant's message of a prompt is shown to the policy and not written by it.
    """
    return tuple(replace(message, trained=False) if message.is_trained else message for message in messages)


def message_branches(calls: Iterable[MessageCall]) -> Iterator[tuple[Message, ...]]:
    """One conversation per run of calls that continue each other; only what a call wrote is trained, once.

    Example: calls with the prompts [u] and [u, a, t], answered by a and b, are one conversation [u, a, t, b]. If the
    second prompt is [u, t] there are two: [u, a] and [u, t, b].
    """
    branch: tuple[Message, ...] = ()
    for call in calls:
        if branch and _continues(call.prompt, branch):
            branch = (*branch, *as_context(call.prompt[len(branch) :]), *call.answer)
            continue
        if branch:
            yield branch
        branch = (*as_context(call.prompt), *call.answer)
    if branch:
        yield branch


def token_branches(calls: Iterable[TokenCall]) -> Iterator[TokenBranch]:
    """As `message_branches`, of token ids.

    Example: prompts [1] and [1, 2, 3] with the completions [2] and [4] are one branch [1, 2, 3, 4] that trains 2 and 4.
    """
    run: list[TokenCall] = []
    for call in calls:
        if run and not _extends(call.prompt, run[-1]):
            yield _joined(run)
            run = []
        run.append(call)
    if run:
        yield _joined(run)


def _continues(prompt: Sequence[Message], branch: Sequence[Message]) -> bool:
    return len(prompt) >= len(branch) and all(map(_is_same, prompt, branch))


def _is_same(one: Message, other: Message) -> bool:
    return replace(one, trained=True) == replace(other, trained=True)


def _extends(prompt: TokenIds, call: TokenCall) -> bool:
    whole = np.concatenate([call.prompt, call.completion])
    return np.array_equal(prompt[: whole.size], whole)


def _joined(run: Sequence[TokenCall]) -> TokenBranch:
    last = run[-1]
    tokens = np.concatenate([last.prompt, last.completion])
    mask = np.zeros(tokens.size, np.bool_)
    logprobs = np.zeros(tokens.size)
    for call in run:
        span = slice(call.prompt.size, call.prompt.size + call.completion.size)
        mask[span] = True if call.mask is None else call.mask
        if call.logprobs is not None:
            logprobs[span] = call.logprobs
    is_known = all(call.logprobs is not None for call in run)
    return TokenBranch(tokens=tokens, loss_mask=mask, logprobs=logprobs if is_known else None)
