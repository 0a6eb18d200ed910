"""The passes that a rank announces are those that it runs: ranks that announce the same never wait for each other."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import build_float64
from tests.ranks.batches import tree
from treering.errors import StateError
from treering.ranks.agreement import Passes, common_passes
from treering.ranks.group import RankGroup
from treering.ranks.setup import StepRanks
from treering.train.gradient import backward as step
from treering.train.objectives import Objective, dpo, gspo, sft
from treering.tree.forest import Forest

MODEL = build_float64()
FORESTS = [Forest.from_sequences(tree(seed, num_branches=3 + seed, depth=5)) for seed in range(2)]
SEQUENCES = [forest.tokens[forest.path(i)] for forest in FORESTS for i in range(forest.num_branches)]
ONES = [[1] * len(sequence) for sequence in SEQUENCES]
# The first tree trains nothing.
LATER = [[int(i >= 3)] * len(sequence) for i, sequence in enumerate(SEQUENCES)]
OBJECTIVES: dict[str, Objective] = {
    "sft": sft(ONES),
    "sft of the second tree": sft(LATER),
    "gspo": gspo([1.0] * len(SEQUENCES), LATER, ONES),
    "dpo": dpo([(0, 4)], LATER, ref_logprobs=ONES),
}


@pytest.mark.parametrize(("max_tokens", "parents"), [(None, "auto"), (25, "keep"), (8, "auto"), (8, "recompute")])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_rank_runs_what_it_announces(
    name: str, max_tokens: int | None, parents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "ranks_of", lambda *_, **__: StepRanks(group=RankGroup(), mode="sharded"))
    announced: list[Passes] = []
    honest = step.pass_order

    def announce(*args: Any, **given: Any) -> Passes:
        announced.append(honest(*args, **given))
        return announced[-1]

    monkeypatch.setattr(step, "pass_order", announce)
    ran: list[str] = []

    def watch(module: object, args: object, output: Any) -> None:
        ran.append("forward" if torch.is_grad_enabled() else "score")
        if torch.is_grad_enabled():
            output.last_hidden_state.register_hook(lambda gradient: note_backward(ran, gradient))

    handle = MODEL.model.register_forward_hook(watch)
    try:
        step.backward(MODEL, FORESTS, OBJECTIVES[name], max_tokens, parents=parents)
    finally:
        handle.remove()
        MODEL.zero_grad()
    words = [["forward", "backward"] if word == "train" else [word] for word in announced[0].order]
    assert ran == [event for each in words for event in each]


def note_backward(ran: list[str], gradient: Tensor) -> Tensor:
    ran.append("backward")
    return gradient


def test_only_numbers_of_passes_may_differ() -> None:
    one, two = Passes("sft", ("train",)), Passes("sft", ("train", "train"))
    assert common_passes([one, two, Passes("sft")]) == 2
    cut = Passes("sft", ("forward", "backward"), can_pad=False)
    assert common_passes([cut, cut]) == 0
    with pytest.raises(StateError, match=r"train at place 0.*rank 1 runs 2 \(forward there\)"):
        common_passes([one, cut])
    with pytest.raises(StateError, match="rank 0 has sft where rank 2 has gspo"):
        common_passes([one, two, Passes("gspo")])
