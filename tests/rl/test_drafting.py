"""What a run remembers within a step: prompts without history get theirs early, and the others at the step's end."""

import numpy as np

from treering.engine.rollout import Rollout
from treering.rl.drafting import Drafting, DraftOptions


def rollout_of(prompt_id: str, sample: int, version: int = 0) -> Rollout:
    tokens = np.array([5, 6, 7 + sample], np.int32)
    return Rollout(
        prompt_id=prompt_id,
        draw=0,
        sample=sample,
        tokens=tokens,
        logprobs=np.zeros(3),
        policy_logprobs=np.zeros(3),
        loss_mask=np.ones(3, bool),
        versions=np.full(3, version, np.int32),
        finish_reason="stop",
    )


def published(drafting: Drafting) -> int:
    return drafting.store.num_tokens // 3


def test_new_prompts_are_published_when_their_rollouts_have_doubled() -> None:
    drafting = Drafting(DraftOptions(publish_new_after=2))
    counts = []
    for sample in range(20):
        drafting.add(rollout_of("a", sample))
        counts.append(published(drafting))
    assert counts == [0, 2, 2, 4, 4, 4, 4, 8, *[8] * 7, 16, *[16] * 4]
    assert drafting.knows("a")
    drafting.publish()
    assert published(drafting) == 20


def test_prompts_with_history_wait_for_the_end_of_the_step() -> None:
    drafting = Drafting(DraftOptions(publish_new_after=1))
    drafting.add(rollout_of("a", 0))
    drafting.publish()
    for sample in range(5):
        drafting.add(rollout_of("a", sample, version=1))
    assert published(drafting) == 1
    drafting.publish()
    assert published(drafting) == 6


def test_each_step_begins_to_count_anew() -> None:
    drafting = Drafting(DraftOptions(publish_new_after=2))
    for prompt_id in ("a", "b"):
        for sample in range(8):
            drafting.add(rollout_of(prompt_id, sample))
            if sample == 1:
                assert drafting.knows(prompt_id)
        drafting.publish()
    assert not drafting.knows("c")
