"""Costs of passes are what a pass can cost, and anything else is refused."""

from typing import Any

import numpy as np
import pytest

from treering.errors import InputError
from treering.history.costs import VerifyCosts


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
    ],
)
def test_costs_that_no_pass_can_have_are_refused(num_tokens: Any, seconds: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        VerifyCosts(num_tokens=np.array(num_tokens, np.int64), seconds=np.array(seconds))


def test_equal_seconds_and_one_entry_are_costs() -> None:
    for num_tokens, seconds in (([4], [0.1]), ([1, 2, 3], [0.1, 0.1, 0.1])):
        assert VerifyCosts(num_tokens=np.array(num_tokens), seconds=np.array(seconds)).seconds.tolist() == seconds
