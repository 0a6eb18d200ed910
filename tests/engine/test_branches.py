"""Branches of rollouts keep law 5 and compute only the keys and values they lack.

The reference computes one request at a time, from scratch and without drafts.
"""

from dataclasses import replace

import numpy as np
import pytest
from transformers import PreTrainedModel

from tests.engine.test_torch_engine import Rollouts, assert_same, drafter_of, group_requests, recomputing, run
from tests.models import build_float64
from treering.engine.protocol import Request, Rollout, Sampling
from treering.engine.torch_engine import TorchEngine
from treering.errors import InputError

STOP = 7
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEF"


@pytest.fixture(scope="module")
def parents(model: PreTrainedModel) -> Rollouts:
    return run(alone(model), group_requests(9, 3, stop_tokens=(STOP,)))


def alone(model: PreTrainedModel) -> TorchEngine:
    return recomputing(TorchEngine(model, max_batch=1, backend="plain"))


def decode(tokens: np.ndarray) -> str:
    return "".join(LETTERS[token] for token in tokens)


def branch_of(requests: list[Request], parent: Rollout, num_tokens: int, sample: int) -> Request:
    request = next(request for request in requests if request.prompt_id == parent.prompt_id)
    return replace(request, sample=sample, so_far=parent.branch(num_tokens, sample=sample))


@pytest.mark.parametrize(
    ("backend", "drafting", "num_slots"),
    [("fused", "history", 4000), ("fused", "branching", 90), ("fused", "no_drafts", 90), ("plain", "branching", 4000)],
)
def test_branches_equal_those_of_an_engine_that_reuses_nothing(
    model: PreTrainedModel, parents: Rollouts, backend: str, drafting: str, num_slots: int
) -> None:
    """Branch at random tokens of running, returned and branched rollouts; 90 slots evict most spans."""
    rng = np.random.default_rng(num_slots)
    requests = group_requests(9, 3, stop_tokens=(STOP,))
    # History of every second parent, or of all: the first leaves most drafts single, the second makes trees.
    known = {} if drafting == "no_drafts" else dict(list(parents.items())[:: 1 + (drafting == "history")])
    engine = TorchEngine(
        model,
        drafter_of(known, min_acceptance=0.01) if known else None,
        max_batch=5,
        max_tokens=num_slots,
        max_prefill=int(rng.integers(1, 9)),
        backend=backend,
        costs="none",
    )
    engine.submit(requests)
    branches: list[Request] = []
    finished: Rollouts = {}
    while engine.num_unfinished:
        finished |= {rollout.key: rollout for rollout in engine.step()}
        candidates = [*engine.peek(list(engine.progress())), *finished.values()]
        if len(branches) < 60 and candidates and rng.random() < 0.7:
            parent = candidates[int(rng.integers(len(candidates)))]
            room = min(parent.num_tokens, requests[0].sampling.max_tokens - 1)
            branch = branch_of(requests, parent, int(rng.integers(room + 1)), 100 + len(branches))
            branches.append(branch)
            engine.submit([branch])
    assert len(branches) == 60
    assert_same(finished, parents | run(alone(model), branches))
    assert drafting == "no_drafts" or engine.stats.num_accepted > 0


def test_a_branch_prefills_nothing_that_its_parent_has(model: PreTrainedModel) -> None:
    requests = group_requests(6, 1, max_tokens=20)
    engine = TorchEngine(model, max_batch=8)
    engine.submit(requests)
    for _ in range(12):
        engine.step()
    before = engine.stats
    (running,) = engine.peek([("p5", 0, 0)])
    engine.submit([branch_of(requests, running, 10, 1)])
    engine.step()
    # The step that samples computes the last of the 10 shared tokens; the prompt's last token was copied too.
    assert engine.stats.since(before).num_prefilled == 0
    finished = run(engine, [])
    before = engine.stats
    run(engine, [branch_of(requests, finished["p3", 0, 0], 10, 2)])
    assert engine.stats.since(before).num_prefilled == 0


