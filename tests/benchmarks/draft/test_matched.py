from collections.abc import Callable
from typing import Any

import pytest
from benchmarks.draft.matched import NUM_REPLAYS, at_most


def drafter(drafted: float) -> Callable[[float], dict[str, Any]]:
    """Replay that drafts `drafted` tokens at an acceptance of 0.018, of which the square root is right."""

    def replay(acceptance: float) -> dict[str, Any]:
        found = drafted * 0.018 / acceptance
        return {"tokens_per_step": 1 + found**0.5, "drafted_per_step": found}

    return replay


@pytest.mark.parametrize("drafted", [4.0, 5.6, 7.9, 8.1, 12.0, 40.0, 130.0, 400.0])
def test_as_much_is_drafted_as_the_rival_does_and_no_more(drafted: float) -> None:
    replay = drafter(drafted)
    tried: list[float] = []
    found = at_most(8.0, 0.018, replay(0.018), lambda value: tried.append(value) or replay(value))
    assert found is not None
    acceptance = found["config"]["min_acceptance"]
    assert found == replay(acceptance) | {"config": {"min_acceptance": acceptance}}
    # Eight halvings of the ratio of 0.3 to 0.018 leave 1.1 % of it.
    assert 7.9 < found["drafted_per_step"] <= 8.0
    assert all(0.005 < value < 1 for value in tried)
    assert drafted == 400.0 or max(tried) <= 0.3
    assert len(tried) == len(set(tried)) <= NUM_REPLAYS == 9


def test_a_drafter_that_always_drafts_more_has_no_row() -> None:
    assert at_most(8.0, 0.018, drafter(1e4)(0.018), drafter(1e4)) is None
