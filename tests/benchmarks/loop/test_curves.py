"""Learning curves: the summary is what it says."""

import json
from pathlib import Path

import pytest
from benchmarks.loop import curves

from tests.benchmarks.loop.loops import TINY, random_start

RISING = [0.0, 0.0, 0.0, 0.0, 0.5, 0.7, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0]
SLOWER = [0.0, 0.0, 0.0, 0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.8, 0.9, 0.9]
FLAT = [0.25] * 12


def test_final_rewards_are_means_of_the_last_steps_over_seeds() -> None:
    found = curves.summarize([RISING, SLOWER], [RISING, RISING])
    assert found["first"] == 0.0
    assert found["last_of_seeds"] == pytest.approx([1.0, 0.85])
    assert (found["last"], found["last_deviation"]) == pytest.approx((0.925, 0.075))
    assert found["difference_to_plain"] == pytest.approx([0.0, -0.15])


def test_steps_to_a_share_of_the_plain_loops_gain_are_the_first_whose_mean_reaches_it() -> None:
    # Means of three steps: 0.7 after the 7th, 0.867 after the 8th.
    found = curves.summarize([RISING, SLOWER], [RISING, SLOWER])
    # The plain loop's own gain is 1.0 and 0.85, of which 0.8 are 0.8 and 0.68.
    assert found["steps_to_share"] == [8, 9]
    assert found["median_steps_to_share"] == 8.5
    never = curves.summarize([FLAT, RISING], [RISING, RISING])
    assert never["steps_to_share"] == [None, 8]
    assert never["median_steps_to_share"] is None


@pytest.mark.slow
def test_every_side_has_a_curve_of_every_seed_and_the_report_is_json(tmp_path: Path) -> None:
    size = curves.RunSize(**{name: getattr(TINY, name) for name in TINY.__slots__} | {"num_steps": 8})
    report = curves.measure([5], size=size, make=random_start)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    sides = {side["side"]["name"]: side["rewards"] for side in report["sides"]}
    assert list(sides) == ["plain", "staleness 0", "staleness 1"]
    assert [[len(curve) for curve in rewards] for rewards in sides.values()] == [[8], [8], [8]]
    assert [side["side"]["staleness"] for side in report["sides"]] == [0, 0, 1]
    assert report["environment"]["seeds"] == [5]
