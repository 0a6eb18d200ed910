"""Acceptance estimates follow what the engine accepted and are calibrated."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from benchmarks.draft.drafters.ours import calibration_error
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from tests.history.reference import Row, draft_rows, likeliest_path, same_drafts, store_of, walk
from treering.errors import InputError, StateError
from treering.history.budget import VerifyCosts
from treering.history.draft.acceptance import (
    NUM_TRAINED,
    OFFSET,
    SCALE,
    ReliabilityBin,
    estimate,
    learn,
    mark,
)
from treering.history.draft.drafter import Drafter
from treering.history.draft_types import DraftRows
from treering.history.features import (
    ACCEPTED,
    FIRST,
    NOT_TRIED,
    NUM_GENERAL_KINDS,
    NUM_HASHES,
    NUM_KINDS,
    NUM_PAIRS,
    NUM_VOTES,
    REFUSED,
    SIZES,
    hash_of,
)
from treering.history.match.running_rows import RowStates

ROW = Row(rollout=(1,))
STOP = 9


@njit
def estimate_of(weights: np.ndarray, shares: np.ndarray, features: np.ndarray) -> float:
    """Call the compiled `estimate` from compiled code, the only way it supports."""
    return float(estimate(weights, shares, features))


def drafter_of(*rollouts: list[int], **options: Any) -> Drafter:
    store = store_of({"q": {0: rollouts or [[1, 2, 3, 4]] * 2}})
    return Drafter(store, **{"min_acceptance": 1e-6, "sources": ("history",), **options})


def observe(drafter: Drafter, truth: tuple[int, ...], *, row: Row = ROW, ended: bool = False) -> list[float]:
    """Draft for `row`, observe that it continued with `truth`, and return the estimates made before that."""
    rows = draft_rows([row])
    drafts = drafter.propose(rows)
    accepted, leaf = walk(drafts, 0, truth)
    drafter.observe(rows, np.array([accepted]), np.array([ended]), np.array([leaf]))
    return drafts.acceptance.tolist()


def num_tried(drafter: Drafter) -> int:
    return sum(item.num_drafted for item in drafter.reliability())


def test_estimates_rise_with_acceptance_fall_with_refusal_and_recover() -> None:
    drafter = drafter_of()
    rising = [observe(drafter, (2, 3, 4))[0] for _ in range(30)]
    falling = [observe(drafter, (7,))[0] for _ in range(60)]
    again = [observe(drafter, (2, 3, 4))[0] for _ in range(60)]
    # Skip two steps: the first still follows the earlier phase, and the row after it has another draft outcome.
    for estimates, sign in ((rising[2:], 1), (falling[2:], -1), (again[2:], 1)):
        assert (sign * np.diff(estimates) > 0).all()
    assert rising[-1] > 0.95
    assert falling[-1] < 0.35
    assert again[-1] > 0.6


def plain_model() -> tuple[np.ndarray, np.ndarray]:
    """Return weights of 0 with a scale of 1, and the initial sums of squares."""
    weights, squares = np.zeros(NUM_TRAINED), np.full(NUM_TRAINED, 4.0)
    weights[SCALE], squares[SCALE], squares[OFFSET] = 1, 100, 100
    return weights, squares


def one_observation(was_accepted: int, *, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Return weights and squares after one candidate with shares of 0.5 and the first feature of each kind."""
    weights, squares = plain_model()
    weights[SCALE], weights[NUM_VOTES] = scale, 2.0
    reliability = np.zeros((20, 3))
    learn(
        np.array([0, 1]), np.array([-1], np.int32), np.array([0.5], np.float32),
        np.full((1, NUM_VOTES), 0.5, np.float32), np.array([FIRST], np.int32), np.array([was_accepted], np.int8),
        weights, squares, reliability,
    )  # fmt: skip
    assert reliability[10].tolist() == [1, 0.5, was_accepted]
    assert reliability.sum() == 1.5 + was_accepted
    return weights, squares


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("was_accepted", [0, 1])
def test_a_weight_moves_by_the_models_error_less_the_more_it_has_moved(was_accepted: int, scale: float) -> None:
    weights, squares = one_observation(was_accepted, scale=scale)
    # The bias is 2 and all other weights are 0. The scale does not count as an error of the model.
    error = was_accepted - 1 / (1 + math.exp(-2))
    touched, rates = list(FIRST), np.where(np.arange(NUM_KINDS) < NUM_GENERAL_KINDS, 0.15, 0.4)
    moved = weights[touched] - np.eye(NUM_KINDS)[0] * 2
    # Added to a weight of 2, a step of 0.05 keeps about five digits in float32.
    np.testing.assert_allclose(moved, rates * error / math.sqrt(4 + error**2), rtol=1e-4)
    np.testing.assert_allclose(squares[touched], 4 + error**2, rtol=1e-6)
    np.testing.assert_allclose(weights[:NUM_VOTES], 0.02 * error / 2 / math.sqrt(4 + error**2 / 4), rtol=1e-6)
    others = np.setdiff1d(np.arange(NUM_VOTES, SCALE), touched)
    assert not weights[others].any()


