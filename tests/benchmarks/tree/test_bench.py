"""The tree benchmark: its cases are the published ones, all that it times computes one gradient, its report adds up."""

import json

import benchmarks.tree.bench
import pytest
import torch
from benchmarks.common.timing import interleaved_medians
from benchmarks.peers.peer import PYTHON, find_peers
from benchmarks.tree.cases import SHAPE, Case, build_model, caterpillar, published_cases, star, two_level
from benchmarks.tree.steps import build_steps, gradient_after, relative_error

from treering.tree.forest import Forest
from treering.tree.stats import bounds

KEYS = {
    *("case", "flat_tokens", "unique_tokens", "token_bound", "flop_bound", "baseline", "baseline_s", "tree_s"),
    *("speedup", "grad_error", "baselines", "baseline_grad_errors", "peers"),
}


def tiny_cases() -> list[Case]:
    return [
        star(prompt=9, response=4, group=3),
        two_level(prompt=5, middle=4, response=3, num_middles=2, fan=2),
        caterpillar(turn=6, side=3, num_turns=3),
    ]


@pytest.mark.parametrize(
    ("case", "flat", "unique", "flop_bound"),
    list(zip(published_cases(), (8704, 6656, 5120), (1536, 1536, 1536), (5.30, 4.03, 3.09), strict=True)),
    ids=lambda value: getattr(value, "name", None),
)
def test_the_published_cases_have_the_published_sizes(case: Case, flat: int, unique: int, flop_bound: float) -> None:
    forest = Forest.from_sequences(case.sequences)
    assert (forest.num_branch_tokens, forest.num_tokens, forest.num_branches) == (flat, unique, 8)
    assert bounds(forest, SHAPE).flop_bound == pytest.approx(flop_bound, abs=0.005)
    assert case.num_trained == 64


@pytest.mark.parametrize(
    ("case", "unique"),
    [
        (star(prompt=3, response=2, group=200), 3 + 200 * 2),
        (two_level(prompt=3, middle=2, response=2, num_middles=20, fan=20), 3 + 20 * (2 + 20 * 2)),
        (caterpillar(turn=2, side=2, num_turns=300), 300 * (2 + 2)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_chance_never_merges_siblings(case: Case, unique: int) -> None:
    assert Forest.from_sequences(case.sequences).num_tokens == unique


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


def test_the_report_has_the_documented_keys_and_adds_up() -> None:
    names = [case.name for case in tiny_cases()]
    report = json.loads(
        json.dumps(benchmarks.tree.bench.measure(tiny_cases(), only=names, num_runs=2), allow_nan=False)
    )
    assert report["sets"] == report["notes"] == []
    assert {"versions", "cpu", "threads", "runs"} <= set(report["environment"])
    assert [result["case"] for result in report["cases"]] == ["star", "two_level", "caterpillar"]
    for result, case in zip(report["cases"], tiny_cases(), strict=True):
        sequences = [sequence.tolist() for sequence in case.sequences]
        prefixes = {tuple(sequence[: i + 1]) for sequence in sequences for i in range(len(sequence))}
        assert set(result) == KEYS
        assert result["flat_tokens"] == sum(map(len, sequences))
        assert result["unique_tokens"] == len(prefixes)
        assert result["token_bound"] == pytest.approx(result["flat_tokens"] / result["unique_tokens"])
        assert set(result["baselines"]) == {"one_by_one", "padded_batch", "packed_chains"}
        assert result["baseline_s"] == min(result["baselines"].values()) == result["baselines"][result["baseline"]]
        assert result["speedup"] == pytest.approx(result["baseline_s"] / result["tree_s"])
        assert 0 < result["grad_error"] < 1e-5
        assert max(result["baseline_grad_errors"].values()) < 1e-5


def test_steps_alternate_and_one_slow_run_does_not_move_a_median() -> None:
    ran: list[str] = []
    seconds = {"a": iter([1.0, 90.0, 3.0]), "b": iter([5.0, 4.0, 6.0])}
    steps = {name: lambda name=name: ran.append(name) for name in seconds}

    def clock(step) -> float:
        step()
        return next(seconds[ran[-1]])

    assert interleaved_medians(steps, 3, clock) == {"a": 3.0, "b": 5.0}
    assert ran == ["a", "b"] * 3


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="no peers are installed: make peers")
def test_prefix_grouper_computes_the_same_gradient_on_a_star_and_is_not_given_deeper_trees() -> None:
    flat_star, *deeper = tiny_cases()
    (peer,) = find_peers()
    assert [peer.can_train(case) for case in (flat_star, *deeper)] == [True, False, False]
    assert 0 < peer.measure(build_model(), flat_star, 1).grad_error < 1e-5
