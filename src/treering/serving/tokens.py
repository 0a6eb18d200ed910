"""The route of tokens in and tokens out, `POST /inference/v1/generate`, as vLLM's server has it.

Source: the token route of vLLM's server, and `renderers.client.generate`, which reads the answer.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from treering.engine.rollout import Rollout
from treering.errors import InputError
from treering.serving.fields import Fields
from treering.serving.sampling_params import Asked
from treering.types import MAX_TOKEN_ID, TokenIds

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


def answer(request_id: str, context: TokenIds, rollouts: Sequence[Rollout], asked: Asked) -> dict[str, Any]:
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
