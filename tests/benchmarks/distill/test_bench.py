"""The distillation benchmark: every way computes the same gradient, and bad names are refused."""

from benchmarks.distill.bench import measure
from benchmarks.tree.cases import star


def test_every_way_leaves_the_gradient_of_one_branch_at_a_time() -> None:
    report = measure(only=["star"], num_runs=1, case=star(prompt=24, response=4, group=3))
    (batch,) = report["batches"]
    assert (batch["flat_tokens"], batch["unique_tokens"], batch["trained_tokens"]) == (84, 36, 12)
    # Far above float32's rounding over a few hundred additions, far below any wrong term.
    assert max(batch["grad_errors"].values()) < 1e-4
    assert 1 < batch["flop_bound"] < 84 / 36
    assert batch["saved_bytes"]["tree"] < batch["saved_bytes"]["packed_chains"]