@pytest.mark.parametrize("was_accepted", [0, 1])
def test_scale_and_offset_move_by_the_error_of_the_estimate(was_accepted: int) -> None:
    weights, squares = one_observation(was_accepted, scale=0.5)
    # A logit of 2 and a scale of 0.5 give the logistic of 1.
    error = was_accepted - 1 / (1 + math.exp(-1))
    np.testing.assert_allclose(weights[SCALE] - 0.5, 0.3 * 2 * error / math.sqrt(100 + (2 * error) ** 2), rtol=1e-5)
    np.testing.assert_allclose(weights[OFFSET], 0.3 * error / math.sqrt(100 + error**2), rtol=1e-6)
    np.testing.assert_allclose(squares[[SCALE, OFFSET]], [100 + (2 * error) ** 2, 100 + error**2], rtol=1e-6)


def test_an_estimate_is_the_logistic_of_the_scaled_sum_of_shares_and_features() -> None:
    rng = np.random.default_rng(0)
    weights = rng.normal(size=NUM_TRAINED)
    shares = rng.normal(size=NUM_VOTES).astype(np.float32)
    features = (np.array(FIRST) + rng.integers(0, SIZES)).astype(np.int32)
    logit = weights[:NUM_VOTES] @ shares.astype(float) + weights[features].sum()
    expected = 1 / (1 + math.exp(-(weights[SCALE] * logit + weights[OFFSET])))
    # The table holds 64 values per unit of logit and is interpolated linearly.
    assert estimate_of(weights, shares, features) == pytest.approx(expected, rel=1 / (8 * 64**2))
    weights[SCALE] = 1
    for sign in (-1, 1):
        certain = weights + 0
        certain[:SCALE] = sign * 1000
        assert 0 < sign * (estimate_of(certain, np.zeros_like(shares), features) - 0.5) + 0.5 < 1
        assert sign * (estimate_of(certain, np.zeros_like(shares), features) - 0.5) > 0.5 - 1e-5


def test_a_token_counts_only_where_those_before_it_were_accepted() -> None:
    drafter = drafter_of()
    for truth, expected in (((7,), 1), ((2, 7), 3), ((2, 3, 7), 6), ((2, 3, 4), 9)):
        observe(drafter, truth)
        assert num_tried(drafter) == expected


@pytest.mark.parametrize("has_prior", [True, False])
def test_estimates_come_true_on_a_source_of_known_acceptance(has_prior: bool) -> None:
    rng = np.random.default_rng(0)
    texts = {p: rng.permutation(3000)[:60].tolist() for p in range(40)}
    drafter = Drafter(
        store_of({p: {0: [text]} for p, text in texts.items()}), sources=("history",), max_draft=6, min_acceptance=0.01
    )
    if not has_prior:
        weights, squares = plain_model()
        drafter.load_state(drafter.state() | {"weights": weights, "squares": squares})

    def observe_steps(num_steps: int, share: float) -> None:
        for _ in range(num_steps):
            rows = [
                Row(prompt_id=int(p), rollout=tuple(texts[int(p)][at - 5 : at]), group=k)
                for k, (p, at) in enumerate(zip(rng.integers(0, 40, 8), rng.integers(6, 50, 8), strict=True))
            ]
            batch = draft_rows(rows)
            drafts = drafter.propose(batch)
            paths = [likeliest_path(drafts, b) for b in range(8)]
            counts = np.array([int(np.cumprod(rng.random(len(path)) < share).sum()) for path in paths], np.int64)
            drafter.observe(batch, counts, None, counts - 1)

    observe_steps(120, 0.7)
    assert num_tried(drafter) >= 2000
    before = drafter.state()["reliability"]
    observe_steps(250, 0.7)
    table = drafter.state()["reliability"] - before
    bins = tuple(ReliabilityBin(num_drafted=int(n), estimate=s / n, accepted=a / n) for n, s, a in table if n > 0)
    # The accepted share of n tokens in a bin deviates from 0.7 by about sqrt(0.21 / n). Three times that, plus the
    # noise of AdaGrad on 20 weights, stays far below 0.05 for 4,000 tokens.
    assert sum(item.num_drafted for item in bins) > 4000
    assert calibration_error(bins) < 0.05


