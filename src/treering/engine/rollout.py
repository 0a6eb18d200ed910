"""A rollout as an engine returns it: tokens with their log-probs, loss mask and policy versions.

An environment's tokens have loss mask 0 and log-probs 0.

    R tokens of the rollout, an environment's included
"""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from treering.errors import InputError
from treering.types import LossMask, PromptId, TokenIds

RolloutKey: TypeAlias = tuple[PromptId, int, int] | tuple[PromptId, int, int, int]
"""(prompt_id, draw, sample), and the call where it is one: with the engine's seed and a token's position, the key of
its noise."""

FinishReason: TypeAlias = Literal["stop", "length", "abort"]
"""stop: a stop token or string. length: max_tokens, or the engine's own limit. abort: aborted by the caller."""

Logprobs: TypeAlias = NDArray[np.float64]

_ARRAYS = ("tokens", "logprobs", "policy_logprobs", "loss_mask", "versions")


def key_of(prompt_id: PromptId, draw: int, sample: int, call: int | None) -> RolloutKey:
    """The key of a rollout, or of a call of an episode.

    Example: ("q", 0, 3) of a rollout, and ("q", 0, 3, 71) of a call.
    """
    return (prompt_id, draw, sample) if call is None else (prompt_id, draw, sample, call)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One continuation of a prompt.

    Example: a calculator rollout "2+3=" -> tool says "5" -> "." has loss_mask [1, 1, 1, 1, 0, 1].
    """

    prompt_id: PromptId
    """The prompt that it continues."""
    draw: int
    """How many times the run had scheduled the prompt before."""
    sample: int
    """Index within the group."""
    tokens: TokenIds
    """int32 [R], without the prompt; a stop token is the last one."""
    logprobs: Logprobs
    """float64 [R], under the sampled distribution (after temperature, top-k, top-p); 0 for tokens not sampled."""
    policy_logprobs: Logprobs
    """float64 [R], after temperature only; 0 for tokens not sampled."""
    loss_mask: LossMask
    """bool [R], True where the policy sampled the token."""
    versions: NDArray[np.int32]
    """int32 [R], policy version that sampled each token, or read it if an environment wrote it."""
    finish_reason: FinishReason
    """Why it ended."""
    reward: float | None = None
    """The task's reward; None until it is computed."""
    branched_from: int | None = None
    """Sample index of the rollout that it branched from; None if it did not branch."""
    num_shared: int = 0
    """Leading tokens of a branch that belong to that rollout, with its log-probs and versions."""
    call: int | None = None
    """See `Request.call`."""

    def __post_init__(self) -> None:
        for name in _ARRAYS[1:]:
            values = getattr(self, name)
            if values.shape != self.tokens.shape:
                raise InputError(
                    f"{name} has one entry per token: tokens {self.tokens.shape}, {name} {values.shape}; align them"
                )

    @property
    def key(self) -> RolloutKey:
        """See `RolloutKey`."""
        return key_of(self.prompt_id, self.draw, self.sample, self.call)

    @property
    def num_tokens(self) -> int:
        """R."""
        return int(self.tokens.size)

    def observe(self, tokens: TokenIds) -> "Rollout":
        """Appends an environment's tokens, masked out of the loss.

        Raises:
            InputError: tokens that are not a flat list of integers.

        Example: a rollout [7, 8] observing [9] has tokens [7, 8, 9] and loss_mask [1, 1, 0].
        """
        tokens = np.asarray(tokens)
        if tokens.ndim != 1 or (tokens.size > 0 and tokens.dtype.kind not in "iu"):
            raise InputError(
                f"an observation is one dimension of integer token ids, got {tokens.dtype} of shape {tokens.shape}; "
                "convert it"
            )
        num_new = tokens.size
        version = self.versions[-1:].repeat(num_new) if self.num_tokens else np.zeros(num_new, np.int32)
        return replace(
            self,
            tokens=np.concatenate([self.tokens, tokens]).astype(np.int32),
            logprobs=np.concatenate([self.logprobs, np.zeros(num_new)]),
            policy_logprobs=np.concatenate([self.policy_logprobs, np.zeros(num_new)]),
            loss_mask=np.concatenate([self.loss_mask, np.zeros(num_new, bool)]),
            versions=np.concatenate([self.versions, version]).astype(np.int32),
        )

    def branch(self, num_tokens: int, *, sample: int) -> "Rollout":
        """The first `num_tokens` tokens as the start of another rollout, sampled from there on with noise of its own.

        They keep log-probs, loss mask and versions, so each token has those of the rollout that sampled it. The result
        is the `so_far` of a request with the same prompt, draw and `sample`.

        Args:
            num_tokens: shared tokens, 0 to all.
            sample: index of the new rollout within the group; none that the group has.

        Raises:
            InputError: `num_tokens` beyond the rollout, or its own sample index.

        Example: sample 0 with the tokens [7, 8, 9] gives `branch(2, sample=4)` with the tokens [7, 8], `branched_from`
        0 and `num_shared` 2.
        """
        if not 0 <= num_tokens <= self.num_tokens:
            raise InputError(
                f"a branch begins within its rollout, got num_tokens={num_tokens} for one of {self.num_tokens} tokens; "
                "shorten it"
            )
        if sample == self.sample:
            raise InputError(
                f"a branch is a rollout of its own, got sample={sample} of the rollout itself; take an unused index"
            )
        shared = slice(0, num_tokens)
        return replace(
            self,
            sample=sample,
            **{name: getattr(self, name)[shared].copy() for name in _ARRAYS},
            finish_reason=self._reason_at(num_tokens),
            reward=None,
            branched_from=self.sample,
            num_shared=num_tokens,
        )

    def _reason_at(self, num_tokens: int) -> FinishReason:
        """Why the first tokens ended: "stop" if a turn ended there, else "abort", so that the turn continues."""
        if num_tokens == self.num_tokens:
            return self.finish_reason
        ends_turn = num_tokens > 0 and self.loss_mask[num_tokens - 1] and not self.loss_mask[num_tokens]
        return "stop" if ends_turn else "abort"
