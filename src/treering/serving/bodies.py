"""The bodies of requests and answers: sampling parameters, tokens in and out, and completions of texts.

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
from treering.errors import ContextFullError, InputError, UnsupportedError
from treering.rl.tasks.text_tokens import TextTokens
from treering.types import MAX_TOKEN_ID, TokenIds

T = TypeVar("T")

_NAMES = {bool: "bool", int: "integer", float: "number", str: "text", list: "list", dict: "object"}


class Fields:
    """A JSON object whose fields are taken one by one.

    Example:
        >>> fields = Fields({"n": 2}, "the body")
        >>> fields.take("n", int, 1), fields.take("top_k", int, 0)
        (2, 0)
    """

    def __init__(self, values: object, where: str) -> None:
        """Holds the object.

        Raises:
            InputError: `values` is no object.
        """
        if not isinstance(values, Mapping):
            raise InputError(f"{where} is a JSON object, got {show(values)}; send one")
        self._left: dict[str, Any] = dict(values)
        self._where = where

    def take(self, name: str, kind: type[T], default: T) -> T:
        """The field, or its default where it is absent or null; an integer will do for a float.

        Raises:
            InputError: a value of another type, or one that a float does not hold.
        """
        value: Any = self.take_any(name, (int, float) if kind is float else (kind,), default)
        if kind is float and abs(value) > float_info.max:
            raise InputError(f"{name} of {self._where} is a number that a float holds, got {show(value)}; correct it")
        return kind(value) if kind is float else value  # type: ignore[call-arg]

    def take_any(self, name: str, kinds: tuple[type, ...], default: Any) -> Any:
        """The field of any of these types, or its default where it is absent or null.

        Raises:
            InputError: a value of another type.
        """
        value = self._left.pop(name, None)
        if value is None:
            return default
        if type(value) not in kinds:
            names = " or ".join(_NAMES[each] for each in kinds)
            raise InputError(f"{name} of {self._where} is of the type {names}, got {show(value)}; correct it")
        return value

    def need(self, name: str, kind: type[T]) -> T:
        """The field.

        Raises:
            InputError: it is absent, or of another type.
        """
        if self._left.get(name) is None:
            raise InputError(f"{self._where} has no {name}; send it")
        return self.take(name, kind, kind())

    def refuse_unless(self, name: str, neutral: Collection[object], why: str) -> None:
        """Takes a field that may only have values that change nothing.

        Raises:
            UnsupportedError: another value.
        """
        value = self._left.pop(name, None)
        if value is None or any(value == each and isinstance(value, type(each)) for each in neutral):
            return
        raise UnsupportedError(f"{name} of {self._where} {why}, got {show(value)}; leave it out")

    def ignore(self, *names: str) -> None:
        """Drops fields that change no token."""
        for name in names:
            self._left.pop(name, None)

    def end(self) -> None:
        """Refuses what is left.

        Raises:
            UnsupportedError: a field that nobody took and that is not null.
        """
        left = sorted(name for name, value in self._left.items() if value is not None)
        if left:
            raise UnsupportedError(
                f"{self._where} has {', '.join(left)}, which this server does not know and will not ignore; leave "
                f"{'it' if len(left) == 1 else 'them'} out"
            )


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


def take_sampling(
    fields: Fields,
    *,
    num_left: int,
    default_max_tokens: int | None,
    num_context: int = 0,
    ends: Sequence[int] = (),
) -> Asked:
    """Takes the sampling parameters out of a body.

    Args:
        fields: of the body, or of its `sampling_params`.
        num_left: positions that the model has after the context.
        default_max_tokens: without max_tokens; None fills the model's context.
        num_context: tokens of the context.
        ends: ids that end an answer besides those asked for, unless `ignore_eos` is set.

    Raises:
        InputError: a value of a wrong type or range.
        ContextFullError: a context that leaves no room.
        UnsupportedError: a parameter that this server would have to ignore.
    """
    num_positions = num_context + num_left
    if num_left < 1:
        raise ContextFullError(
            f"the maximum context length is {num_positions} tokens, and the prompt has {num_context}, so no "
            "position is left to sample at; shorten it"
        )
    max_tokens = _one_of(fields, "max_tokens", "max_completion_tokens")
    if max_tokens is not None and max_tokens > num_left:
        raise ContextFullError(
            f"the maximum context length is {num_positions} tokens, and the prompt has {num_context}, which "
            f"leaves {num_left} positions, got max_tokens={max_tokens}; ask for fewer, or leave it out"
        )
    ends = () if fields.take("ignore_eos", bool, False) else ends
    stops = fields.take("stop_token_ids", list, [])
    temperature = fields.take("temperature", float, 1.0)
    top_k = fields.take("top_k", int, _OFF)
    sampling = Sampling(
        max_tokens=max_tokens if max_tokens is not None else min(default_max_tokens or num_left, num_left),
        temperature=temperature or 1.0,
        top_k=1 if temperature == 0 else (None if top_k == _OFF else top_k),
        top_p=fields.take("top_p", float, 1.0),
        min_p=fields.take("min_p", float, 0.0),
        repetition_penalty=fields.take("repetition_penalty", float, 1.0),
        stop_tokens=(*stops, *(end for end in ends if end not in stops)),
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


REFUSED = {
    "features": "holds pictures, which this server does not read",
    "content_parts": "holds pictures, which this server does not read",
    "kv_transfer_params": "moves keys and values between servers, which this one does not",
    "lora_request": "names an adapter; serve the merged model",
}
WITHOUT_EFFECT = ("priority", "request_id", "return_token_ids")


def token_ids(value: Sequence[object], name: str) -> TokenIds:
    """Token ids of a JSON list, int32 [N].

    Raises:
        InputError: an empty list, or an element that is no token id.

    Example:
        >>> token_ids([5, 6], "token_ids").tolist()
        [5, 6]
    """
    if not value or not all(type(each) is int and 0 <= each <= MAX_TOKEN_ID for each in value):
        wrong = next((each for each in value if type(each) is not int or not 0 <= each <= MAX_TOKEN_ID), value)
        raise InputError(f"{name} is a list of token ids, one at least, got {wrong!r}; send integers from 0")
    return np.array(value, np.int32)


def logprobs_of(rollout: Rollout, asked: Asked) -> list[float]:
    """The log-prob of every sampled token: of the distribution that it was sampled from.

    For a greedy call, whose distribution has one token, those of the logits.
    """
    logprobs: list[float] = (rollout.policy_logprobs if asked.is_greedy else rollout.logprobs).tolist()
    return logprobs


def take_tokens(fields: Fields) -> TokenIds:
    """Takes the context out of a body of this route.

    Raises:
        InputError: it is missing or wrong.
        UnsupportedError: the body has pictures or the like.
    """
    context = token_ids(fields.need("token_ids", list), "token_ids")
    for name, why in REFUSED.items():
        fields.refuse_unless(name, (), why)
    fields.ignore(*WITHOUT_EFFECT)
    return context


def token_answer(request_id: str, context: TokenIds, rollouts: Sequence[Rollout], asked: Asked) -> dict[str, Any]:
    """The body of the answer; `policy_versions` has an element for every sampled token."""
    return {
        "request_id": request_id,
        "choices": [
            {
                "index": i,
                "token_ids": rollout.tokens.tolist(),
                "finish_reason": rollout.finish_reason,
                "logprobs": {
                    "content": [
                        {"token": f"token_id:{token}", "logprob": logprob}
                        for token, logprob in zip(rollout.tokens.tolist(), logprobs_of(rollout, asked), strict=True)
                    ]
                },
                "policy_versions": rollout.versions.tolist(),
            }
            for i, rollout in enumerate(rollouts)
        ],
        "usage": usage(context.size, rollouts),
    }


def completion(
    request_id: str,
    kind: str,
    model: str,
    context: TokenIds,
    rollouts: Sequence[Rollout],
    choices: list[dict[str, Any]],
) -> dict[str, Any]:
    """The body of an answer as OpenAI's clients read it; `kind` is "chat.completion" or "text_completion"."""
    return {
        "id": request_id,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage(context.size, rollouts),
    }


