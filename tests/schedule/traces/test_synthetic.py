import math

import numpy as np
import pytest

from treering.errors import InputError
from treering.schedule.policy import Forecast
from treering.schedule.traces.distort import distort
from treering.schedule.traces.stability import MATH_SHARE, noise_for_stability, sigma_for_stability, stable_trace
from treering.schedule.traces.synthetic import parse_law, synthetic_trace
from treering.schedule.traces.trace import Trace, TraceStep


def drawn(text, count=40_000, seed=0):
    law = parse_law(text)
    return law.sample(np.random.default_rng(seed), count)


def test_a_lognormal_law_has_its_median_and_its_sigma():
    lengths = drawn("lognormal:8.2,0.8,16384")
    assert np.median(lengths) == pytest.approx(math.exp(8.2), rel=0.02)
    assert np.log(lengths).std() == pytest.approx(0.8, rel=0.02)


def test_an_exponential_law_has_its_mean_and_no_memory():
    lengths = drawn("exponential:5000")
    assert lengths.mean() == pytest.approx(5000, rel=0.02)
    assert (lengths > 5000).mean() == pytest.approx(math.exp(-1), rel=0.03)


def test_a_bimodal_law_has_its_share_of_long_ones():
    lengths = drawn("bimodal:100,10000,0.25,0.1")
    long = lengths > 1000
    assert long.mean() == pytest.approx(0.25, abs=0.01)
    assert np.median(lengths[long]) == pytest.approx(10_000, rel=0.02)
    assert np.median(lengths[~long]) == pytest.approx(100, rel=0.02)
    assert np.log(lengths[~long]).std() == pytest.approx(0.1, rel=0.03)
    # Without a spread it is 0.3.
    assert np.log(drawn("bimodal:100,100,0.5")).std() == pytest.approx(0.3, rel=0.03)


LAWS = ("lognormal:8.2,0.8,16384", "exponential:5000,16384", "bimodal:1500,9000,0.2,0.3,16384")


def pairs(trace):
    predicted = np.concatenate([step.forecast.lengths for step in trace.steps])
    return predicted, np.concatenate([step.lengths for step in trace.steps])


def test_predictions_miss_by_the_noise_that_was_asked_for():
    trace = synthetic_trace("lognormal:8.2,0.3", num_steps=4, num_rollouts=5000, noise=0.25, seed=1)
    predicted, actual = pairs(trace)
    assert [step.num_rollouts for step in trace.steps] == [5000] * 4
    errors = np.log(predicted / actual)
    assert errors.std() == pytest.approx(0.25, rel=0.03)
    assert errors.mean() == pytest.approx(0.0, abs=0.01)
    # The error has nothing to do with the length.
    assert np.corrcoef(errors, np.log(actual))[0, 1] == pytest.approx(0.0, abs=0.03)


def test_neither_lengths_nor_predictions_leave_the_limits():
    trace = synthetic_trace("lognormal:5,3,900", num_steps=3, num_rollouts=2000, noise=1.0, seed=1)
    assert trace.max_tokens == 900
    for values in pairs(trace):
        assert (values.min(), values.max()) == (1, 900)
    unlimited = synthetic_trace("exponential:100", num_steps=3, num_rollouts=2000, noise=1.0, seed=1)
    assert unlimited.max_tokens == pairs(unlimited)[1].max() == pairs(unlimited)[0].max()


