from collections.abc import Sequence

import numpy as np

from treering.engine.protocol import FinishReason, Rollout
from treering.rl.tasks.task import Prompt
from treering.types import PromptId


def rollout_of(
    tokens: Sequence[int] | np.ndarray,
    *,
    prompt_id: PromptId = "p",
    sample: int = 0,
    draw: int = 0,
    loss_mask: Sequence[int] | np.ndarray | None = None,
    logprobs: Sequence[float] | np.ndarray | None = None,
    policy_logprobs: Sequence[float] | np.ndarray | None = None,
    versions: Sequence[int] | None = None,
    finish_reason: FinishReason = "stop",
    reward: float | None = None,
) -> Rollout:
    num_tokens = len(tokens)
    return Rollout(
        prompt_id=prompt_id,
        draw=draw,
        sample=sample,
        tokens=np.array(tokens, np.int32),
        logprobs=np.array([-1.0] * num_tokens if logprobs is None else logprobs, np.float64),
        policy_logprobs=np.array([-2.0] * num_tokens if policy_logprobs is None else policy_logprobs, np.float64),
        loss_mask=np.array([1] * num_tokens if loss_mask is None else loss_mask, bool),
        versions=np.array([0] * num_tokens if versions is None else versions, np.int32),
        finish_reason=finish_reason,
        reward=reward,
    )


def prompt_of(*tokens: int, prompt_id: PromptId = "p", answer: str | None = None) -> Prompt:
    return Prompt(prompt_id=prompt_id, tokens=np.array(tokens or (1, 2), np.int32), answer=answer)
