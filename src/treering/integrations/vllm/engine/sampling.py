"""Translates a request to vLLM's sampling parameters, and refuses what vLLM would sample in another way."""

import hashlib
from typing import Any, Literal

from treering.engine.request import Request, Sampling
from treering.engine.rollout import RolloutKey
from treering.errors import ConfigError, InputError
from treering.integrations.vllm.request_args import request_args

Truncated = Literal["refuse", "recompute"]
"""What to do with a cut or a penalty, for which vLLM gives no `policy_logprobs`. refuse: `submit` raises. recompute:
they are NaN, and the trainer computes them itself (`RlOptions.old_logprobs = "recomputed"`)."""

_LEAST_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this without an error."""


def is_truncated(sampling: Sampling) -> bool:
    """Whether tokens are drawn from another distribution than the softmax of the logits over the temperature.

    Example: True with top_k=20, False with a temperature of 0.7 alone.
    """
    return bool(sampling.top_k) or sampling.top_p < 1 or sampling.min_p > 0 or sampling.repetition_penalty != 1


def check_sampling(sampling: Sampling, *, truncated: Truncated, has_drafts: bool) -> None:
    """Checks that vLLM samples as these parameters say.

    Args:
        sampling: of a request.
        truncated: see `Truncated`.
        has_drafts: whether the LLM speculates.

    Raises:
        ConfigError: a temperature that vLLM would change, min_p where it cannot apply it or in another order, or a cut
            or penalty with truncated="refuse".

    Example: temperature 0.001 is refused, because vLLM would sample at 0.01.
    """
    if sampling.temperature < _LEAST_TEMPERATURE:
        raise ConfigError(
            f"vLLM samples at temperature {_LEAST_TEMPERATURE} or more, got {sampling.temperature}; for the likeliest "
            "token set top_k=1"
        )
    if sampling.min_p > 0 and has_drafts:
        raise ConfigError(f"vLLM has no min_p beside drafts, got min_p={sampling.min_p}; set it to 0, or draft nothing")
    if sampling.min_p > 0 and sampling.top_p < 1:
        raise ConfigError(
            f"vLLM cuts by min_p before top_p, which gives another distribution, got min_p={sampling.min_p} and "
            f"top_p={sampling.top_p}; set one of them"
        )
    if truncated == "refuse" and is_truncated(sampling):
        raise ConfigError(
            "vLLM gives one log-prob per token, of what it sampled, so policy_logprobs need top_k, top_p, min_p and "
            f"repetition_penalty to change nothing, got {_cuts(sampling)}; remove them, or let the trainer compute "
            'policy_logprobs with truncated="recompute"'
        )


def noise_seed(seed: int, key: RolloutKey, start: int) -> int:
    """The seed of a request's generator in vLLM: 63 bits of a hash.

    `start` is the number of tokens that the rollout has: what continues it must not draw the noise of its beginning
    again.

    Example: equal arguments give equal seeds; the prompt ids 1 and "1" give different ones.
    """
    digest = hashlib.blake2b(repr((seed, *key, start)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sampling_params(request: Request, *, num_tokens: int, vocab_size: int, seed: int, names_prompt: bool) -> Any:
    """VLLM's `SamplingParams` of a request.

    Args:
        request: passed `check_sampling`.
        num_tokens: tokens that the rollout has already.
        vocab_size: stop tokens beyond it are left out: no one can sample them, and vLLM refuses them.
        seed: of the engine.
        names_prompt: tell the drafter inside vLLM the prompt and the draw.

    Raises:
        InputError: see `request_args`.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    # The history of an episode's calls has whole episodes, so none of a call's context is before them.
    given = int(request.prompt.size) if num_tokens else None
    num_prompt = given if request.call is None else 0
    return SamplingParams(
        max_tokens=sampling.max_tokens - num_tokens,
        temperature=float(sampling.temperature),
        top_k=int(sampling.top_k or 0),
        top_p=float(sampling.top_p),
        min_p=float(sampling.min_p),
        repetition_penalty=float(sampling.repetition_penalty),
        stop_token_ids=[int(token) for token in sampling.stop_tokens if token < vocab_size],
        seed=noise_seed(seed, request.key, num_tokens),
        logprobs=0,
        # Only the request's own stop tokens end a rollout, and only the engine reads text.
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=request_args(request.prompt_id, request.draw, num_prompt_tokens=num_prompt)
        if names_prompt
        else None,
    )


def check_length(request: Request, max_model_len: int) -> None:
    """Refuses a request whose rollout would be cut short by the LLM's longest sequence.

    Raises:
        InputError: prompt and max_tokens do not fit.

    Example: a prompt of 9 tokens with max_tokens=8 needs max_model_len=17.
    """
    needed = int(request.prompt.size) + request.sampling.max_tokens
    if needed > max_model_len:
        raise InputError(
            f"a prompt of {request.prompt.size} tokens with max_tokens={request.sampling.max_tokens} needs "
            f"max_model_len={needed}, and the LLM has {max_model_len}; raise it, or shorten either"
        )


def _cuts(sampling: Sampling) -> str:
    plain = {"top_k": (None, 0), "top_p": (1.0,), "min_p": (0.0,), "repetition_penalty": (1.0,)}
    values = {name: getattr(sampling, name) for name in plain}
    return ", ".join(f"{name}={value}" for name, value in values.items() if value not in plain[name])
