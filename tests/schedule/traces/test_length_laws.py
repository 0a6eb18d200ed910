import math

import numpy as np
import pytest

from treering.errors import InputError
from treering.schedule.traces.synthetic import parse_law


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


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("lognormal:8.2,0.8", None),
        ("lognormal:8.2,0.8,16384", 16384),
        ("exponential:500", None),
        ("exponential:500,900", 900),
        ("bimodal:1,2,0.5", None),
        ("bimodal:1,2,0.5,0.1", None),
        ("bimodal:1,2,0.5,0.1,40", 40),
        ("constant:7", 7),
    ],
)
def test_a_limit_is_the_last_number_where_there_is_one(text, limit):
    assert parse_law(text).max_tokens == limit


@pytest.mark.parametrize(
    "text",
    [
        "lognormal:8",
        "lognormal:8,1,2,3",
        "lognormal:8,-1",
        "lognormal:8,1,0",
        "lognormal:8,1,1.5",
        "lognormal:8,nan",
        "lognormal:a,b",
        "exponential:0",
        "exponential:5,6,7",
        "exponential:",
        "bimodal:5,4,0.5",
        "bimodal:0,4,0.5",
        "bimodal:3,4,1.5",
        "bimodal:3,4,0.5,-1",
        "bimodal:3,4,0.5,1,2,3",
        "constant:0",
        "constant:1.5",
        "constant:1,2",
    ],
)
def test_numbers_that_are_no_law_are_refused_with_how_it_is_written(text):
    name = text.split(":")[0]
    with pytest.raises(InputError, match=f"got '{text}'; write {name}:"):
        parse_law(text)


@pytest.mark.parametrize("text", ["", "normal:1,2", "lognormal", "uniform", " lognormal:8,1"])
def test_another_law_is_refused_with_those_that_there_are(text):
    with pytest.raises(InputError, match=r"lognormal:MU,SIGMA\[,MAX\]; exponential"):
        parse_law(text)