def test_a_later_turn_prefills_only_what_it_observed(model: PreTrainedModel, parents: Rollouts) -> None:
    (key,) = [key for key, parent in parents.items() if key[0] == "p4" and key[2] == 0]
    request = next(r for r in group_requests(9, 3, max_tokens=40, stop_tokens=(STOP,)) if r.key == key)
    engine = TorchEngine(model, max_batch=2)
    (turn,) = engine.generate([replace(request, sampling=Sampling(max_tokens=3))])
    # The first continuation is computed in full, because finished rollouts were not kept before it.
    again = replace(request, sampling=Sampling(max_tokens=6), so_far=turn)
    (turn,) = engine.generate([again])
    before = engine.stats
    again = replace(request, so_far=turn.observe(np.array([1, 2, 3], np.int32)))
    found = run(engine, [again])
    # The turn's last token was sampled but not computed. The last observed one is computed when the next is sampled.
    assert engine.stats.since(before).num_prefilled == 3
    assert_same(found, run(alone(model), [again]))


def test_equal_rollouts_of_different_prompts_share_nothing(model: PreTrainedModel) -> None:
    """Both prompts end in the same token, so the rollouts' own spans begin with equal tokens."""
    sampling = Sampling(max_tokens=20)
    mine, other = (Request(prompt_id=str(i), prompt=[i, 4, 9], sampling=sampling) for i in (1, 2))
    engine = TorchEngine(model, max_batch=4)
    parent = run(engine, [mine])[mine.key]
    engine.submit([mine])
    engine.step()
    again = replace(other, so_far=replace(parent.branch(10, sample=1), prompt_id="2", sample=0))
    assert_same(run(engine, [again]), {mine.key: parent} | run(alone(model), [again]))


def test_a_stop_string_across_the_branching_token_ends_a_branch(model: PreTrainedModel) -> None:
    requests = group_requests(8, 1, max_tokens=24)
    parent = run(TorchEngine(model), requests)["p7", 0, 0]
    whole = run(TorchEngine(model), [branch_of(requests, parent, 10, 1)])["p7", 0, 1]
    stop = decode(whole.tokens[9:12])
    stopping = [replace(r, sampling=Sampling(max_tokens=24, stop_strings=(stop,))) for r in requests]
    engine = TorchEngine(model, decode=decode)
    run(engine, requests)
    (branch,) = engine.generate([branch_of(stopping, parent, 10, 1)])
    assert (branch.tokens.tolist(), branch.finish_reason) == (whole.tokens[:12].tolist(), "stop")


def test_a_branch_begins_a_turn_where_its_parent_did(model: PreTrainedModel) -> None:
    (turn,) = TorchEngine(model).generate([group_requests(1, 1, max_tokens=4)[0]])
    seen = replace(turn, finish_reason="stop").observe(np.array([1, 2], np.int32))
    reasons = [seen.branch(at, sample=1).finish_reason for at in range(7)]
    assert reasons == ["abort"] * 4 + ["stop", "abort", "stop"]


def test_branches_outside_a_rollout_are_refused(parents: Rollouts) -> None:
    parent = parents["p3", 0, 1]
    for num_tokens in (-1, parent.num_tokens + 1):
        with pytest.raises(InputError, match=f"of a branch must be from 0 to the .* of its rollout, got {num_tokens};"):
            parent.branch(num_tokens, sample=5)
    with pytest.raises(InputError, match="got sample=1 of the rollout itself"):
        parent.branch(2, sample=1)


def test_new_weights_read_the_whole_branch_again(model: PreTrainedModel) -> None:
    mine, other = build_float64("qwen3", seed=0).eval(), build_float64("qwen3", seed=5).eval()
    requests = group_requests(6, 1)
    engine = TorchEngine(mine, max_batch=4)
    engine.keep_rollouts()
    parent = run(engine, requests)["p5", 0, 0]
    mine.load_state_dict(other.state_dict())
    engine.update_weights(1)
    before = engine.stats
    branch = branch_of(requests, parent, 10, 1)
    found = run(engine, [branch])
    assert engine.stats.since(before).num_prefilled == 5 + 10
    assert_same(found, run(alone(other), [branch]))
    assert found[branch.key].versions.tolist() == [0] * 10 + [1] * 10