def test_nothing_is_drafted_after_a_stop_token_once_learnt() -> None:
    # Old rollouts continue after a stop token; new ones end there, which does not count as a cut-off.
    rng = np.random.default_rng(0)
    texts = {
        p: [*rng.permutation(np.arange(100, 5000))[:20].tolist(), STOP, *rng.integers(10, 60, 20).tolist()]
        for p in range(90)
    }
    drafter = Drafter(store_of({p: {0: [text]} for p, text in texts.items()}), sources=("history",))

    def behind_stop(prompt_ids: range) -> list[int]:
        numbers = []
        for p in prompt_ids:
            batch = draft_rows([Row(prompt_id=p, rollout=tuple(texts[p][:16]))])
            drafts = drafter.propose(batch)
            path = likeliest_path(drafts)
            assert path[: 4 + 1] == texts[p][16:21]
            numbers.append(len(path) - 5)
            accepted, leaf = walk(drafts, 0, texts[p][16:21])
            drafter.observe(batch, np.array([accepted]), None, np.array([leaf]))
        return numbers

    numbers = behind_stop(range(90))
    assert numbers[0] > 5
    # At most one token is left, with an estimate close to the minimum for drafting.
    assert set(numbers[30:]) <= {0, 1}


def test_the_error_weighs_bins_by_their_tokens() -> None:
    bins = (
        ReliabilityBin(num_drafted=100, estimate=0.5, accepted=0.6),
        ReliabilityBin(num_drafted=300, estimate=0.9, accepted=0.9),
    )
    assert calibration_error(bins) == pytest.approx(0.025)


def first_estimates(history: Any, rollout: tuple[int, ...]) -> dict[int, float]:
    """Return the estimate of each possible first token, before any learning."""
    drafts = drafter_of(*history).propose(draft_rows([Row(rollout=rollout)]))
    is_first = drafts.parents == -1
    return dict(zip(drafts.tokens[is_first].tolist(), drafts.acceptance[is_first].tolist(), strict=True))


def test_the_longer_match_is_preferred_and_the_others_stay_branches() -> None:
    estimates = first_estimates([[1, 2, 3], [9, 2, 4], [8, 2, 4], [7, 2, 4]], (1, 2))
    assert list(estimates) == [3, 4]
    assert estimates[3] > 2 * estimates[4]


def test_longer_matches_of_more_rollouts_that_agree_are_surer() -> None:
    longer = [first_estimates([[7, *range(20), 50]], (8, *range(20 - n, 20)))[50] for n in (1, 3, 12)]
    assert longer == sorted(longer)
    assert longer[0] < 0.5 < longer[-1]
    # Each rollout shares one token with the row.
    more = [first_estimates([[20 + k, 1, 2] for k in range(n)], (8, 1))[2] for n in (1, 2, 8)]
    assert more == sorted(more)
    split = first_estimates([[20, 1, 2], [21, 1, 2], [22, 1, 3], [23, 1, 4]], (8, 1))
    assert split[2] < more[1]


ROWS = draft_rows([Row(rollout=(5, 6, 7))])
TRIPLES = [(30, 7, 6), (31, 30, 7), (32, 31, 30), (33, 32, 31)]


