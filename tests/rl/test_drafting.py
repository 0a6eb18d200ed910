"""Publishing within a step: early for prompts without history, at the end of the step for the others."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.rl import rollouts
from treering.config.engine import DraftOptions
from treering.engine.protocol import Rollout
from treering.history.budget import VerifyCosts
from treering.history.draft_types import DraftRows
from treering.rl.drafting import Drafting


def rollout_of(prompt_id: str, sample: int, version: int = 0) -> Rollout:
    return rollouts.rollout_of([5, 6, 7 + sample], prompt_id=prompt_id, sample=sample, versions=[version] * 3)


def rows_of(prompt_id: str, *rollout: int) -> DraftRows:
    return DraftRows(
        prompt_ids=[prompt_id],
        groups=np.zeros(1, np.int64),
        tokens=np.array([[1, *rollout]], np.int32),
        num_tokens=np.array([1 + len(rollout)]),
        num_prompt_tokens=np.array([1]),
        max_drafts=np.array([8]),
    )


def learnt(drafting: Drafting) -> Drafting:
    """Return the drafting state after a draft that was rejected."""
    for sample in range(2):
        drafting.add(rollout_of("a", sample))
    drafting.publish()
    rows = rows_of("a", 5)
    assert drafting.drafter.propose(rows).tokens.size > 0
    drafting.drafter.observe(rows, np.zeros(1, np.int64))
    return drafting


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


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


def test_options_reach_the_drafter() -> None:
    for changes, tokens in (({}, 2), ({"max_draft": 1}, 1), ({"sources": ("own",)}, 0), ({"min_acceptance": 1.0}, 0)):
        drafting = Drafting(DraftOptions(**{"min_acceptance": 0.01, **changes}))
        drafting.add(rollout_of("a", 0))
        drafting.publish()
        assert drafting.drafter.propose(rows_of("a", 5)).tokens.size == tokens


def test_a_state_carries_the_feedback_and_the_measured_costs() -> None:
    first = learnt(Drafting())
    first.drafter.use_costs(VerifyCosts(num_tokens=np.array([1, 8]), seconds=np.array([0.5, 0.75])))
    second = Drafting()
    assert not same(second.state(), first.state())
    second.load_state(first.state())
    assert same(second.state(), first.state())
    assert second.drafter.costs is not None
    assert second.drafter.costs.num_tokens.tolist() == [1, 8]
    assert second.drafter.costs.seconds.tolist() == [0.5, 0.75]
    assert Drafting().drafter.costs is None


def test_a_loaded_history_keeps_what_the_drafter_knows(tmp_path: Path) -> None:
    drafting = learnt(Drafting())
    drafting.drafter.use_costs(VerifyCosts(num_tokens=np.array([1]), seconds=np.array([0.5])))
    before, drafter = drafting.state(), drafting.drafter
    drafting.save(tmp_path / "history")
    drafting.load(tmp_path / "history")
    assert drafting.drafter is not drafter
    assert same(drafting.state(), before)
    assert drafting.knows("a")


@pytest.mark.parametrize("damage", ["other names", "another shape", "costs that fall"])
def test_an_unknown_state_is_one_warning_and_drops_the_feedback(damage: str) -> None:
    state = learnt(Drafting()).state()
    if damage == "other names":
        state = {"counts": torch.zeros(3), "sums": torch.zeros(3)}
    elif damage == "another shape":
        state["weights"] = state["weights"][:-1]
    else:
        state |= {"costs.num_tokens": torch.tensor([1, 2]), "costs.seconds": torch.tensor([2.0, 1.0])}
    drafting, fresh = Drafting(), Drafting().state()
    with pytest.warns(UserWarning, match="starts fresh") as caught:
        drafting.load_state(state)
    assert len(caught) == 1
    assert same(drafting.state(), fresh)
    learnt(drafting)


def test_each_step_measures_again_whether_drafts_pay() -> None:
    drafting = Drafting()
    drafting.add(rollout_of("a", 0))
    drafting.publish()
    # Drafts cost a hundredth, the step itself nothing: a draft that gets nothing accepted loses, and drafting pauses.
    drafting.drafter.use_costs(VerifyCosts(num_tokens=np.array([1, 64]), seconds=np.array([1e-6, 2e-6])))
    rows, sizes = rows_of("a", 5), [1]
    # The first pause ends after one step; the second takes two, of which one is left here.
    while len(sizes) < 40 and (sizes.count(0) < 2 or sizes[-1]):
        sizes.append(drafting.drafter.propose(rows).tokens.size)
        if sizes[-1]:
            drafting.drafter.observe(rows, np.zeros(1, np.int64))
    assert sizes[1] > 0
    assert sizes.count(0) == 2
    costs = drafting.drafter.costs
    drafting.publish()
    assert drafting.drafter.costs is costs
    assert drafting.drafter.propose(rows_of("a", 5)).tokens.size > 0
