import json

import pytest

from treering.errors import ConfigError, StateError
from treering.tree.forest import Forest
from treering.tree.plan.costs import CostModel

COSTS = CostModel(token_s=1e-3, pair_s=1.7e-7, segment_s=0.1)


def test_a_forest_costs_its_tokens_pairs_and_segments() -> None:
    costs = CostModel(token_s=1.0, pair_s=100.0, segment_s=10_000.0)
    forest = Forest.from_sequences([[5, 6, 7], [5, 6, 8]])
    assert costs.of(forest) == 4 + 100 * (1 + 2 + 3 + 3) + 10_000 * 3
    assert costs.of_branches(forest) == 6 + 100 * 12 + 10_000 * 2
    assert costs.cost(2, 3, 4) == 2 + 300 + 40_000
    assert costs.of(Forest.from_sequences([])) == 0.0


def test_json_brings_the_same_numbers_back() -> None:
    assert CostModel.from_json(COSTS.to_json()) == COSTS


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1, 2, 3]",
        '"token_s"',
        "{}",
        '{"token_s": 1.0, "pair_s": 1.0}',
        '{"token_s": 1.0, "pair_s": 1.0, "segment_s": -1.0}',
        '{"token_s": 1.0, "pair_s": "fast", "segment_s": 1.0}',
        '{"token_s": Infinity, "pair_s": 1.0, "segment_s": 1.0}',
        '{"token_s": NaN, "pair_s": 1.0, "segment_s": 1.0}',
        '{"token_s": 1.0, "pair_s": 1.0, "segment_s": 1.0, "bias_s": 1.0}',
    ],
)
def test_a_corrupt_file_is_refused_by_what_it_holds(text: str) -> None:
    with pytest.raises(StateError, match="delete it and fit again"):
        CostModel.from_json(text)


def test_costs_are_finite_and_not_negative() -> None:
    with pytest.raises(ConfigError, match=r"pair_s .*>= 0, got -1"):
        CostModel(token_s=1.0, pair_s=-1.0, segment_s=0.0)
    with pytest.raises(ConfigError, match="three zeros"):
        CostModel(token_s=0.0, pair_s=0.0, segment_s=0.0)
    assert json.loads(COSTS.to_json()) == {"token_s": 1e-3, "pair_s": 1.7e-7, "segment_s": 0.1}
