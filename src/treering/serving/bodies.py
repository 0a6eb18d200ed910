"""Bodies of requests and answers: sampling parameters, tokens in and out, and text completions.

The token route `POST /inference/v1/generate` is vLLM's; its answer is read by `renderers.client.generate`.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from sys import float_info
from typing import Any, TypeVar

import numpy as np

from treering.data.formats.json_fields import show
from treering.data.trajectory import valid_text
from treering.engine.protocol import Rollout, Sampling
from treering.engine.stop_strings import Decode
from treering.errors import ContextFullError, InputError, UnsupportedError, plural
from treering.rl.tasks.text_tokens import TextTokens
from treering.types import MAX_TOKEN_ID, TokenIds

T = TypeVar("T")

_NAMES = {bool: "bool", int: "integer", float: "number", str: "text", list: "list", dict: "object"}


class Fields:
    """JSON object whose fields are taken one by one.

    Example:
        >>> fields = Fields({"n": 2}, "the body")
        >>> fields.take("n", int, 1), fields.take("top_k", int, 0)
        (2, 0)
    """

    def __init__(self, values: object, where: str) -> None:
        """Hold the object.

        Raises:
            InputError: `values` is not an object.
        """
        if not isinstance(values, Mapping):
            raise InputError(f"{where} must be a JSON object, got {show(values)}")
        self._left: dict[str, Any] = dict(values)
        self._where = where

    def take(self, name: str, kind: type[T], default: T) -> T:
        """Take a field, or its default if it is absent or null; an integer is accepted for a float.

        Raises:
            InputError: a value of another type, or one too large for a float.
        """
        value: Any = self.take_any(name, (int, float) if kind is float else (kind,), default)
        if kind is float and abs(value) > float_info.max:
            raise InputError(f"{name} of {self._where} must fit a float, got {show(value)}")
        return kind(value) if kind is float else value  # type: ignore[call-arg]

    def take_any(self, name: str, kinds: tuple[type, ...], default: Any) -> Any:
        """Take a field of any of these types, or its default if it is absent or null.

        Raises:
            InputError: a value of another type.
        """
        value = self._left.pop(name, None)
        if value is None:
            return default
        if type(value) not in kinds:
            names = " or ".join(_NAMES[each] for each in kinds)
            raise InputError(f"{name} of {self._where} must be of type {names}, got {show(value)}")
        return value

    def need(self, name: str, kind: type[T]) -> T:
        """Take a required field.

        Raises:
            InputError: it is absent, or of another type.
        """
        if self._left.get(name) is None:
            raise InputError(f"{self._where} has no {name}; send it")
        return self.take(name, kind, kind())

    def refuse_unless(self, name: str, neutral: Collection[object], why: str) -> None:
        """Take a field that may only have values that change nothing.

        Raises:
            UnsupportedError: another value.
        """
        value = self._left.pop(name, None)
        if value is None or any(value == each and isinstance(value, type(each)) for each in neutral):
            return
        raise UnsupportedError(f"{name} of {self._where} {why}, got {show(value)}; remove it")

    def ignore(self, *names: str) -> None:
        """Drop fields that change no token."""
        for name in names:
            self._left.pop(name, None)

    def end(self) -> None:
        """Refuse the fields that are left.

        Raises:
            UnsupportedError: a field that was not taken and is not null.
        """
        left = sorted(name for name, value in self._left.items() if value is not None)
        if left:
            raise UnsupportedError(
                f"{self._where} has {', '.join(left)}, which this server does not know and will not ignore; remove "
                f"{'it' if len(left) == 1 else 'them'}"
            )


_NEUTRAL: Mapping[str, tuple[tuple[object, ...], str]] = {
    "presence_penalty": ((0, 0.0), "would change the distribution but not the log-probs"),
    "frequency_penalty": ((0, 0.0), "would change the distribution but not the log-probs"),
    "logit_bias": (({},), "would change the distribution but not the log-probs"),
    "allowed_token_ids": ((), "would change the distribution but not the log-probs"),
    "bad_words": (([],), "would change the distribution but not the log-probs"),
    "response_format": (({"type": "text"},), "would sample from a masked distribution, unlike the log-probs"),
    "structured_outputs": ((), "would sample from a masked distribution, unlike the log-probs"),
    "guided_json": ((), "would sample from a masked distribution, unlike the log-probs"),
    "prompt_logprobs": ((), "is not computed while sampling; use treering.forward"),
    "truncate_prompt_tokens": ((), "would sample from a prompt other than the one sent"),
    "echo": ((False,), "is not supported"),
    "suffix": (("",), "is not supported"),
    "best_of": ((1,), "is not supported; ask for n and choose"),
    "include_stop_str_in_output": ((False,), "is not supported: an answer ends before its stop"),
    "use_beam_search": ((False,), "is not sampling"),
}
_OFF = -1
"""vLLM's value for no seed, and for all tokens in `top_k`."""
_WITHOUT_EFFECT = (
    "detokenize", "metadata", "output_kind", "skip_special_tokens", "spaces_between_special_tokens", "store",
    "user",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Sampling that a call asks for.

    Example: `{"temperature": 0}` always samples the likeliest token: `top_k` is 1.
    """

    sampling: Sampling
    num_samples: int
    """Number of answers to one context, at least 1."""
    seed: int | None
    """Equal calls with equal seeds get equal answers."""
    has_logprobs: bool
    """Whether to return log-probs."""


def take_sampling(
    fields: Fields,
    *,
    num_left: int,
    default_max_tokens: int | None,
    num_context: int = 0,
    ends: Sequence[int] = (),
) -> Asked:
    """Take the sampling parameters out of a body.

    Args:
        fields: of the body, or of its `sampling_params`.
        num_left: positions that the model has after the context.
        default_max_tokens: used without max_tokens; None fills the model's context.
        num_context: tokens of the context.
        ends: ids that end an answer besides the requested ones, unless `ignore_eos` is set.

    Raises:
        InputError: a value of a wrong type or range.
        ContextFullError: the context leaves no room.
        UnsupportedError: a parameter that this server would have to ignore.
    """
    num_positions = num_context + num_left
    if num_left < 1:
        raise ContextFullError(
            f"the maximum context length is {num_positions} tokens and the prompt has {num_context}, which leaves no "
            "position to sample at; shorten the prompt"
        )
    max_tokens = _one_of(fields, "max_tokens", "max_completion_tokens")
    if max_tokens is not None and max_tokens > num_left:
        raise ContextFullError(
            f"the maximum context length is {num_positions} tokens and the prompt has {num_context}, which "
            f"leaves {plural(num_left, 'position')}, got max_tokens={max_tokens}; ask for fewer, or remove it"
        )
    ends = () if fields.take("ignore_eos", bool, False) else ends
    stops = fields.take("stop_token_ids", list, [])
    temperature = fields.take("temperature", float, 1.0)
    top_k = fields.take("top_k", int, _OFF)
    has_logprobs, num_top_logprobs = _logprobs(fields)
    sampling = Sampling(
        max_tokens=max_tokens if max_tokens is not None else min(default_max_tokens or num_left, num_left),
        temperature=temperature or 1.0,
        top_k=1 if temperature == 0 else (None if top_k == _OFF else top_k),
        top_p=fields.take("top_p", float, 1.0),
        min_p=fields.take("min_p", float, 0.0),
        repetition_penalty=fields.take("repetition_penalty", float, 1.0),
        stop_tokens=(*stops, *(end for end in ends if end not in stops)),
        stop_strings=_stops(fields),
        min_tokens=fields.take("min_tokens", int, 0),
        num_top_logprobs=num_top_logprobs,
    )
    num_samples = fields.take("n", int, 1)
    if not 1 <= num_samples <= 1024:
        raise InputError(
            f"the number of samples (n, num_samples) must lie in [1, 1024], got {num_samples}; send more calls"
        )
    asked = Asked(
        sampling=sampling,
        num_samples=num_samples,
        seed=_seed(fields),
        has_logprobs=has_logprobs,
    )
    for name, (neutral, why) in _NEUTRAL.items():
        fields.refuse_unless(name, neutral, why)
    fields.ignore(*_WITHOUT_EFFECT)
    return asked


def _one_of(fields: Fields, *names: str) -> int | None:
    """Take a number that has two names."""
    given = {name: value for name in names if (value := fields.take_any(name, (int,), None)) is not None}
    if len(set(given.values())) > 1:
        raise InputError(f"{' and '.join(given)} are names of the same number, got {given}; send one of them")
    return next(iter(given.values()), None)


def _stops(fields: Fields) -> tuple[str, ...]:
    stop: str | list[str] = fields.take_any("stop", (str, list), [])
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _seed(fields: Fields) -> int | None:
    seed = fields.take("seed", int, _OFF)
    if seed < _OFF:
        raise InputError(f"seed must be at least 0, got {seed}; send another, or none")
    return None if seed == _OFF else seed


MAX_TOP_LOGPROBS = 20


def _logprobs(fields: Fields) -> tuple[bool, int]:
    """Take whether log-probs are wanted, and of how many likeliest tokens.

    A chat sends a bool and `top_logprobs`, other calls only the number of likeliest tokens.
    """
    count: int | bool = fields.take_any("logprobs", (int, bool), False)
    num_top = fields.take("top_logprobs", int, 0)
    if not max(count, num_top) <= MAX_TOP_LOGPROBS or min(count, num_top) < 0:
        raise InputError(
            f"log-probs of 0 to {MAX_TOP_LOGPROBS} likeliest tokens are returned, got logprobs={count!r}, "
            f"top_logprobs={num_top}; ask for fewer"
        )
    return count is not False or num_top > 0, num_top or (0 if isinstance(count, bool) else count)


REFUSED = {
    "features": "has images, which this server does not support",
    "content_parts": "has images, which this server does not support",
    "kv_transfer_params": "moves keys and values between servers, which is not supported",
    "lora_request": "names an adapter; serve the merged model",
}
WITHOUT_EFFECT = ("priority", "request_id", "return_token_ids")


def token_ids(value: Sequence[object], name: str) -> TokenIds:
    """Return the token ids of a JSON list, int32 [N].

    Raises:
        InputError: an empty list, or an element that is not a token id.

    Example:
        >>> token_ids([5, 6], "token_ids").tolist()
        [5, 6]
    """
    if not value or not all(type(each) is int and 0 <= each <= MAX_TOKEN_ID for each in value):
        wrong = next((each for each in value if type(each) is not int or not 0 <= each <= MAX_TOKEN_ID), value)
        raise InputError(f"{name} must be a list of at least one token id, got {wrong!r}; send integers from 0")
    return np.array(value, np.int32)


def logprobs_of(rollout: Rollout, asked: Asked) -> list[float]:
    """Return the log-prob of every sampled token under the distribution that it was sampled from.

    With `top_k` 1 (temperature 0), where the distribution has one token, return those after temperature only.
    """
    is_greedy = asked.sampling.top_k == 1
    logprobs: list[float] = (rollout.policy_logprobs if is_greedy else rollout.logprobs).tolist()
    return logprobs


LEAST_LOGPROB = -9999.0
"""Log-prob of a token that cannot be sampled, as in vLLM, because JSON has no infinity."""


def top_of(rollout: Rollout) -> list[list[tuple[int, float]]]:
    """Return the likeliest tokens and their log-probs, for each sampled token; empty lists if none were asked for."""
    if rollout.top is None:
        return [[] for _ in range(rollout.num_tokens)]
    rows = zip(rollout.top.tokens.tolist(), rollout.top.logprobs.clip(min=LEAST_LOGPROB).tolist(), strict=True)
    return [list(zip(tokens, logprobs, strict=True)) for tokens, logprobs in rows]


def take_tokens(fields: Fields) -> TokenIds:
    """Take the context out of a body of the token route.

    Raises:
        InputError: it is missing or malformed.
        UnsupportedError: the body has images or other unsupported content.
    """
    context = token_ids(fields.need("token_ids", list), "token_ids")
    for name, why in REFUSED.items():
        fields.refuse_unless(name, (), why)
    fields.ignore(*WITHOUT_EFFECT)
    return context


def token_answer(request_id: str, context: TokenIds, rollouts: Sequence[Rollout], asked: Asked) -> dict[str, Any]:
    """Return the body of the answer; `policy_versions` has an element per sampled token."""
    return {
        "request_id": request_id,
        "choices": [
            {
                "index": i,
                "token_ids": rollout.tokens.tolist(),
                "finish_reason": rollout.finish_reason,
                "logprobs": {
                    "content": [
                        _named(token, logprob) | ({"top_logprobs": [_named(*each) for each in top]} if top else {})
                        for token, logprob, top in zip(
                            rollout.tokens.tolist(), logprobs_of(rollout, asked), top_of(rollout), strict=True
                        )
                    ]
                },
                "policy_versions": rollout.versions.tolist(),
            }
            for i, rollout in enumerate(rollouts)
        ],
        "usage": usage(context.size, rollouts),
    }


def _named(token: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token}", "logprob": logprob}


def completion(
    request_id: str,
    kind: str,
    model: str,
    context: TokenIds,
    rollouts: Sequence[Rollout],
    choices: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return an answer's body in OpenAI's format; `kind` is "chat.completion" or "text_completion"."""
    return {
        "id": request_id,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage(context.size, rollouts),
    }


def usage(num_prompt: int, rollouts: Sequence[Rollout]) -> dict[str, int]:
    """Return token counts in OpenAI's format.

    Example: a context of 5 tokens and two answers of 3 give 5, 6 and 11.
    """
    num_sampled = sum(rollout.num_tokens for rollout in rollouts)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }


DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions."""


def take_prompt(fields: Fields, texts: TextTokens | None) -> tuple[TokenIds, bool]:
    """Take the prompt out of a body, and whether to send token ids back.

    Raises:
        InputError: a prompt of another type, several prompts, invalid Unicode, or a text without a tokenizer.
    """
    prompt: str | list[Any] = fields.take_any("prompt", (str, list), [])
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        raise UnsupportedError(f"a call may have one prompt, got {len(prompt)}; send a call for each")
    has_ids = fields.take("return_token_ids", bool, False)
    if isinstance(prompt, list):
        return token_ids(prompt, "prompt"), has_ids
    adds_special = fields.take("add_special_tokens", bool, True)
    tokens = need_texts(texts).encode(valid_text(prompt, "prompt"), adds_special=adds_special)
    if tokens.size == 0:
        raise InputError(f"a prompt must have at least one token, got the text {prompt!r}")
    return tokens, has_ids


def need_texts(texts: TextTokens | None) -> TextTokens:
    """Return the server's tokenizer.

    Raises:
        InputError: it has none.
    """
    if texts is None:
        raise InputError(
            "this server has no tokenizer, so it takes and returns only token ids; use /inference/v1/generate"
        )
    return texts


def completion_answer(
    request_id: str,
    model: str,
    context: TokenIds,
    rollouts: Sequence[Rollout],
    asked: Asked,
    texts: TextTokens,
    has_ids: bool,
) -> dict[str, Any]:
    """Return the body of a completion's answer."""
    choices = [_choice(i, context, rollout, asked, texts, has_ids) for i, rollout in enumerate(rollouts)]
    return completion(request_id, "text_completion", model, context, rollouts, choices)


