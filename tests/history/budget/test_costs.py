"""Costs of passes are checked, and impossible ones are refused."""

from typing import Any

import numpy as np
import pytest

from treering.errors import InputError
from treering.history.budget.costs import VerifyCosts


@pytest.mark.parametrize(
    ("num_tokens", "seconds", "message"),
    [
        ([], [], r"one or more, got shapes \(0,\) and \(0,\)"),
        ([1, 2], [1.0], r"as many seconds as sizes.*\(2,\) and \(1,\)"),
        ([[1]], [[1.0]], r"got shapes \(1, 1\)"),
        ([0, 2], [1.0, 1.0], r"ascend from 1 or more.*got \[0, 2\]"),
        ([2, 2], [1.0, 1.0], "sort and smooth them"),
        ([3, 2], [1.0, 1.0], "sort and smooth them"),
        ([1], [0.0], "above 0"),
        ([1], [-1.0], "above 0"),
        ([1, 2], [2.0, 1.0], r"never fall, got \[1, 2\] and \[2.0, 1.0\]"),
        ([1, 2], [1.0, float("nan")], "never fall"),
        ([1], [float("nan")], "above 0"),
        ([1, 2], [1.0, float("inf")], "finite"),
    ],
)
def test_costs_that_no_pass_can_have_are_refused(num_tokens: Any, seconds: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        VerifyCosts(num_tokens=np.array(num_tokens, np.int64), seconds=np.array(seconds))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"num_tokens": [1.0, 8.0]}, r"num_tokens are whole numbers .* got \[1.0, 8.0\]"),
        ({"seconds": ["a", "b"]}, "seconds numbers, got"),
        ({"seconds": [[1.0], [1.0, 2.0]]}, r"one number per entry, got \[\[1.0\], \[1.0, 2.0\]\]; flatten it"),
        ({"prices": 1e-6}, "prices of drafting are a DraftPrices, got 1e-06"),
    ],
)
def test_columns_of_something_else_are_named(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        VerifyCosts(**{"num_tokens": [1, 8], "seconds": [0.1, 0.2], **columns})


def test_lists_are_the_costs_that_arrays_of_them_are() -> None:
    costs = VerifyCosts(num_tokens=[1, 8], seconds=[1, 2.5])  # type: ignore[arg-type]
    assert (costs.num_tokens.dtype, costs.num_tokens.tolist()) == (np.int64, [1, 8])
    assert (costs.seconds.dtype, costs.seconds.tolist()) == (np.float64, [1.0, 2.5])


def test_equal_seconds_and_one_entry_are_costs() -> None:
    for num_tokens, seconds in (([4], [0.1]), ([1, 2, 3], [0.1, 0.1, 0.1])):
        assert VerifyCosts(num_tokens=np.array(num_tokens), seconds=np.array(seconds)).seconds.tolist() == seconds
