"""What the controller's costs make of many workers."""

from benchmarks.weights.scale import scaled

from treering.schedule.traces.synthetic import synthetic_trace


def test_a_step_takes_20_ms_a_token_and_loads_come_on_top() -> None:
    found = scaled(1, 3.0, {"offer_s": 0.5, "message_s": 0.01, "wake_s": 0.001})
    # 32 rollouts on 16 slots, in steps of 20 ms and 0.05 ms a row.
    lengths = synthetic_trace("lognormal:8.2,0.8,16384", num_steps=6, num_rollouts=32, seed=0).steps
    work_s = sum(step.lengths.sum() for step in lengths) / 16 * 0.0208 / 6
    assert work_s <= found["step_without_load_s"] <= 2 * work_s
    assert found["load_s"] == 3.5
    assert 0 < found["step_s"] - found["step_without_load_s"] <= 3.5
    # 128 messages, of which half wake it.
    assert (found["messages_s"], round(found["wakes_s"], 9)) == (1.28, 0.064)
