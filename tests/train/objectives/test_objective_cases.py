"""Law 2 for every objective and option: loss and gradients equal the flat ones, whole and in micro-batches."""

import inspect
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import treering.objectives
from tests.forests import SHAPES
from tests.models import assert_gradients_equal, build_float64, flat_logprobs, take_gradients
from tests.train.objectives.cases import CASES, Case
from tests.train.objectives.flat_objectives import Data, data_of, datas, grown, run_flat
from treering.config.objective_names import _NEED_MORE, BUILT_IN
from treering.objectives import dpo
from treering.train.step import BackwardResult, backward
from treering.tree.forest import Forest

EXACT = 1e-10
MODEL = build_float64()
HEAD = nn.Linear(32, 1).double()
SHAPED = [SHAPES["bushy"][:6], SHAPES["prefixes of each other"], SHAPES["duplicates"], [[3]]]


def test_every_objective_has_cases_and_rollouts_can_train_those_that_need_no_more() -> None:
    # Distillation has no log-prob terms; its laws are in test_distill.py.
    with_terms = set(BUILT_IN) - {"distill"}
    assert {name.replace(",", "").partition(" ")[0] for name in CASES} == with_terms
    for name in with_terms - set(_NEED_MORE):
        parameters = list(inspect.signature(getattr(treering.objectives, name)).parameters)
        assert parameters[:3] == ["advantages", "loss_masks", "old_logprobs"], name


def assert_case_is_exact(
    case: Case, data: Data, *, max_tokens: int | None = None, temperature: float = 1.0
) -> BackwardResult:
    expected = case.loss(data, run_flat(MODEL, data, value_head=HEAD, temperature=temperature))
    if expected.requires_grad:
        expected.backward()  # type: ignore[no-untyped-call]
    both = nn.ModuleList([MODEL, HEAD])
    expected_gradients = take_gradients(both)
    result = backward(
        MODEL,
        [Forest.from_sequences(group) for group in data.groups],
        case.make(data),
        max_tokens,
        temperature=temperature,
        value_head=HEAD if case.needs_value_head else None,
    )
    assert result.loss == pytest.approx(expected.item(), rel=EXACT, abs=EXACT)
    assert_gradients_equal(take_gradients(both), expected_gradients, EXACT)
    return result


@pytest.mark.parametrize("name", CASES)
@given(data=datas(MODEL), temperature=st.sampled_from([1.0, 0.7]))
@settings(max_examples=2)
def test_an_objective_equals_its_flat_version(name: str, data: Data, temperature: float) -> None:
    assert_case_is_exact(CASES[name], data, temperature=temperature)


@pytest.mark.parametrize("name", ["grpo once", "gspo sum", "ppo values sum", "dpo mixed"])
def test_it_does_so_in_micro_batches(name: str) -> None:
    data = data_of(SHAPED, MODEL, seed=7)
    largest = max(Forest.from_sequences(group).num_tokens for group in data.groups)
    assert len(assert_case_is_exact(CASES[name], data, max_tokens=largest).plan.micro_batches) > 1


@pytest.mark.parametrize("name", CASES)
def test_it_does_so_in_partitions(name: str) -> None:
    data = data_of([grown(2), SHAPES["prefixes of each other"], [[3]]], MODEL, seed=8)
    result = assert_case_is_exact(CASES[name], data, max_tokens=4)
    assert result.plan.partitioned
    assert (result.num_scoring_tokens > 0) == (CASES[name].make(data).scope != "entry")


@pytest.mark.parametrize("max_tokens", [None, 9, 4])
def test_pairs_and_sequences_without_a_trained_token_count_wherever_they_are_computed(max_tokens: int | None) -> None:
    sequences = [[1, 2, 3, 4, 5], [1, 2, 3, 6, 6], [7, 2, 3, 4], [7, 2, 1, 1], [8, 1, 1, 1], [8, 1, 1, 2]]
    masks = [[0] * 5, [0] * 5, [0] * 4, [0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 1, 0]]
    pairs = [(0, 1), (2, 3), (4, 5), (0, 4)]
    forest = Forest.from_sequences(sequences)
    ratios = [
        sum(lp.item() for lp, m in zip(flat_logprobs(MODEL, s)[0], mask[1:], strict=True) if m)
        for s, mask in zip(sequences, masks, strict=True)
    ]
    expected = [math.log1p(math.exp(-0.1 * (ratios[chosen] - ratios[rejected]))) for chosen, rejected in pairs]
    result = backward(MODEL, forest, dpo(pairs, masks), max_tokens)
    assert result.loss == pytest.approx(sum(expected) / len(pairs), rel=EXACT)
    untrained = dpo([(0, 1)], [[0] * len(s) for s in sequences])
    assert backward(MODEL, forest, untrained, max_tokens).loss == pytest.approx(math.log(2), rel=1e-6)
    MODEL.zero_grad(set_to_none=True)
