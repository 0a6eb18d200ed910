"""Translate requests of the loop to requests of an LLM, track running rollouts, and count passes."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treering.engine.kv_cache import count_common
from treering.engine.protocol import EngineStats, FinishReason, Request, Rollout, Sampling
from treering.engine.stop_strings import Decode, first_stop, reach_of, turn_start
from treering.errors import ConfigError, InputError, StateError
from treering.integrations.vllm.vllm_settings import request_args
from treering.types import TokenIds

Truncated = Literal["refuse", "recompute"]
"""How to treat a cut or penalty, for which vLLM gives no `policy_logprobs`. refuse: `submit` raises. recompute: they
are NaN, and the trainer computes them (`RlOptions.old_logprobs = "recomputed"`)."""

_LEAST_TEMPERATURE = 0.01
"""vLLM silently raises lower temperatures to this."""


def is_truncated(sampling: Sampling) -> bool:
    """Return whether tokens are drawn from a distribution other than the softmax of logits / temperature.

    Example: True with top_k=20, False if only the temperature is 0.7.
    """
    return bool(sampling.top_k) or sampling.top_p < 1 or sampling.min_p > 0 or sampling.repetition_penalty != 1


def check_sampling(sampling: Sampling, *, truncated: Truncated, has_drafts: bool) -> None:
    """Check that vLLM applies these sampling parameters exactly.

    Args:
        sampling: of a request.
        truncated: how to treat cuts and penalties.
        has_drafts: whether the LLM speculates.

    Raises:
        ConfigError: a temperature that vLLM would change, a min_p that it cannot apply or applies in another order, a
            cut or penalty with truncated="refuse", min_tokens, or num_top_logprobs.

    Example: temperature 0.001 is refused, because vLLM would sample at 0.01.
    """
    if sampling.temperature < _LEAST_TEMPERATURE:
        raise ConfigError(
            f"vLLM samples at temperature {_LEAST_TEMPERATURE} or more, got {sampling.temperature}; for greedy "
            "decoding set top_k=1"
        )
    for name in ("min_tokens", "num_top_logprobs"):
        if getattr(sampling, name):
            raise ConfigError(
                f"only the embedded engine has {name}, got {getattr(sampling, name)}; set it to 0, or use TorchEngine"
            )
    if sampling.min_p > 0 and has_drafts:
        raise ConfigError(f"vLLM cannot apply min_p with drafts, got min_p={sampling.min_p}; set it to 0")
    if sampling.min_p > 0 and sampling.top_p < 1:
        raise ConfigError(
            f"vLLM cuts by min_p before top_p, which gives another distribution, got min_p={sampling.min_p} and "
            f"top_p={sampling.top_p}; set one of them"
        )
    if truncated == "refuse" and is_truncated(sampling):
        raise ConfigError(
            "vLLM returns one log-prob per token, as sampled, so policy_logprobs need top_k, top_p, min_p and "
            f"repetition_penalty to change nothing, got {_cuts(sampling)}; remove them, or let the trainer compute "
            'policy_logprobs with truncated="recompute"'
        )


def noise_seed(seed: int, key: Sequence[object], start: int) -> int:
    """Return the seed of a request's generator in vLLM: 63 bits of a hash.

    `start` is the number of tokens that the rollout already has, so that its continuation draws fresh noise.

    Example: equal arguments give equal seeds; the prompt ids 1 and "1" give different ones.
    """
    digest = hashlib.blake2b(repr((seed, *key, start)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sampling_params(
    request: Request,
    *,
    num_tokens: int,
    vocab_size: int,
    seed: int,
    names_prompt: bool,
    rehearsed: Sequence[int] = (),
) -> Any:
    """Return vLLM's `SamplingParams` of a request.

    Args:
        request: must have passed `check_sampling`.
        num_tokens: tokens that the rollout already has.
        vocab_size: stop tokens beyond it are dropped: they cannot be sampled, and vLLM refuses them.
        seed: of the engine.
        names_prompt: whether to pass the prompt id and the draw to the drafter inside vLLM.
        rehearsed: tokens that it drafts first.

    Raises:
        InputError: a prompt id or draw that `request_args` refuses.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    # The history of an episode's calls stores whole episodes, so a call's context counts as generated.
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
        # Only the request's own stop tokens end a rollout, and only the engine decodes text.
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=request_args(request.prompt_id, request.draw, num_prompt_tokens=num_prompt, rehearsed=rehearsed)
        if names_prompt
        else None,
    )


