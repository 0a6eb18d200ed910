"""The benchmark of partitions: trees ten times the budget, one gradient however computed, figures that add up."""

from benchmarks.tree.cases import build_model
from benchmarks.tree.partitions import PARENTS, big_chain, big_tree, measure_partitions

BUDGET = 24


def test_both_trees_are_ten_times_the_budget() -> None:
    assert (big_tree().num_tokens, big_tree().num_branches, int(big_tree().branch_length.max())) == (5120, 6, 1536)
    assert (big_chain().num_tokens, big_chain().num_branches) == (5120, 1)


def test_a_report_of_partitions_adds_up() -> None:
    words: list[str] = []
    results = {result.tree: result for result in measure_partitions(build_model(), 1, words.append, budget=BUDGET)}
    assert set(results) == {"tree", "chain"}
    assert words[-1] == "partitions, chain: run 1 of 1"
    for result in results.values():
        ways = {f"{loss} {way}" for loss in ("sft", "gspo") for way in ("whole", *PARENTS)}
        assert (set(result.seconds), set(result.grad_errors)) == (ways, ways)
        assert max(result.grad_errors.values()) < 1e-5
        assert result.scoring_s > 0
        assert (result.unique_tokens, result.num_partitions) == (10 * BUDGET, 10)
        assert result.saved_bytes["recompute"] < result.saved_bytes["keep"]
        assert result.kept_bytes_share <= 1.25
        assert result.recomputed_bytes_share <= 1.25
    assert {name: result.chain_tokens for name, result in results.items()} == {"tree": 3 * BUDGET, "chain": 10 * BUDGET}
    assert results["chain"].num_recomputed_tokens == {"keep": 0, "recompute": 9 * BUDGET}
