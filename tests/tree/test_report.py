import pytest

from treering.errors import InputError
from treering.tree.forest import Forest
from treering.tree.plan.costs import CostModel
from treering.tree.plan.plan import plan_batch
from treering.tree.report import report_plan
from treering.types import NAMED_SHAPES

SHAPE = NAMED_SHAPES["qwen3-8b"]
GROUPED = [Forest.from_sequences([[5, 6, 7], [5, 6, 8]]), Forest.from_sequences([[5, 6, 9]])]


def flops(num_tokens: float, num_pairs: float) -> float:
    return 2 * SHAPE.params_per_token * num_tokens + 4 * 36 * 4096 * num_pairs


def test_possible_sharing_merges_across_forests_and_planned_does_not() -> None:
    report = report_plan(GROUPED, plan_batch(GROUPED), SHAPE)
    # 9 flat tokens; 5 merged (5 6 7 8 9), 4 + 3 planned. Pairs: 18 flat, 3 + 3 x 3 merged, 9 + 6 planned.
    assert report.possible_sharing == pytest.approx(4 / 9)
    assert report.planned_sharing == report.achieved_sharing == pytest.approx(2 / 9)
    assert (report.token_bound, report.token_speedup) == (pytest.approx(9 / 5), pytest.approx(9 / 7))
    assert report.flop_bound == pytest.approx(flops(9, 18) / flops(5, 12))
    assert report.flop_speedup == pytest.approx(flops(9, 18) / flops(7, 15))
    assert report.share_of_token_bound == pytest.approx(5 / 7)
    assert report.share_of_flop_bound == pytest.approx(flops(5, 12) / flops(7, 15))
    assert "0.444 possible, 0.222 planned, 0.222 achieved" in report.in_words()
    assert "1.29 of 1.80 (71%)" in report.in_words()


def test_recomputed_tokens_lower_what_is_achieved() -> None:
    report = report_plan(GROUPED, plan_batch(GROUPED), SHAPE, num_recomputed_tokens=2)
    assert report.planned_sharing == pytest.approx(2 / 9)
    assert report.achieved_sharing == pytest.approx(0.0)
    assert report.token_speedup == pytest.approx(1.0)
    # A forward is a third of a token's FLOPs: 2 of 7 tokens once more.
    assert report.flop_speedup == pytest.approx(flops(9, 18) / flops(7, 15) / (1 + 2 / 7 / 3))


def test_partitions_lose_nothing_and_the_gate_does() -> None:
    forest = [Forest.from_sequences([[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8, 9]])]
    whole = report_plan(forest, plan_batch(forest), SHAPE)
    assert whole.share_of_token_bound == whole.share_of_flop_bound == 1.0
    assert report_plan(forest, plan_batch(forest, 4), SHAPE) == whole
    by_segment = CostModel(token_s=0.0, pair_s=0.0, segment_s=1.0)
    gated = report_plan(forest, plan_batch(forest, costs=by_segment), SHAPE)
    assert (gated.possible_sharing, gated.planned_sharing) == (pytest.approx(0.25), 0.0)


def test_an_empty_batch_has_nothing_to_share() -> None:
    report = report_plan([], plan_batch([]), SHAPE)
    assert (report.possible_sharing, report.achieved_sharing) == (0.0, 0.0)
    assert report.share_of_token_bound == report.share_of_flop_bound == 1.0


def test_a_plan_of_other_forests_is_refused() -> None:
    with pytest.raises(InputError, match="9 flat tokens, they have 3"):
        report_plan(GROUPED[1:], plan_batch(GROUPED), SHAPE)
    with pytest.raises(InputError, match=r">= 0, got -1"):
        report_plan(GROUPED, plan_batch(GROUPED), SHAPE, num_recomputed_tokens=-1)
