import pytest

from tests.schedule.clusters import cluster, forecast, trace
from treering.schedule.cluster import Latency, linear_latency
from treering.schedule.simulator import bound_s, longest_s, work_s
from treering.schedule.traces import TraceStep


def test_work_is_all_tokens_at_the_best_batch_over_all_workers():
    # 400 tokens, 22 s for two of them, two workers.
    (step,) = trace([100] * 4).steps
    assert work_s(step, cluster(2, 2, step_s=20, row_s=1)) == 2200


def test_the_longest_rollout_has_the_fastest_batch_for_itself():
    (step,) = trace([10, 30]).steps
    assert longest_s(step, cluster(2, 2, step_s=20, row_s=1)) == 30 * 21
    # Speculation may make a larger batch the faster one.
    speculation = Latency(num_rows=[1, 2], decode_s=[4.0, 4.0], tokens_per_step=[1.0, 2.0])
    assert longest_s(step, cluster(2, 2, latency=speculation)) == 30 * 2


@pytest.mark.parametrize(
    ("staleness", "expected"),
    # Chains of the longest rollouts, 100, 10, 50 and 20 s, with updates of 5 s each; the total work is 90 s.
    [(0, 180 + 20), (1, 150 + 10), (2, 120 + 10), (3, 105), (9, 105)],
)
def test_steps_that_wait_for_each_other_follow_each_other(staleness, expected):
    run = trace([100], [10], [50], [20])
    latency = linear_latency(step_s=1.0, row_s=0.0, training_s=5.0)
    assert bound_s(run, cluster(2, 1, staleness=staleness, latency=latency)) == expected
    # Every chain counts, not only the one that starts at the first step.
    if staleness:
        later = trace([1], [100], [10], [50], [20])
        assert bound_s(later, cluster(2, 1, staleness=staleness, latency=latency)) == expected


def test_each_step_of_a_chain_but_the_first_loads_weights():
    latency = linear_latency(step_s=1.0, row_s=0.0, load_s=3.0)
    run = trace([100], [100], [100])
    assert bound_s(run, cluster(1, 100, staleness=0, latency=latency)) == 306
    assert bound_s(run, cluster(1, 100, staleness=1, latency=latency)) == 203
    assert bound_s(run, cluster(1, 100, staleness=2, latency=latency)) == 100


def test_prefill_is_work():
    step = TraceStep(lengths=[10, 10], forecast=forecast([10, 10]), num_prompt_tokens=[3, 5])
    latency = linear_latency(step_s=1.0, row_s=0.0, prefill_s=0.5)
    assert work_s(step, cluster(2, 2, latency=latency)) == (10 + 4) / 2
