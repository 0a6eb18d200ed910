"""Sampling parameters as vLLM and OpenAI name them, to `Sampling`."""

from collections.abc import Mapping
from dataclasses import dataclass

from treering.engine.request import Sampling
from treering.errors import InputError
from treering.serving.fields import Fields

_NEUTRAL: Mapping[str, tuple[tuple[object, ...], str]] = {
    "presence_penalty": ((0, 0.0), "would change the distribution in a way that log-probs here do not know"),
    "frequency_penalty": ((0, 0.0), "would change the distribution in a way that log-probs here do not know"),
    "logit_bias": (({},), "would change the distribution in a way that log-probs here do not know"),
    "allowed_token_ids": ((), "would change the distribution in a way that log-probs here do not know"),
    "bad_words": (([],), "would change the distribution in a way that log-probs here do not know"),
    "response_format": (({"type": "text"},), "would sample from a masked distribution, whose log-probs are others"),
    "structured_outputs": ((), "would sample from a masked distribution, whose log-probs are others"),
    "guided_json": ((), "would sample from a masked distribution, whose log-probs are others"),
    "min_tokens": ((0,), "would forbid the end of a turn, which log-probs here do not know"),
    "ignore_eos": ((False,), "has no meaning here: only stop_token_ids end a turn"),
    "prompt_logprobs": ((), "is not computed while sampling; use treering.forward"),
    "truncate_prompt_tokens": ((), "would sample from another prompt than the one sent"),
    "stream": ((False,), "is not served: answers come whole"),
    "echo": ((False,), "is not served"),
    "suffix": (("",), "is not served"),
    "best_of": ((1,), "is not served; ask for n and choose"),
    "include_stop_str_in_output": ((False,), "is not served: an answer ends before its stop"),
    "use_beam_search": ((False,), "is not sampling"),
}
_OFF = -1
"""Of vLLM: no seed, and all tokens for `top_k`."""
_WITHOUT_EFFECT = (
    "detokenize", "metadata", "output_kind", "skip_special_tokens", "spaces_between_special_tokens", "store",
    "stream_options", "user",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a call asks of sampling.

    Example: `{"temperature": 0}` asks for the likeliest token always: `top_k` is 1, and `is_greedy`.
    """

    sampling: Sampling
    num_samples: int
    """Answers to one context, at least 1."""
    seed: int | None
    """Of equal calls with equal seeds, answers are equal."""
    has_logprobs: bool
    """Whether log-probs are sent."""
    is_greedy: bool
    """Temperature 0: the log-probs sent are those of temperature 1, as the distribution sampled from has one token."""


def take_sampling(fields: Fields, *, num_left: int, default_max_tokens: int | None) -> Asked:
    """Takes the sampling parameters out of a body.

    Args:
        fields: of the body, or of its `sampling_params`.
        num_left: positions that the model has after the context.
        default_max_tokens: without max_tokens; None fills the model's context.

    Raises:
        InputError: a value of a wrong type or range, or a context that leaves no room.
        UnsupportedError: a parameter that this server would have to ignore.
    """
    if num_left < 1:
        raise InputError(f"the context leaves no position to sample at ({num_left} left); shorten it")
    max_tokens = _one_of(fields, "max_tokens", "max_completion_tokens")
    if max_tokens is not None and max_tokens > num_left:
        raise InputError(
            f"the model has {num_left} positions after this context, got max_tokens={max_tokens}; ask for fewer, or "
            "leave it out"
        )
    temperature = fields.take("temperature", float, 1.0)
    top_k = fields.take("top_k", int, _OFF)
    sampling = Sampling(
        max_tokens=max_tokens if max_tokens is not None else min(default_max_tokens or num_left, num_left),
        temperature=temperature or 1.0,
        top_k=1 if temperature == 0 else (None if top_k == _OFF else top_k),
        top_p=fields.take("top_p", float, 1.0),
        min_p=fields.take("min_p", float, 0.0),
        repetition_penalty=fields.take("repetition_penalty", float, 1.0),
        stop_tokens=tuple(fields.take("stop_token_ids", list, [])),
        stop_strings=_stops(fields),
    )
    num_samples = fields.take("n", int, 1)
    if not 1 <= num_samples <= 1024:
        raise InputError(f"n lies in [1, 1024], got {num_samples}; ask again for more")
    asked = Asked(
        sampling=sampling,
        num_samples=num_samples,
        seed=_seed(fields),
        has_logprobs=_has_logprobs(fields),
        is_greedy=temperature == 0,
    )
    for name, (neutral, why) in _NEUTRAL.items():
        fields.refuse_unless(name, neutral, why)
    fields.ignore(*_WITHOUT_EFFECT)
    return asked


def _one_of(fields: Fields, *names: str) -> int | None:
    """A number that has two names."""
    given = {name: value for name in names if (value := fields.take_any(name, (int,), None)) is not None}
    if len(set(given.values())) > 1:
        raise InputError(f"{' and '.join(given)} are one number, got {given}; send one of them")
    return next(iter(given.values()), None)


def _stops(fields: Fields) -> tuple[str, ...]:
    stop: str | list[str] = fields.take_any("stop", (str, list), [])
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _seed(fields: Fields) -> int | None:
    seed = fields.take("seed", int, _OFF)
    if seed < _OFF:
        raise InputError(f"a seed is a whole number from 0 on, got {seed}; send another, or none")
    return None if seed == _OFF else seed


def _has_logprobs(fields: Fields) -> bool:
    """A chat sends a bool and `top_logprobs`, others a count, of which 0 and 1 are both the sampled token's."""
    count: int | bool = fields.take_any("logprobs", (int, bool), False)
    most = fields.take("top_logprobs", int, 0)
    if not 0 <= count <= 1 or not 0 <= most <= 1:
        raise InputError(
            f"log-probs are those of the sampled tokens, got logprobs={count!r}, top_logprobs={most}; ask for 1"
        )
    return count is not False or most == 1
