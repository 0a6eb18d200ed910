"""The intrinsics that copy and choose entries match a loop and a branch."""

from typing import Any

import numpy as np
import pytest
from numba import njit

from treering.history.jit import copy_entries, pick

NUM = 6


@njit
def copied(to: Any, line: int, source: Any) -> None:
    copy_entries(to, line, source, NUM)


@njit
def picked(which: int, first: Any, second: Any, third: Any, at: int) -> Any:
    return pick(which, first, second, third, at)


@pytest.mark.parametrize("kind", [np.int32, np.float32, np.float64])
@pytest.mark.parametrize("line", range(4))
def test_entries_are_copied_to_their_line_and_nowhere_else(line: int, kind: type[np.generic]) -> None:
    to, source = np.full((4, 8), -1, kind), np.arange(1, 10).astype(kind)
    copied(to, line, source)
    wanted = np.full((4, 8), -1, kind)
    wanted[line, :NUM] = source[:NUM]
    assert to.tolist() == wanted.tolist()


@pytest.mark.parametrize("at", [0, 3, 6])
@pytest.mark.parametrize("which", range(3))
def test_the_entry_is_of_the_array_that_was_said(which: int, at: int) -> None:
    arrays = [np.arange(7, dtype=np.int32) + 100 * k for k in range(3)]
    assert picked(which, *arrays, at) == arrays[which][at]
