import numpy as np

from tests.schedule.clusters import cluster, forecast, trace
from treering.schedule.plan.tail_batching import TailBatching
from treering.schedule.simulator.run import simulate
from treering.schedule.traces.trace import Trace, TraceStep


def lengths_of(run):
    return [step.lengths.tolist() for step in run.steps]


def test_a_window_is_dealt_out_by_predicted_length():
    run = trace([10, 90], [20, 80], predicted=[[1, 9], [2, 8]])
    assert lengths_of(TailBatching(2).rearranged(run)) == [[10, 20], [80, 90]]


def test_windows_do_not_mix_and_steps_keep_their_sizes():
    run = trace([5, 6, 7], [1], [4, 3], [2, 9])
    rearranged = TailBatching(2).rearranged(run)
    assert lengths_of(rearranged) == [[1, 5, 6], [7], [2, 3], [4, 9]]
    assert [step.forecast.lengths.tolist() for step in rearranged.steps] == [[1, 5, 6], [7], [2, 3], [4, 9]]


def test_a_rollout_keeps_its_prompt_and_its_prefill():
    steps = [
        TraceStep(lengths=[9, 1], forecast=forecast([9, 1], [70, 71]), num_prompt_tokens=[5, 6]),
        TraceStep(lengths=[8, 2], forecast=forecast([8, 2], [72, 73])),
    ]
    first, second = TailBatching(2).rearranged(Trace(steps=tuple(steps), max_tokens=9)).steps
    assert (first.forecast.prompts.tolist(), second.forecast.prompts.tolist()) == ([71, 73], [72, 70])
    assert (first.num_prompt_tokens.tolist(), second.num_prompt_tokens.tolist()) == ([6, 0], [0, 5])


def test_a_simulation_runs_the_rearranged_trace():
    # As given, a step of [1, 9] on two workers takes 9 s; dealt out, the steps take 1 and 9.
    run = trace([1, 9], [1, 9])
    timeline = simulate(TailBatching(2), run, workers=cluster(2, 1, staleness=0))
    assert timeline.makespan_s == 10
    assert timeline.policy == "tail_batching"
    assert np.bincount(timeline.steps, weights=timeline.num_rollouts).tolist() == [0, 2, 2]