def usage(num_prompt: int, rollouts: Sequence[Rollout]) -> dict[str, int]:
    """Token counts as OpenAI's clients read them.

    Example: a context of 5 tokens and two answers of 3 give 5, 6 and 11.
    """
    num_sampled = sum(rollout.num_tokens for rollout in rollouts)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }


DEFAULT_MAX_TOKENS = 16
"""OpenAI's for completions."""


def take_prompt(fields: Fields, texts: TextTokens | None) -> tuple[TokenIds, bool]:
    """Takes the prompt out of a body, and whether token ids are to be sent back.

    Raises:
        InputError: a prompt of another type, several prompts, or a text that is no Unicode or meets no tokenizer.
    """
    prompt: str | list[Any] = fields.take_any("prompt", (str, list), [])
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        raise UnsupportedError(f"a call has one prompt, got {len(prompt)}; send a call for each")
    has_ids = fields.take("return_token_ids", bool, False)
    if isinstance(prompt, list):
        return token_ids(prompt, "prompt"), has_ids
    tokens = need_texts(texts).encode(valid_text(prompt, "prompt"), adds_special=True)
    if tokens.size == 0:
        raise InputError(f"a prompt holds at least one token, got the text {prompt!r}; send one")
    return tokens, has_ids


def need_texts(texts: TextTokens | None) -> TextTokens:
    """The server's tokenizer.

    Raises:
        InputError: it has none.
    """
    if texts is None:
        raise InputError(
            "this server has no tokenizer, and reads and writes token ids alone; use /inference/v1/generate"
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
    """The body of the answer."""
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
        choice["logprobs"] = {"tokens": token_texts(rollout, texts), "token_logprobs": logprobs_of(rollout, asked)}
    if has_ids:
        choice |= ids_of(context, rollout)
    return choice


def token_texts(rollout: Rollout, texts: TextTokens) -> list[str]:
    r"""The text of each sampled token, of a special one its name; of a part of a character, as OpenAI's, its bytes.

    Example: the tokens of "4 apples" and an end are "4", " apples" and "<|im_end|>", and those of an emoji
    `bytes:\xf0\x9f\x98` and `bytes:\x80`.
    """
    return [_text_of_bytes(texts.bytes_of(token)) for token in rollout.tokens.tolist()]


def _text_of_bytes(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def ids_of(context: TokenIds, rollout: Rollout) -> dict[str, Any]:
    """What `return_token_ids` adds to a choice: vLLM's two keys, and the policy version of every sampled token."""
    return {
        "prompt_token_ids": context.tolist(),
        "token_ids": rollout.tokens.tolist(),
        "policy_versions": rollout.versions.tolist(),
    }


def text_of(rollout: Rollout, asked: Asked, decode: Decode) -> str:
    """The text of an answer, without the stop token or stop string that ended it.

    Example: the tokens of "4 END" with the stop string "END" are the text "4 ".
    """
    tokens = rollout.tokens
    if rollout.finish_reason == "stop" and tokens.size and tokens[-1] in asked.sampling.stop_tokens:
        return decode(tokens[:-1])
    text = decode(tokens)
    if rollout.finish_reason != "stop":
        return text
    ends = [text.find(stop) for stop in asked.sampling.stop_strings if stop in text]
    return text[: min(ends)] if ends else text
