"""The distillation benchmark: every way leaves one gradient, and bad names are refused."""

from io import StringIO

import pytest
from benchmarks.distill import view
from benchmarks.distill.bench import measure
from benchmarks.tree.cases import star
from rich.console import Console

from treering.errors import InputError


def test_every_way_leaves_the_gradient_of_one_branch_at_a_time() -> None:
    report = measure(only=["star"], num_runs=1, case=star(prompt=24, response=4, group=3))
    (batch,) = report["batches"]
    assert (batch["flat_tokens"], batch["unique_tokens"], batch["trained_tokens"]) == (84, 36, 12)
    # Far above float32's rounding over a few hundred additions, far below any wrong term's.
    assert max(batch["grad_errors"].values()) < 1e-4
    assert 1 < batch["flop_bound"] < 84 / 36
    assert batch["saved_bytes"]["tree"] < batch["saved_bytes"]["packed_chains"]
    console = Console(width=140, record=True, file=StringIO())
    view.show(report, console)
    assert "packed_chains" in console.export_text()


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="nearest names: star"):
        measure(only=["stars"])