@pytest.mark.parametrize("spec", LAWS)
@pytest.mark.parametrize("share", [MATH_SHARE, 0.28])
def test_groups_move_up_as_often_as_was_asked_for(spec, share):
    spread = sigma_for_stability(spec, share, group_size=16, num_rollouts=8192)
    trace = stable_trace(spec, num_steps=2, num_rollouts=16_384, group_size=16, spread=spread, seed=9)
    moved = []
    for step in trace.steps:
        # Equal eighths of the lengths; a prompt belongs where the middle of its predictions' ranks lies.
        real = np.argsort(np.argsort(step.lengths)) // (16_384 // 8)
        predicted = step.forecast.lengths
        ranks = np.searchsorted(np.sort(predicted), predicted, "left") + np.searchsorted(
            np.sort(predicted), predicted, "right"
        )
        moved.append((real > ranks / 2 * 8 // 16_384).mean())
    assert np.mean(moved) == pytest.approx(share, abs=0.015)


@pytest.mark.parametrize("spec", LAWS)
def test_rollouts_that_end_early_make_moves_near(spec):
    spread, early = noise_for_stability(spec, 0.28, 0.24)
    assert 0 < early < 0.5
    size = 32_768
    (step,) = stable_trace(spec, num_steps=1, num_rollouts=size, spread=spread, early=early, seed=9).steps
    for found, asked in zip(moves(step), (0.24, 0.28), strict=True):
        # It was solved with 1,024 prompts: three standard errors of the difference between their mean and this one.
        by_prompt = found.reshape(-1, 16).mean(axis=1)
        error = by_prompt.std() * np.sqrt(1 / 1024 + 1 / by_prompt.size)
        assert found.mean() == pytest.approx(asked, abs=3 * error)
    # By spread alone far fewer stay near: the paper's figures of code are out of its reach.
    alone = sigma_for_stability(spec, 0.28)
    (plain,) = stable_trace(spec, num_steps=1, num_rollouts=size, spread=alone, seed=9).steps
    assert moves(plain)[0].mean() < 0.16


def moves(step) -> tuple[np.ndarray, np.ndarray]:
    """Which rollouts are one group up in its shorter half, and which are up at all, by ranks counted here."""
    predicted, size = step.forecast.lengths, step.lengths.size
    ordered = np.sort(predicted)
    planned = (np.searchsorted(ordered, predicted, "left") + np.searchsorted(ordered, predicted, "right")) / 2
    real = np.argsort(np.argsort(step.lengths, kind="stable"), kind="stable") / size * 8
    group = np.floor(planned / size * 8)
    up = np.floor(real) > group
    return up & (real < group + 1.5), up


def test_spread_alone_gives_what_mathematics_has():
    spread, early = noise_for_stability(LAWS[0], MATH_SHARE, 0.12)
    assert (spread, early) == (sigma_for_stability(LAWS[0], MATH_SHARE, num_rollouts=16384), 0.0)


def test_a_prompt_without_spread_has_its_length_but_for_what_ends_early():
    trace = stable_trace("lognormal:8.2,0.8", num_steps=1, num_rollouts=16_000, spread=0.0, early=0.2, seed=3)
    parts = trace.steps[0].lengths / trace.steps[0].forecast.lengths
    is_whole = np.isclose(parts, 1.0, atol=1e-3)
    assert is_whole.mean() == pytest.approx(0.8, abs=0.02)
    assert parts[~is_whole].mean() == pytest.approx(0.5, abs=0.02)


def test_the_spread_lies_within_prompts_and_the_law_between_them():
    trace = stable_trace("lognormal:8.2,0.8", num_steps=1, num_rollouts=16_000, group_size=16, spread=0.3, seed=2)
    logs = np.log(trace.steps[0].lengths).reshape(-1, 16)
    assert logs.std(axis=1, ddof=1).mean() == pytest.approx(0.3, rel=0.05)
    assert logs.mean(axis=1).std() == pytest.approx(np.hypot(0.8, 0.3 / 4), rel=0.05)
    predicted = np.log(trace.steps[0].forecast.lengths).reshape(-1, 16)
    assert np.ptp(predicted, axis=1).max() == 0.0
    # The median of 16 others: off by 1.25 times their standard error.
    assert (predicted[:, 0] - logs.mean(axis=1)).std() == pytest.approx(np.hypot(1.22, 1.0) * 0.3 / 4, rel=0.1)


@pytest.mark.parametrize(
    "wrong", [{"num_steps": 0}, {"num_rollouts": 0}, {"group_size": 0}, {"group_size": 3}, {"noise": -1.0}]
)
def test_counts_that_do_not_fit_are_refused(wrong):
    given = {"num_steps": 1, "num_rollouts": 4, "group_size": 2} | wrong
    with pytest.raises(InputError):
        synthetic_trace("constant:5", seed=0, **given)
    spread = -1.0 if "noise" in wrong else 0.1
    given.pop("noise", None)
    with pytest.raises(InputError):
        stable_trace("constant:5", seed=0, spread=spread, **given)


@pytest.mark.parametrize(
    "text",
    ["lognormal:8", "lognormal:8,-1", "lognormal:8,1,1.5", "lognormal:a,b", "exponential:0", "exponential:",
     "bimodal:5,4,0.5", "bimodal:3,4,1.5", "bimodal:3,4,0.5,1,2,3", "constant:1.5", "normal:1,2", "lognormal"],
)  # fmt: skip
def test_what_is_no_law_is_refused_with_how_it_is_written(text):
    name, colon, _ = text.partition(":")
    known = colon and name != "normal"
    with pytest.raises(InputError, match=f"got '{text}'; write {name}:" if known else r"lognormal:MU,SIGMA\[,MAX\]"):
        parse_law(text)


def test_distorted_predictions_are_reversed_equal_or_dealt_out_anew_and_lengths_stay():
    predicted = np.array([10.0, 30.0, 20.0, 90.0])
    step = TraceStep(lengths=[1, 2, 3, 4], forecast=Forecast(lengths=predicted, prompts=np.arange(4)))
    trace = Trace(steps=(step, step), max_tokens=100)
    for how, expected in (("reversed", [90.0, 20.0, 30.0, 10.0]), ("constant", [25.0] * 4)):
        wrong = distort(trace, how, seed=0)
        assert [each.forecast.lengths.tolist() for each in wrong.steps] == [expected] * 2
        assert [each.lengths.tolist() for each in wrong.steps] == [[1, 2, 3, 4]] * 2
    dealt = [distort(trace, "random", seed=seed).steps[0].forecast.lengths.tolist() for seed in (5, 5, 6)]
    assert sorted(dealt[0]) == sorted(predicted)
    assert dealt[0] == dealt[1] != dealt[2]