def check_length(request: Request, max_model_len: int) -> None:
    """Refuse a request whose rollout would exceed the LLM's longest sequence.

    Raises:
        InputError: prompt and max_tokens do not fit.

    Example: a prompt of 9 tokens with max_tokens=8 needs max_model_len=17.
    """
    needed = int(request.prompt.size) + request.sampling.max_tokens
    if needed > max_model_len:
        raise InputError(
            f"a prompt of {request.prompt.size} tokens with max_tokens={request.sampling.max_tokens} needs "
            f"max_model_len={needed}, but the LLM has {max_model_len}; raise it, or shorten either"
        )


def _cuts(sampling: Sampling) -> str:
    plain = {"top_k": (None, 0), "top_p": (1.0,), "min_p": (0.0,), "repetition_penalty": (1.0,)}
    values = {name: getattr(sampling, name) for name in plain}
    return ", ".join(f"{name}={value}" for name, value in values.items() if value not in plain[name])


class VLLMLayers(NamedTuple):
    """Layers of a model; vLLM returns rows of zeros as the routes of a dense one."""

    total: int
    """Number of layers."""
    with_experts: list[int]
    """Indices of those with experts, ascending."""


@dataclass(slots=True, kw_only=True, eq=False)
class RunningRollout:
    """Running vLLM request. It belongs to one policy version, which all its tokens get.

    Example: a rollout that an update interrupts after 5 tokens ends with `start.num_tokens` 0 and 5 new tokens; another
    one begins with a `start` of 5 tokens and the next version.
    """

    request: Request
    vllm_id: str
    version: int
    start: Rollout
    """Rollout as it was when vLLM got the request."""
    has_policy_logprobs: bool
    """Whether vLLM's log-probs are those of the policy."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    layers: VLLMLayers | None = None
    """Layers of the model, if the LLM returns routes."""
    num_dropped: int = 0
    """Tokens that vLLM sampled after a stop string."""
    routed_experts: NDArray[np.int16] | None = None
    """Routes of the whole context, once vLLM has returned them."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens after the prompt."""
        return self.start.num_tokens + len(self.tokens)

    def extend(self, completion: Any) -> int:
        """Add the new tokens of a vLLM `CompletionOutput`; return how many.

        Raises:
            StateError: vLLM failed, or sampled under weights other than the engine's.
        """
        if completion.finish_reason not in (None, "stop", "length"):
            raise StateError(
                f"vLLM ended the rollout {self.request.key} with {completion.finish_reason!r} by itself; read its log"
            )
        spans = completion.weight_versions or ()
        if any(span.version != str(self.version) for span in spans):
            raise StateError(
                f"the rollout {self.request.key} was sampled under version {self.version}, but vLLM reports "
                f"{[span.version for span in spans]}; let only the engine update this LLM's weights"
            )
        new = [int(token) for token in completion.token_ids]
        self.tokens += new
        self.logprobs += [at[token].logprob for at, token in zip(completion.logprobs or (), new, strict=True)]
        if self.layers is not None and completion.finish_reason is not None:
            self.take_routes(completion.routed_experts)
        return len(new)

    def take_routes(self, given: NDArray[Any] | None) -> None:
        """Keep the routes that vLLM returned for the tokens so far, of layers with experts.

        Raises:
            StateError: the LLM returns routes and there are none, or they do not fit tokens and layers.
        """
        if self.layers is None or not self.tokens:
            return
        num_rows = int(self.request.prompt.size) + self.num_tokens + self.num_dropped - 1
        shape = [] if given is None else list(given.shape)
        if given is None or len(shape) != 3 or shape[:2] != [num_rows, self.layers.total]:
            raise StateError(
                f"vLLM must return routed_experts [{num_rows}, {self.layers.total}, experts per token] for the rollout "
                f"{self.request.key}, one row for each token but the last, got {shape or None}; use the vLLM that "
                "docs/vllm.md names, or create the LLM without enable_return_routed_experts"
            )
        self.routed_experts = given[:, self.layers.with_experts].astype(np.int16)

    def cut_at_stop(self, num_new: int, decode: Decode) -> bool:
        """Drop the tokens after a stop string that one of the last `num_new` tokens completes; return if one did."""
        strings = self.request.sampling.stop_strings
        if not strings or not num_new:
            return False
        tail = self._tail(num_new + reach_of(strings))
        stays = first_stop(tail, num_new, strings, decode, max(0, tail.size - len(self.tokens)))
        if stays is None:
            return False
        num_kept = len(self.tokens) - num_new + stays
        self.num_dropped = len(self.tokens) - num_kept
        del self.tokens[num_kept:], self.logprobs[num_kept:]
        return True

    def _tail(self, size: int) -> TokenIds:
        """Return at most `size` of the last tokens of the turn that the request samples."""
        new = self.tokens[-size:]
        first = max(turn_start(self.request.so_far), self.start.num_tokens - (size - len(new)))
        return np.concatenate([self.start.tokens[first:], np.array(new, np.int32)])

    def rollout(self, reason: FinishReason) -> Rollout:
        """Return the rollout with its tokens so far."""
        before, num_new = self.start, len(self.tokens)
        # vLLM computed all tokens again, so those of `before` hold only until a new token comes.
        routes = self.routed_experts if num_new else before.routed_experts
        num_rows = int(self.request.prompt.size) + self.num_tokens - 1
        logprobs = np.array(self.logprobs, np.float64)
        policy_logprobs = logprobs if self.has_policy_logprobs else np.full(num_new, np.nan)
        return replace(
            before,
            tokens=np.concatenate([before.tokens, np.array(self.tokens, np.int32)]),
            logprobs=np.concatenate([before.logprobs, logprobs]),
            policy_logprobs=np.concatenate([before.policy_logprobs, policy_logprobs]),
            loss_mask=np.concatenate([before.loss_mask, np.ones(num_new, bool)]),
            versions=np.concatenate([before.versions, np.full(num_new, self.version, np.int32)]),
            finish_reason=reason,
            reward=None,
            routed_experts=None if routes is None else routes[:num_rows],
        )