def weights_of(token: int, before: int, earlier: int) -> dict[str, int]:
    """Return the index of each weight of `token` after the tokens `earlier`, `before`."""
    return {
        "behind one": FIRST.before + before % NUM_HASHES,
        "token": FIRST.token + token % NUM_HASHES,
        "pair": FIRST.pair + hash_of.py_func(token, before, 0, NUM_PAIRS),
        "triple": FIRST.triple + hash_of.py_func(token, before, earlier + 1, NUM_PAIRS),
    }


@pytest.mark.parametrize("kind", ["behind one", "token", "pair", "triple"])
@pytest.mark.parametrize("place", range(len(TRIPLES)))
def test_a_weight_of_tokens_moves_only_their_estimate(place: int, kind: str) -> None:
    drafter = Drafter(store_of({"q": {0: [[5, 6, 7, 30, 31, 32, 33]] * 2}}), min_acceptance=1e-6)
    plain = drafter.propose(ROWS)
    assert plain.tokens.tolist() == [token for token, _, _ in TRIPLES]
    state = drafter.state()
    state["weights"][weights_of(*TRIPLES[place])[kind]] += 1.0
    drafter.load_state(state)
    moved = np.flatnonzero(drafter.propose(ROWS).acceptance > plain.acceptance + 0.01)
    assert moved.tolist() == [place]


UNKNOWN = -2


def marked(
    drafts: Sequence[Sequence[int]], accepted: Sequence[int], leaves: Sequence[int], was_cut: Sequence[bool]
) -> tuple[list[list[int]], list[int]]:
    """Return the outcome of each row's tokens and of its draft; 9 where nothing is written."""
    offsets, num = np.cumsum([0, *map(len, drafts)]), len(drafts)
    was_accepted, states = np.full(offsets[-1], 9, np.int8), RowStates(*np.full((4, num), 9, np.int64))
    parents = np.array([parent for row in drafts for parent in row], np.int32)
    mark(
        offsets, parents, np.array(accepted, np.int64), np.array(leaves, np.int64), False, np.array(was_cut, np.bool_),
        was_accepted, states, np.arange(num),
    )  # fmt: skip
    # The context had 9 tokens and grows by the accepted ones and the one sampled after them.
    expected = [9 + count + 1 if row else 9 for row, count in zip(drafts, accepted, strict=True)]
    assert states.num_expected.tolist() == expected
    return [was_accepted[a:b].tolist() for a, b in pairwise(offsets)], states.state.tolist()


CHAIN = [-1, 0, 1]
TREE = [-1, 0, 1, 0, -1, 4]
"""Tokens 0 and 4 follow the context, 1 and 3 follow 0, 2 follows 1, 5 follows 4."""


@pytest.mark.parametrize("was_cut", [False, True])
@pytest.mark.parametrize("accepted", range(4))
def test_a_chain_needs_no_leaf(accepted: int, was_cut: bool) -> None:
    assert marked([CHAIN], [accepted], [UNKNOWN], [was_cut]) == marked([CHAIN], [accepted], [accepted - 1], [was_cut])


@pytest.mark.parametrize(
    ("parents", "accepted", "expected", "state"),
    [
        # Nothing was accepted, so every first token was refused.
        (TREE, 0, [0, -1, -1, -1, 0, -1], REFUSED),
        # Without a leaf, the outcome of 0 and 4 and of everything below them is unknown.
        (TREE, 1, [-1, -1, -1, -1, -1, -1], NOT_TRIED),
        (TREE, 2, [-1, -1, -1, -1, -1, -1], NOT_TRIED),
        # A trunk of two tokens, then two branches.
        ([-1, 0, 1, 1], 1, [1, 0, -1, -1], REFUSED),
        ([-1, 0, 1, 1], 2, [1, 1, 0, 0], REFUSED),
        ([-1, 0, 1, 1], 3, [1, 1, -1, -1], NOT_TRIED),
    ],
)
def test_without_a_leaf_a_tree_tells_as_much_as_it_leaves_no_choice(
    parents: list[int], accepted: int, expected: list[int], state: int
) -> None:
    assert marked([parents], [accepted], [UNKNOWN], [False]) == ([expected], [state])


PARENTS = st.integers(0, 12).flatmap(lambda size: st.tuples(*(st.integers(-1, i - 1) for i in range(size))).map(list))


