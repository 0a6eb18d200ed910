"""The tree benchmark: its cases are the published ones, all that it times computes one gradient, its report adds up."""

import pytest
import torch
from benchmarks.peers.peer import PYTHON, find_peers
from benchmarks.tree.cases import Case, build_model, caterpillar, star, two_level
from benchmarks.tree.steps import build_steps, gradient_after, relative_error


def tiny_cases() -> list[Case]:
    return [
        star(prompt=9, response=4, group=3),
        two_level(prompt=5, middle=4, response=3, num_middles=2, fan=2),
        caterpillar(turn=6, side=3, num_turns=3),
    ]


@pytest.mark.parametrize("case", tiny_cases(), ids=lambda case: case.name)
def test_every_timed_step_leaves_the_gradient_of_the_mean_over_trained_tokens(case: Case) -> None:
    model = build_model()
    losses = []
    for sequence in case.sequences:
        ids = torch.from_numpy(sequence).long()
        logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        losses += [-logprobs[t - 1, ids[t]] for t in range(len(ids) - case.num_trained, len(ids))]
    expected = gradient_after(model, torch.stack(losses).mean().backward)
    for name, step in build_steps(model, case).items():
        # Twice: a step must clear what the last one left.
        step()
        assert relative_error(gradient_after(model, step), expected) < 1e-5, name


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="no peers are installed: make peers")
def test_prefix_grouper_computes_the_same_gradient_on_a_star_and_is_not_given_deeper_trees() -> None:
    flat_star, *deeper = tiny_cases()
    (peer,) = find_peers()
    assert [peer.can_train(case) for case in (flat_star, *deeper)] == [True, False, False]
    assert 0 < peer.measure(build_model(), flat_star, 1).grad_error < 1e-5
