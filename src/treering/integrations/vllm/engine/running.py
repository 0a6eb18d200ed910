"""A rollout that runs inside vLLM, put together from the tokens of each of its steps."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from treering.engine.request import Request
from treering.engine.rollout import FinishReason, Rollout
from treering.engine.stop_strings import Decode, first_stop, reach_of, turn_start
from treering.errors import StateError
from treering.types import TokenIds


@dataclass(slots=True, kw_only=True, eq=False)
class RunningRollout:
    """A request of vLLM: it lives under one policy version, so that all its tokens have that one.

    Example: a rollout of 5 tokens that an update interrupts ends with `start.num_tokens` 0 and 5 new tokens, and
    another one begins with a `start` of 5 tokens and the next version.
    """

    request: Request
    vllm_id: str
    version: int
    start: Rollout
    """What the rollout was when vLLM got it."""
    has_policy_logprobs: bool
    """Whether the log-probs that vLLM gives are those of the policy."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens after the prompt."""
        return self.start.num_tokens + len(self.tokens)

    def extend(self, completion: Any) -> int:
        """Adds the new tokens of a vLLM `CompletionOutput`; returns how many.

        Raises:
            StateError: vLLM failed, or sampled under other weights than the engine's.
        """
        if completion.finish_reason not in (None, "stop", "length"):
            raise StateError(
                f"vLLM ended the rollout {self.request.key} with {completion.finish_reason!r} on its own; read its log"
            )
        spans = completion.weight_versions or ()
        if any(span.version != str(self.version) for span in spans):
            raise StateError(
                f"the rollout {self.request.key} was sampled under version {self.version}, and vLLM names "
                f"{[span.version for span in spans]}; let the engine alone update this LLM's weights"
            )
        new = [int(token) for token in completion.token_ids]
        self.tokens += new
        self.logprobs += [at[token].logprob for at, token in zip(completion.logprobs or (), new, strict=True)]
        return len(new)

    def cut_at_stop(self, num_new: int, decode: Decode) -> bool:
        """Whether one of the last `num_new` tokens completes a stop string; drops the tokens after it."""
        strings = self.request.sampling.stop_strings
        if not strings or not num_new:
            return False
        tail = self._tail(num_new + reach_of(strings))
        stays = first_stop(tail, num_new, strings, decode, max(0, tail.size - len(self.tokens)))
        if stays is None:
            return False
        num_kept = len(self.tokens) - num_new + stays
        del self.tokens[num_kept:], self.logprobs[num_kept:]
        return True

    def _tail(self, size: int) -> TokenIds:
        """At most so many of the last tokens of the turn that the request samples."""
        new = self.tokens[-size:]
        first = max(turn_start(self.request.so_far), self.start.num_tokens - (size - len(new)))
        return np.concatenate([self.start.tokens[first:], np.array(new, np.int32)])

    def rollout(self, reason: FinishReason) -> Rollout:
        """The rollout with its tokens so far."""
        before, num_new = self.start, len(self.tokens)
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
        )