@given(st.lists(st.tuples(PARENTS, st.integers(-1, 11), st.booleans()), max_size=5))
def test_rows_are_marked_by_their_paths(rows: list[tuple[list[int], int, bool]]) -> None:
    rows = [(parents, min(leaf, len(parents) - 1), was_cut) for parents, leaf, was_cut in rows]
    expected, depths = [], []
    for parents, leaf, was_cut in rows:
        path, index = set(), leaf
        while index >= 0:
            path.add(index)
            index = parents[index]
        tried = {i for i, parent in enumerate(parents) if parent in path or parent == -1}
        if was_cut:
            tried -= {i for i, parent in enumerate(parents) if parent == leaf}
        expected.append([1 if i in path else 0 if i in tried else -1 for i in range(len(parents))])
        depths.append(len(path))
    found, states = marked([row[0] for row in rows], depths, [row[1] for row in rows], [row[2] for row in rows])
    assert found == expected
    for state, (parents, leaf, was_cut) in zip(states, rows, strict=True):
        tried = REFUSED if leaf in parents else ACCEPTED
        assert state == (9 if not parents else NOT_TRIED if was_cut else tried)


OBSERVED_ROWS = [Row(rollout=(1,), group=b) for b in range(4)]
MIXED = VerifyCosts(num_tokens=np.array([1, 64]), seconds=np.array([1e-3, 3e-3]))
LOSING = VerifyCosts(num_tokens=np.array([1, 64]), seconds=np.array([1e-6, 2e-6]))


def observing_drafter(costs: VerifyCosts | None = LOSING) -> Drafter:
    drafter = Drafter(store_of({"q": {0: [[1, 2, 3, 4]] * 2}}))
    drafter.use_costs(costs)
    return drafter


def resting() -> tuple[Drafter, DraftRows]:
    """Return a drafter that rests because its drafts gained nothing, and the rows of its latest call."""
    drafter = observing_drafter()
    rows = draft_rows(OBSERVED_ROWS)
    assert drafter.propose(rows).tokens.size > 0
    drafter.observe(rows, np.zeros(4, np.int64))
    assert drafter.propose(rows).tokens.size == 0
    return drafter, rows


def test_a_step_that_rested_may_be_observed_once() -> None:
    drafter, rows = resting()
    before = drafter.state()
    drafter.observe(rows, np.zeros(4, np.int64), np.zeros(4, np.bool_), np.full(4, -1))
    for name, values in before.items():
        np.testing.assert_array_equal(drafter.state()[name], values, strict=True)
    with pytest.raises(StateError, match="once"):
        drafter.observe(rows, np.zeros(4, np.int64))


@pytest.mark.parametrize("costs", [None, MIXED])
def test_observing_drafts_without_tokens_changes_nothing(costs: VerifyCosts | None) -> None:
    always, seldom = observing_drafter(costs), observing_drafter(costs)
    rng, num_empty = np.random.default_rng(0), 0
    for step in range(300):
        # Mix known and unknown contexts, and right and later wrong drafts, so that steps draft, find nothing, and rest.
        is_known = rng.random() < 0.7
        rows = draft_rows([Row(rollout=(1 if is_known else 77,), group=b) for b in range(4)])
        drafts = always.propose(rows)
        assert same_drafts(drafts, seldom.propose(rows))
        truth = [2, 3, 4] if step < 200 else [6000]
        counts, leaves = (np.array(v) for v in zip(*(walk(drafts, b, truth) for b in range(4)), strict=True))
        always.observe(rows, counts, None, leaves)
        num_empty += drafts.tokens.size == 0
        if drafts.tokens.size > 0:
            seldom.observe(rows, counts, None, leaves)
    assert 50 < num_empty < 250


def test_drafts_are_forgotten_where_a_later_call_fails() -> None:
    drafter = observing_drafter(None)
    rows, wrong = draft_rows([Row(rollout=(1,))]), draft_rows([Row(rollout=(1,), group=b) for b in range(300)])
    assert drafter.propose(rows).tokens.size > 0
    wrong.num_tokens[-1] = -1
    with pytest.raises(InputError, match="row 299"):
        drafter.propose(wrong)
    with pytest.raises(StateError, match="propose first"):
        drafter.observe(rows, np.zeros(1, np.int64))
