from dataclasses import replace

import numpy as np
import pytest

from tests.schedule.clusters import assignment_request, cluster
from treering.schedule.calibration import CalibratedLengths
from treering.schedule.histopipe import plain_placements, rescaled, search, search_problem
from treering.schedule.placement import Placement, PlacementPolicy
from treering.schedule.simulator import simulate


def lengths_of(num, seed=0, scale=60.0):
    return np.random.default_rng(seed).lognormal(np.log(scale), 0.8, num).clip(1, 500)


def cluster_of(num_workers=8, num_slots=8, **options):
    return cluster(num_workers, num_slots, max_tokens=500, step_s=20.0, row_s=0.5, **options)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_question_has_steps_for_each_turn_from_the_known_forecasts(staleness):
    first, second = np.full(6, 10.0), np.full(9, 20.0)
    problem = search_problem(
        assignment_request(cluster_of(staleness=staleness), first, second), CalibratedLengths(0.0), seed=0
    )
    assert problem.cluster.num_workers == 8
    assert len(problem.traces) == 5
    for drawn in problem.traces:
        assert [step.num_rollouts for step in drawn.steps] == [6, 9] * (2 * (staleness + 1))
        assert [step.forecast.lengths[0] for step in drawn.steps] == pytest.approx([10, 20] * (2 * (staleness + 1)))


def test_drawn_lengths_keep_their_spread():
    calibrated = CalibratedLengths()
    predicted = lengths_of(4000, 1, 100.0)
    real = 2 * predicted * np.exp(0.3 * np.random.default_rng(5).standard_normal(predicted.size))
    calibrated.learn(predicted, np.rint(real).astype(np.int64).clip(1))
    asked = np.tile([50.0, 80.0], 600)
    problem = search_problem(assignment_request(cluster(32, 8, max_tokens=10_000), asked), calibrated, seed=0)
    for drawn in problem.traces:
        step = drawn.steps[0]
        assert step.forecast.lengths == pytest.approx(np.tile([100.0, 160.0], 600), rel=0.05)
        rest = np.log(step.lengths / step.forecast.lengths)
        assert rest.mean() == pytest.approx(0, abs=0.04)
        assert rest.std() == pytest.approx(0.3, rel=0.1)
    assert problem.traces[0].steps[0].lengths.tolist() != problem.traces[1].steps[0].lengths.tolist()


@pytest.mark.parametrize(
    ("num_workers", "num_rollouts", "simulated"),
    [(32, 4096, 32), (1000, 4000, 32), (32, 8192, 16), (64, 65536, 8), (4, 65536, 4)],
)
def test_large_clusters_are_searched_by_a_sample(num_workers, num_rollouts, simulated):
    lengths = np.linspace(1, 400, num_rollouts)
    problem = search_problem(assignment_request(cluster(num_workers, 64), lengths), CalibratedLengths(0.0), seed=0)
    assert problem.cluster.num_workers == simulated
    sampled = problem.traces[0].steps[0].forecast.lengths
    assert sampled.size == round(num_rollouts * simulated / num_workers)
    # The sample has as many rollouts per worker and similar quantiles.
    assert np.quantile(sampled, [0.1, 0.5, 0.9]) == pytest.approx(np.quantile(lengths, [0.1, 0.5, 0.9]), rel=0.04)


def test_no_placement_takes_more_turns_than_the_staleness_allows_or_than_there_are_workers():
    assert max(placement.num_turns for placement in plain_placements(cluster_of(staleness=2))) == 3
    assert max(placement.num_turns for placement in plain_placements(cluster_of(2, staleness=5))) == 2


