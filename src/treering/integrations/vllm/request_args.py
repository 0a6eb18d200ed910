"""What a request tells the drafter inside vLLM, in `SamplingParams.extra_args`: its prompt and its draw."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from treering.errors import InputError
from treering.types import PromptId, is_count

KEY = "treering"
"""The entry of `extra_args`."""


class RequestIdentity(NamedTuple):
    """Which rollout a request samples."""

    prompt_id: PromptId
    draw: int
    num_prompt_tokens: int | None  # None: the prompt that vLLM knows is the original one


def request_args(prompt_id: PromptId, draw: int = 0, *, num_prompt_tokens: int | None = None) -> dict[str, Any]:
    """The `extra_args` of a request; requests with equal prompt_id and draw are siblings.

    Args:
        prompt_id: of the prompt in the history; see `PromptId`.
        draw: how many times the run has scheduled this prompt before.
        num_prompt_tokens: tokens of the original prompt, for a rollout that is continued: its tokens so far are part
            of the prompt that vLLM gets. 0 where the history of the prompt_id has whole contexts, as of episodes.

    Raises:
        InputError: an id that is neither text nor whole number, or a negative or fractional count.

    Example: `SamplingParams(max_tokens=64, extra_args=request_args("q1", draw=2))`.
    """
    if type(prompt_id) not in (str, int):
        raise InputError(f"a prompt_id is text or an integer, got {prompt_id!r}; convert it")
    if not is_count(draw, least=0):
        raise InputError(f"draw is a whole number, at least 0, got {draw!r}; count how often the prompt was scheduled")
    if num_prompt_tokens is None:
        return {KEY: {"prompt_id": prompt_id, "draw": int(draw)}}
    if not is_count(num_prompt_tokens, least=0):
        raise InputError(f"num_prompt_tokens is a whole number, at least 0, got {num_prompt_tokens!r}; correct it")
    return {KEY: {"prompt_id": prompt_id, "draw": int(draw), "num_prompt_tokens": int(num_prompt_tokens)}}


def read_request_args(extra_args: Mapping[str, Any] | None) -> RequestIdentity | None:
    """The identity in a request's `extra_args`; None if there is none, or none that `request_args` makes.

    Example: `read_request_args(request_args("q1", 2))` is ("q1", 2, None).
    """
    args = (extra_args or {}).get(KEY)
    if not isinstance(args, Mapping):
        return None
    prompt_id, draw, size = (args.get(name) for name in RequestIdentity._fields)
    if not isinstance(prompt_id, str | int) or isinstance(prompt_id, bool) or not is_count(draw, least=0):
        return None
    return RequestIdentity(prompt_id, draw, size if is_count(size, least=0) else None)
