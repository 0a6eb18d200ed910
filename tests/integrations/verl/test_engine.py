"""The tree engine against verl's own: outputs, gradients and computed tokens, on one and on two gloo ranks."""

import importlib.util
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed: make verl-test", allow_module_level=True)

from tests.integrations.verl.common import ROOT, environment, num_distinct

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.slow]

# Both sides compute in float32 in different orders; a wrong weight or token changes a gradient by far more.
TOLERANCE = 1e-5
SYSTEM_TOKENS, PROMPT_TOKENS = 5, 12


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results that each rank saved."""
    folder, size = tmp_path_factory.mktemp("ranks"), request.param
    command = [sys.executable, "-m", "tests.integrations.verl.engine_run", str(folder)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(size)], cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]
    errors = [process.communicate(timeout=500)[1] for process in processes]
    if any(process.returncode for process in processes):
        pytest.fail("\n".join(error[-3000:] for error in errors))
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(size)]


def relative(ours: torch.Tensor, stock: torch.Tensor) -> float:
    return float((ours - stock).norm() / stock.norm().clamp(min=1e-3))


def test_gradients_and_outputs_are_those_of_verls_engine(ranks: list[dict[str, Any]]) -> None:
    cases = [name.removesuffix("/tree") for name, saved in ranks[0].items() if "gradients" in saved and "/tree" in name]
    assert len(cases) == 7
    for case in cases:
        for rank in ranks:
            stock, ours = (rank[f"{case}/{side}"] for side in ("stock", "tree"))
            assert ours["gradients"].keys() == stock["gradients"].keys()
            for name, grad in stock["gradients"].items():
                assert grad.norm() > 0
                assert relative(ours["gradients"][name], grad) <= TOLERANCE, (case, name)
            check_outputs(ours["outputs"], stock["outputs"], rank["rows"])
        # A row's loss is counted on the rank that computes it.
        stock_loss, our_loss = (sum(rank[f"{case}/{side}"]["loss"] for rank in ranks) for side in ("stock", "tree"))
        assert our_loss == pytest.approx(stock_loss, rel=TOLERANCE, abs=TOLERANCE), case


def test_log_probs_of_inference_are_those_of_verls_engine(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        check_outputs(rank["inference/tree"], rank["inference/stock"], rank["rows"])


def check_outputs(ours: dict[str, Any], stock: dict[str, Any], rows: list[list[int]]) -> None:
    assert ours.keys() == stock.keys()
    for name in stock:
        assert [value.numel() for value in ours[name]] == [len(row) for row in rows]
        # The value at a row's last token belongs to no token of the row; verl's losses skip it.
        pairs = zip(ours[name], stock[name], strict=True)
        torch.testing.assert_close(
            *map(torch.cat, zip(*((a[:-1], b[:-1]) for a, b in pairs), strict=True)), rtol=TOLERANCE, atol=TOLERANCE
        )


def test_each_distinct_token_is_computed_once_though_each_group_came_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    rows = [row for rank in ranks for row in rank["rows"]]
    trained = [rank["ppo in one micro-batch/tree"] for rank in ranks]
    computed = [sum(rank["tokens"]) for rank in trained]
    # Groups are whole, so ranks share only the beginning of all prompts.
    assert sum(computed) == num_distinct(rows) + SYSTEM_TOKENS * (len(ranks) - 1)
    flat = [rank["tree/token_ratio"][0] * own for rank, own in zip(trained, computed, strict=True)]
    assert sum(flat) == pytest.approx(sum(map(len, rows)))


def test_with_the_off_switch_each_rank_computes_its_own_rows(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["off"]["tokens"] == [num_distinct(rank["rows"])]
        assert len(ranks) == 1 or rank["off"]["tokens"] > rank["ppo in one micro-batch/tree"]["tokens"]


def test_ranks_run_equally_many_micro_batches(ranks: list[dict[str, Any]]) -> None:
    assert len({len(rank["ppo in dynamic micro-batches/tree"]["tokens"]) for rank in ranks}) == 1


@pytest.mark.parametrize("step", ["step", "grouped step"])
def test_a_ppo_step_moves_the_weights_as_verls_engine_does(step: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        stock, ours = rank[f"{step}/stock"], rank[f"{step}/tree"]
        assert (stock["engine"], ours["engine"]) == ("FSDPEngineWithLMHead", "TreeEngine")
        for name, before in stock["before"].items():
            update, error = stock["after"][name] - before, ours["after"][name] - stock["after"][name]
            assert update.norm() > 0
            # Three updates, and the rounding of the weights in each.
            assert error.norm() <= 3 * (TOLERANCE * update.norm() + 2**-23 * before.norm()), name
        metrics = dict(ours["metrics"])
        assert all(ratio > 1 for ratio in metrics.pop("tree/token_ratio"))
        assert metrics.keys() == stock["metrics"].keys()
        for name, values in stock["metrics"].items():
            assert metrics[name] == pytest.approx(values, rel=4 * TOLERANCE, abs=4 * TOLERANCE), name


def test_mini_batches_of_whole_groups_compute_each_token_of_a_group_once(ranks: list[dict[str, Any]]) -> None:
    groups: dict[tuple[int, ...], list[list[int]]] = {}
    for row in (row for rank in ranks for row in rank["rows"]):
        groups.setdefault(tuple(row[:PROMPT_TOKENS]), []).append(row)
    cut, whole = (sum(sum(rank[f"{step}/tree"]["tokens"]) for rank in ranks) for step in ("step", "grouped step"))
    # A mini-batch has a group for each rank.
    assert whole == sum(map(num_distinct, groups.values())) < cut
    assert {len(rank["grouped step/tree"]["metrics"]["grad_norm"]) for rank in ranks} == {3}


def test_shuffled_rows_are_refused_where_mini_batches_have_whole_groups(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert re.search(r"actor.shuffle=True separates groups.*set False", rank["refusal"])