@pytest.mark.parametrize("num_rollouts", [40, 400])
def test_the_placement_is_as_good_as_any_plain_one_on_draws_that_it_was_not_chosen_by(num_rollouts):
    problem = search_problem(assignment_request(cluster_of(), lengths_of(num_rollouts)), CalibratedLengths(), seed=0)

    def total(placement):
        judging = problem.traces[1:]
        return sum(simulate(PlacementPolicy(placement), drawn, workers=problem.cluster).makespan_s for drawn in judging)

    found = search(problem)
    assert total(found) <= min(total(placement) for placement in plain_placements(problem.cluster)) * (1 + 1e-9)
    # The current placement stays if it is as good, whatever its name.
    assert search(problem, found) == found
    bad = Placement(name="bad", placing="equal_counts", num_turns=2, moving="drain")
    assert total(bad) > 1.01 * total(found)
    assert search(problem, bad) == search(problem)


def seconds(placement, problem):
    return np.array(
        [simulate(PlacementPolicy(placement), drawn, workers=problem.cluster).makespan_s for drawn in problem.traces]
    )


@pytest.fixture(scope="module")
def apart():
    """Return a problem in which a few long rollouts determine the time."""
    return search_problem(
        assignment_request(cluster_of(), np.append(np.full(60, 20.0), [480.0] * 4)), CalibratedLengths(0.0), seed=0
    )


@pytest.fixture(scope="module")
def alike():
    """Return a problem with more rollouts than slots and no long rollouts."""
    return search_problem(assignment_request(cluster_of(), np.full(72, 60.0)), CalibratedLengths(0.0), seed=0)


def test_candidates_are_judged_by_other_draws_than_they_were_chosen_by(apart, alike):
    problem = replace(apart, traces=(apart.traces[0], *alike.traces[1:]))
    found = seconds(search(problem), problem)
    plain = [seconds(placement, problem) for placement in plain_placements(problem.cluster)]
    best_alone = min(plain, key=lambda each: each[0])
    assert found[1:].sum() < 0.98 * best_alone[1:].sum()
    assert found[0] > best_alone[0]


def test_a_present_placement_stays_where_it_is_the_better_one_on_any_draw(apart, alike):
    present = plain_placements(apart.cluster)[1]
    problem = replace(apart, traces=(apart.traces[0], *[alike.traces[1]] * 3, apart.traces[4]))
    found = seconds(search(problem), problem)
    assert found[1:].sum() < 0.99 * seconds(present, problem)[1:].sum()
    assert found[4] > seconds(present, problem)[4]
    assert search(problem, present) == present
    without = replace(problem, traces=problem.traces[:4])
    assert search(without, present) != present


def test_a_present_placement_stays_where_another_is_hardly_better(monkeypatch):
    problem = search_problem(assignment_request(cluster_of(), lengths_of(400)), CalibratedLengths(), seed=0)
    worse = Placement(name="worse", placing="equal_counts", num_turns=2)
    assert search(problem, worse) != worse
    with monkeypatch.context() as hardly:
        hardly.setattr("treering.schedule.histopipe._CLEARLY", 100.0)
        assert search(problem, worse) == worse
    found = search(problem)
    same = Placement(name="the same under an older name", **{name: getattr(found, name) for name in FIELDS})
    assert search(problem, same).name == "the same under an older name"


FIELDS = ("num_turns", "placing", "long_share", "num_long_workers", "stealing", "moving")


def test_a_placement_scales_with_the_cluster():
    placement = Placement(name="long workers", num_turns=2, long_share=0.2, num_long_workers=4)
    assert rescaled(placement, 100, 32).num_long_workers == round(4 * 50 / 16)
    assert rescaled(placement, 32, 32) is placement
    assert rescaled(placement, 1000, 32).long_share == 0.2
    # At least one worker stays for the short rollouts.
    assert rescaled(Placement(name="long workers", long_share=0.2, num_long_workers=7), 3, 8).num_long_workers == 2
    plain = Placement(name="plain")
    assert rescaled(plain, 1000, 32) is plain


def test_turns_do_not_look_free_where_no_update_was_seen():
    """For two workers that are as fast as their rows, overlapping steps only queue their updates."""
    where = cluster(2, 16, max_tokens=64, step_s=1e-6, row_s=1.0)
    assert (
        search(
            search_problem(
                assignment_request(where, lengths_of(512, scale=20.0).clip(1, 64)), CalibratedLengths(), seed=0
            )
        ).num_turns
        == 1
    )
