"""DeepSpeed's ZeRO-1, 2 and 3 on two ranks: gradients and weights are those of the stock trainer under the same."""

from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: make trl-test")

from tests.integrations.trl import runs
from tests.integrations.trl.launch import on_ranks
from tests.integrations.trl.zero_run import CASES

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saved."""
    return on_ranks(2, "zero_run", tmp_path_factory.mktemp("zero"), *CASES, on_cpu=False)


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_weights_are_those_of_stock_deepspeed(name: str, ranks: list[dict[str, Any]]) -> None:
    for saved in ranks:
        ours, stock = saved[f"{name}/ours"], saved[f"{name}/stock"]
        assert len(stock["gradients"]) == 3
        assert runs.apart(ours["gradients"], stock["gradients"]) <= 1e-6
        assert runs.apart([ours["weights"]], [stock["weights"]]) <= 1e-6
        assert min(ours["ratio"]) > 1
        assert ours["is_partitioned"] == name.endswith("3")
