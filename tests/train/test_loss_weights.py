"""Loss weights by hand: each normaliser and sharing convention on small masks."""

import numpy as np
import pytest

from treering.errors import ConfigError
from treering.train.entries import entry_counts, entry_weights
from treering.train.objective import Weighting
from treering.tree.forest import Forest

FOREST = Forest.from_sequences([[5, 6, 7], [5, 6, 8], [9, 6]])
MASKS = [np.array([1, 1, 1], bool), np.array([1, 1, 0], bool), np.array([0, 1], bool)]


def weights_of(weighting: Weighting, num_ranks: int = 1) -> list[float]:
    return entry_weights(
        entry_counts([FOREST], MASKS, weighting.shared),
        branch_length=FOREST.branch_length,
        branch_tree=FOREST.branch_tree,
        weighting=weighting,
        sum_over_ranks=lambda totals: num_ranks * totals,
    ).tolist()


def test_counts_ignore_first_tokens_and_share_edges_under_once() -> None:
    assert entry_counts([FOREST], MASKS, "sum").tolist() == [0, 1, 1, 0, 1, 0, 0, 1]
    # Equal tokens of different forests do not share an edge.
    assert entry_counts([FOREST] * 2, MASKS * 2, "once").tolist() == [0, 0.5, 1, 0, 0.5, 0, 0, 1] * 2


def test_once_shares_among_the_branches_that_train_the_edge_only() -> None:
    masks = [np.array([1, 1, 1], bool), np.array([1, 0, 1], bool), np.array([1, 1], bool)]
    assert entry_counts([FOREST], masks, "once").tolist() == [0, 1, 1, 0, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("normalizer", "divisor", "expected"),
    [
        ("sum", None, [0, 1, 1, 0, 1, 0, 0, 1]),
        ("constant", 8.0, [0, 1 / 8, 1 / 8, 0, 1 / 8, 0, 0, 1 / 8]),
        ("token_mean", None, [0, 1 / 4, 1 / 4, 0, 1 / 4, 0, 0, 1 / 4]),
        ("sequence_mean", None, [0, 1 / 6, 1 / 6, 0, 1 / 3, 0, 0, 1 / 3]),
        ("sequence_sum", None, [0, 1 / 3, 1 / 3, 0, 1 / 3, 0, 0, 1 / 3]),
        ("tree_mean", None, [0, 1 / 4, 1 / 4, 0, 1 / 4, 0, 0, 1 / 2]),
    ],
)
def test_normalisers_under_sum(normalizer: str, divisor: float | None, expected: list[float]) -> None:
    weighting = Weighting(normalizer=normalizer, divisor=divisor)  # type: ignore[arg-type]
    assert weights_of(weighting) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("normalizer", "expected"),
    [
        ("token_mean", [0, 1 / 6, 1 / 3, 0, 1 / 6, 0, 0, 1 / 3]),
        ("sequence_sum", [0, 1 / 6, 1 / 3, 0, 1 / 6, 0, 0, 1 / 3]),
        ("sequence_mean", [0, 1 / 9, 2 / 9, 0, 1 / 3, 0, 0, 1 / 3]),
    ],
)
def test_normalisers_under_once_count_an_edge_as_one_entry(normalizer: str, expected: list[float]) -> None:
    assert weights_of(Weighting(normalizer=normalizer, shared="once")) == pytest.approx(expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("normalizer", ["token_mean", "sequence_mean", "sequence_sum", "tree_mean"])
def test_denominators_cover_all_ranks(normalizer: str) -> None:
    weighting = Weighting(normalizer=normalizer)  # type: ignore[arg-type]
    assert weights_of(weighting, num_ranks=2) == pytest.approx([weight / 2 for weight in weights_of(weighting)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalizer": "mean"}, "unknown normalizer 'mean': choose token_mean, sequence_mean"),
        ({"normalizer": "sum", "shared": "first"}, "unknown sharing convention 'first': choose sum, once"),
        ({"normalizer": "constant"}, "divisor must be set if and only if normalizer is 'constant'"),
        (
            {"normalizer": "sum", "divisor": 2.0},
            "divisor must be set if and only if normalizer is 'constant', got 'sum' and 2.0",
        ),
        ({"normalizer": "constant", "divisor": 0.0}, r"divisor must be a positive number, got 0\.0"),
        ({"normalizer": "constant", "divisor": float("inf")}, "divisor must be a positive number, got inf"),
        ({"normalizer": "constant", "divisor": "3"}, "divisor must be a positive number, got '3'"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_impossible_weightings_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Weighting(**options)  # type: ignore[arg-type]
