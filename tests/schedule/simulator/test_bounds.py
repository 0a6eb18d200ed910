import numpy as np
import pytest

from tests.schedule.clusters import cluster, forecast, trace
from treering.schedule.latency import Latency, linear_latency
from treering.schedule.simulator.bounds import bound_s, longest_s, work_s
from treering.schedule.traces.trace import Trace, TraceStep


def test_work_is_all_tokens_at_the_best_batch_over_all_workers():
    # 400 tokens, 22 s for two of them, two workers.
    (step,) = trace([100] * 4).steps
    assert work_s(step, cluster(2, 2, step_s=20, row_s=1)) == 2200


def test_the_best_batch_need_not_be_the_largest():
    # 2 rows gain 2 tokens in 4 s, 4 rows 4 tokens in 16 s.
    latency = Latency(num_rows=[1, 2, 4], decode_s=[3.0, 4.0, 16.0])
    (step,) = trace([10, 20]).steps
    assert work_s(step, cluster(1, 4, latency=latency)) == 30 * 2


def test_prefill_is_work():
    step = TraceStep(lengths=[10, 10], forecast=forecast([10, 10]), num_prompt_tokens=[3, 5])
    latency = linear_latency(step_s=1.0, row_s=0.0, prefill_s=0.5)
    assert work_s(step, cluster(2, 2, latency=latency)) == (10 + 4) / 2


def test_the_longest_rollout_has_the_fastest_batch_for_itself():
    (step,) = trace([10, 30]).steps
    assert longest_s(step, cluster(2, 2, step_s=20, row_s=1)) == 30 * 21
    # Speculation may make a larger batch the faster one.
    speculation = Latency(num_rows=[1, 2], decode_s=[4.0, 4.0], tokens_per_step=[1.0, 2.0])
    assert longest_s(step, cluster(2, 2, latency=speculation)) == 30 * 2


@pytest.mark.parametrize(
    ("staleness", "expected"),
    # Chains of the longest, 100, 10, 50 and 20 s, with updates of 5 s each; the work of all is 90 s.
    [(0, 180 + 20), (1, 150 + 10), (2, 120 + 10), (3, 105), (9, 105)],
)
def test_steps_that_wait_for_each_other_follow_each_other(staleness, expected):
    run = trace([100], [10], [50], [20])
    latency = linear_latency(step_s=1.0, row_s=0.0, training_s=5.0)
    assert bound_s(run, cluster(2, 1, staleness=staleness, latency=latency)) == expected
    # Each chain counts, not that of the first step alone.
    if staleness:
        later = trace([1], [100], [10], [50], [20])
        assert bound_s(later, cluster(2, 1, staleness=staleness, latency=latency)) == expected


def test_all_work_and_one_update_bound_a_run_that_is_full():
    latency = linear_latency(step_s=1.0, row_s=0.0, training_s=5.0)
    assert bound_s(trace([10] * 8, [10] * 8), cluster(2, 2, latency=latency)) == 160 / 4 + 5


def test_each_step_of_a_chain_but_the_first_loads_weights():
    latency = linear_latency(step_s=1.0, row_s=0.0, load_s=3.0)
    run = trace([100], [100], [100])
    assert bound_s(run, cluster(1, 100, staleness=0, latency=latency)) == 306
    assert bound_s(run, cluster(1, 100, staleness=1, latency=latency)) == 203
    assert bound_s(run, cluster(1, 100, staleness=2, latency=latency)) == 100


def test_the_example():
    # 12 equal steps with work 1, longest rollout 2.6 and updates of 0.07.
    step = TraceStep(lengths=[260, *[70] * 2], forecast=forecast(np.ones(3)))
    run = Trace(steps=(step,) * 12, max_tokens=260)
    latency = linear_latency(step_s=0.01, row_s=0.0, training_s=0.07)
    wide, narrow = (cluster(workers, 2, staleness=1, latency=latency) for workers in (2, 1))
    assert work_s(step, wide) == pytest.approx(1.0)
    assert bound_s(run, wide) == pytest.approx(6 * 2.67)
    assert bound_s(run, narrow) == pytest.approx(12 * 2.0 + 0.07)
