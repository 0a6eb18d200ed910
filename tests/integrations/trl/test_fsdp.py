"""FSDP2 by Accelerate on 2 and 4 ranks: gradients and weights are those of the stock trainer, sharded the same."""

from typing import Any

import pytest

from tests.integrations.trl import runs
from tests.integrations.trl.fsdp_run import CASES, REFUSALS
from tests.integrations.trl.launch import on_ranks
from tests.integrations.trl.test_exactness import GRADIENTS

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.slow]

FOUR = ("sft tied", "grpo offloaded checkpointed")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What each rank saved, by their number."""
    names = {2: [name for name in CASES if name not in FOUR] + [*REFUSALS], 4: list(FOUR)}
    return {num: on_ranks(num, "fsdp_run", tmp_path_factory.mktemp("fsdp"), *given) for num, given in names.items()}


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_weights_are_those_of_stock_fsdp(name: str, ranks: dict[int, list[dict[str, Any]]]) -> None:
    for saved in ranks[4 if name in FOUR else 2]:
        ours, stock = saved[f"{name}/ours"], saved[f"{name}/stock"]
        assert len(stock) == 3
        assert runs.apart(ours[:1], stock[:1]) <= 1e-6
        assert runs.apart(ours, stock) <= GRADIENTS
        assert runs.apart([saved[f"{name}/ours/weights"]], [saved[f"{name}/stock/weights"]]) <= 1e-6
        assert min(saved[f"{name}/ours/ratio"]) > 1


def test_a_wrong_tree_on_one_rank_stops_all(ranks: dict[int, list[dict[str, Any]]]) -> None:
    first, second = (saved["wrong"] for saved in ranks[2])
    assert first == second
    assert "the first micro-batch's gradients on trees" in first


def test_pictures_on_one_rank_alone_are_refused_on_all(ranks: dict[int, list[dict[str, Any]]]) -> None:
    first, second = (saved["pictures on one rank"] for saved in ranks[2])
    assert first == second
    assert "rank 0 has pictures where rank 1 has none" in first