def routes_so_far(engine: Any, vllm_id: str) -> NDArray[Any] | None:
    """Return the routes that vLLM has for a running request, which an abort drops; None without any.

    Args:
        engine: the LLM's `LLMEngine`.
        vllm_id: of the request.
    """
    processor = engine.output_processor
    states = [processor.request_states[one] for one in processor.external_req_ids.get(vllm_id, ())]
    chunks = [chunk for state in states for chunk in state.routed_experts_chunks]
    return np.concatenate(chunks) if chunks else None


class Counts:
    """Counts of one engine.

    Example: a pass that gives three rollouts 2, 1 and 1 tokens adds 1 forward, 3 rows and 4 sampled tokens.
    """

    def __init__(self) -> None:
        self._counts = dict.fromkeys(EngineStats.__slots__, 0)

    @property
    def stats(self) -> EngineStats:
        """Counts so far."""
        return EngineStats(**self._counts)

    def note_pass(self, outputs: Sequence[Any]) -> None:
        """Count a pass by its outputs, vLLM's `RequestOutput` records of running rollouts."""
        self._counts["num_forwards"] += bool(outputs)

    def note_row(self, output: Any, num_new: int, *, is_first: bool, has_rehearsal: bool) -> None:
        """Count a row of a pass with its new tokens; `is_first` if they are the request's first.

        vLLM counts drafts by request, so those of a request with a rehearsal are not counted.
        """
        self._counts["num_rows"] += num_new > 0
        self._counts["num_sampled"] += num_new
        if is_first and num_new:
            self._counts["num_prefilled"] += len(output.prompt_token_ids) - (output.num_cached_tokens or 0)
        drafts = output.outputs[0].spec_decode_metrics
        if drafts is not None and not has_rehearsal:
            self._counts["num_drafted"] += drafts.num_draft_tokens
            self._counts["num_accepted"] += sum(length * count for length, count in enumerate(drafts.histogram))

    def note_rehearsed(self, num_tokens: int) -> None:
        """Count tokens that a rehearsal sampled."""
        self._counts["num_rehearsed"] += num_tokens

    def note_kept(self, rehearsed: TokenIds, tokens: TokenIds) -> None:
        """Count how many rehearsed tokens an ended rollout kept, up to the first that changed."""
        size = min(rehearsed.size, tokens.size)
        num_kept = count_common(rehearsed, tokens)
        self._counts["num_kept"] += num_kept
        self._counts["num_changed"] += num_kept < size
        self._counts["num_verified"] += min(size, num_kept + 1)
