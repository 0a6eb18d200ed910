"""Estimates follow observed acceptance, ignore untried tokens, and are calibrated."""

import math
from typing import Any

import numpy as np
import pytest
from numba import njit

from tests.history.reference import Row, draft_rows, likeliest_path, store_of, walk
from treering.history.draft.acceptance import (
    NUM_TRAINED,
    OFFSET,
    SCALE,
    ReliabilityBin,
    calibration_error,
    estimate,
    learn,
)
from treering.history.draft.drafter import Drafter
from treering.history.features import FIRST, NUM_GENERAL_KINDS, NUM_KINDS, NUM_VOTES, SIZES

ROW = Row(rollout=(1,))
STOP = 9


@njit
def estimate_of(weights: np.ndarray, shares: np.ndarray, features: np.ndarray) -> float:
    """The compiled estimate, called from a compiled function as it is made for."""
    return float(estimate(weights, shares, features))


def drafter_of(*rollouts: list[int], **options: Any) -> Drafter:
    store = store_of({"q": {0: rollouts or [[1, 2, 3, 4]] * 2}})
    return Drafter(store, **{"min_acceptance": 1e-6, "sources": ("history",), **options})


def observe(drafter: Drafter, truth: tuple[int, ...], *, row: Row = ROW, ended: bool = False) -> list[float]:
    """The estimates before an observation of what the row went on with."""
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
    # The first step of a phase is still that of the phase before; a later row differs by what came of the one before.
    for estimates, sign in ((rising[2:], 1), (falling[2:], -1), (again[2:], 1)):
        assert (sign * np.diff(estimates) > 0).all()
    assert rising[-1] > 0.95
    assert falling[-1] < 0.35
    assert again[-1] > 0.6


def plain_model() -> tuple[np.ndarray, np.ndarray]:
    """Weights that are 0 but for a scale of 1, and the squares that they begin with."""
    weights, squares = np.zeros(NUM_TRAINED), np.full(NUM_TRAINED, 4.0)
    weights[SCALE], squares[SCALE], squares[OFFSET] = 1, 100, 100
    return weights, squares


def one_observation(was_accepted: int, *, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Weights and squares after a candidate with shares 0.5 each and the first feature of each kind."""
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
    # The bias is 2, all other weights are 0; what the scale makes of the logit is not the model's error.
    error = was_accepted - 1 / (1 + math.exp(-2))
    touched, rates = list(FIRST), np.where(np.arange(NUM_KINDS) < NUM_GENERAL_KINDS, 0.15, 0.4)
    moved = weights[touched] - np.eye(NUM_KINDS)[0] * 2
    # Beside a weight of 2, a float32 keeps a step of 0.05 to five digits.
    np.testing.assert_allclose(moved, rates * error / math.sqrt(4 + error**2), rtol=1e-4)
    np.testing.assert_allclose(squares[touched], 4 + error**2, rtol=1e-6)
    np.testing.assert_allclose(weights[:NUM_VOTES], 0.02 * error / 2 / math.sqrt(4 + error**2 / 4), rtol=1e-6)
    others = np.setdiff1d(np.arange(NUM_VOTES, SCALE), touched)
    assert not weights[others].any()


@pytest.mark.parametrize("was_accepted", [0, 1])
def test_scale_and_offset_move_by_the_error_of_the_estimate(was_accepted: int) -> None:
    weights, squares = one_observation(was_accepted, scale=0.5)
    # A logit of 2 is estimated as the logistic of 0.5 * 2.
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
    # A straight line between 64 values of the logistic for each 1 of a logit.
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
    # Of n tokens in a bin the share accepted strays by sqrt(0.21 / n) from 0.7; three times that, and what AdaGrad
    # on 20 weights at once wavers, once scaled, is far less than 0.05 of these 4,000.
    assert sum(item.num_drafted for item in bins) > 4000
    assert calibration_error(bins) < 0.05


def test_nothing_comes_behind_a_stop_token_once_that_was_seen() -> None:
    # Old rollouts that went on behind a stop token; new ones end there, and that is no cut-off.
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
    # What is left is the one token whose estimate is about the least that is drafted.
    assert set(numbers[30:]) <= {0, 1}


def test_the_error_weighs_bins_by_their_tokens() -> None:
    bins = (
        ReliabilityBin(num_drafted=100, estimate=0.5, accepted=0.6),
        ReliabilityBin(num_drafted=300, estimate=0.9, accepted=0.9),
    )
    assert calibration_error(bins) == pytest.approx(0.025)


def first_estimates(history: Any, rollout: tuple[int, ...]) -> dict[int, float]:
    """The estimate of each token that a draft may begin with, before anything was learnt."""
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
    # Each rollout agrees in one token with the row.
    more = [first_estimates([[20 + k, 1, 2] for k in range(n)], (8, 1))[2] for n in (1, 2, 8)]
    assert more == sorted(more)
    split = first_estimates([[20, 1, 2], [21, 1, 2], [22, 1, 3], [23, 1, 4]], (8, 1))
    assert split[2] < more[1]
