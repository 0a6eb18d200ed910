"""Two ranks under torchrun: every rank has the same gradients, and they are those of the stock trainer under DDP."""

from typing import Any

import pytest

from tests.integrations.trl import runs
from tests.integrations.trl.ddp_run import CASES
from tests.integrations.trl.launch import on_ranks

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saved."""
    folder = tmp_path_factory.mktemp("ddp")
    return on_ranks(2, "ddp_run", folder, runs.saved(), runs.saved(seed=1))


@pytest.mark.parametrize("name", CASES)
def test_ranks_are_bitwise_equal_and_gradients_those_of_stock_ddp(name: str, ranks: list[dict[str, Any]]) -> None:
    for side in ("ours", "grouped"):
        first, second = (rank[f"{name}/{side}"] for rank in ranks)
        for ours, theirs in zip(first, second, strict=True):
            assert all(theirs[weight].equal(grad) for weight, grad in ours.items())
    assert runs.apart(ranks[0][f"{name}/ours"][:1], ranks[0][f"{name}/stock"][:1]) <= 1e-6
    assert runs.apart(ranks[0][f"{name}/ours"], ranks[0][f"{name}/stock"]) <= 3e-6


@pytest.mark.parametrize("name", ["grpo accumulated", "sft"])
def test_every_rank_logs_the_ratio_of_all_ranks(name: str, ranks: list[dict[str, Any]]) -> None:
    first, second = (rank[f"{name}/grouped/ratio"] for rank in ranks)
    assert first == second
    assert max(ratio for ratio in first if ratio is not None) > 1.2