def _choice(
    index: int, context: TokenIds, rollout: Rollout, asked: Asked, texts: TextTokens, has_ids: bool
) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "text": text_of(rollout, asked, texts.decode),
        "finish_reason": rollout.finish_reason,
        "logprobs": None,
    }
    if asked.has_logprobs:
        names, logprobs = [token_text(token, texts) for token in rollout.tokens.tolist()], logprobs_of(rollout, asked)
        choice["logprobs"] = {
            "tokens": names,
            "token_logprobs": logprobs,
            "top_logprobs": [
                {token_text(token, texts): value for token, value in top} | {name: logprob}
                for name, logprob, top in zip(names, logprobs, top_of(rollout), strict=True)
            ],
        }
    if has_ids:
        choice |= ids_of(context, rollout)
    return choice


def token_text(token: int, texts: TextTokens) -> str:
    r"""Return the text of a sampled token: the name of a special token, the bytes of a partial character.

    Example: the tokens of "4 apples" and an end are "4", " apples" and "<|im_end|>"; those of an emoji are
    `bytes:\xf0\x9f\x98` and `bytes:\x80`, as OpenAI writes them.
    """
    content = texts.bytes_of(token)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def ids_of(context: TokenIds, rollout: Rollout) -> dict[str, Any]:
    """Return what `return_token_ids` adds to a choice: vLLM's two keys, and the policy version per sampled token."""
    return {
        "prompt_token_ids": context.tolist(),
        "token_ids": rollout.tokens.tolist(),
        "policy_versions": rollout.versions.tolist(),
    }


def text_of(rollout: Rollout, asked: Asked, decode: Decode) -> str:
    """Return the text of an answer, without the stop token or stop string that ended it.

    Example: the tokens of "4 END" with the stop string "END" are the text "4 ".
    """
    tokens = rollout.tokens
    if rollout.finish_reason == "stop" and tokens.size and tokens[-1] in asked.sampling.stop_tokens:
        return decode(tokens[:-1])
    text = decode(tokens)
    if rollout.finish_reason != "stop":
        return text
    # A stop string before `min_tokens` has not ended the answer.
    first = len(decode(tokens[: asked.sampling.min_tokens]).rstrip("\N{REPLACEMENT CHARACTER}"))
    found = (text.find(stop, max(0, first + 1 - len(stop))) for stop in asked.sampling.stop_strings)
    return text[: min((at for at in found if at >= 0), default=None)]
