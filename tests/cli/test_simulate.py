import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from treering.cli.simulate import SimulateOptions
from treering.cli.simulation import ONE_STEP_OFF, SYNC, compare, make_cases, run
from treering.errors import ConfigError, InputError
from treering.schedule.histopipe import POLICIES, make_policy
from treering.schedule.simulator import simulate
from treering.schedule.traces import read_trace

SMALL = SimulateOptions(
    num_workers=4, num_slots=8, num_rollouts=64, num_steps=4, lengths="lognormal:4,0.8,500", decode="1000,100"
)
REQUIRED = {"policy", "makespan_s", "throughput_of_bound", "bubble", "staleness_max", "speedup_over_sync"}


def report_of(capsys: pytest.CaptureFixture[str], options: SimulateOptions) -> dict:
    run(replace(options, json_output=True))
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Build three epochs of 8 prompts with 4 rollouts each, where prompt p has around 20 (p + 1) tokens."""
    random = np.random.default_rng(0)
    rows = [
        {
            "prompt": prompt,
            "epoch": epoch,
            "length": int(20 * (prompt + 1) + random.integers(-5, 6)),
            "prompt_tokens": 7,
        }
        for epoch in range(3)
        for prompt in range(8)
        for _ in range(4)
    ]
    file = tmp_path / "log.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def test_the_json_has_the_bound_and_a_row_for_every_policy(capsys):
    report = report_of(capsys, SMALL)
    assert report.keys() == {"lower_bound_s", "policies"}
    assert [row["policy"] for row in report["policies"]] == ["sync", *POLICIES]
    for row in report["policies"]:
        assert row.keys() >= REQUIRED
        expected = 0 if row["policy"] == "sync" else 1
        assert (row["staleness"], row["staleness_max"]) == (expected, expected)
        assert 0 < row["throughput_of_bound"] <= 1
        assert 0 <= row["bubble"] < 1
    [sync] = [row for row in report["policies"] if row["policy"] == "sync"]
    assert sync["speedup_over_sync"] == 1.0
    [other] = [row for row in report["policies"] if row["policy"] == "longest_first"]
    assert report["lower_bound_s"] == other["bound_s"] < sync["bound_s"]


def test_equal_rollouts_take_as_long_as_calculated_by_hand(capsys):
    # 4 workers of 8 slots have 16 rollouts each, of 100 tokens, at 1.8 s a token for 8: two rounds of 180 s.
    options = replace(SMALL, lengths=f"lognormal:{np.log(100)},0", noise=0.0, training=0.5)
    report = report_of(capsys, options)
    rows = {row["policy"]: row for row in report["policies"]}
    # An update takes half of the 360 s; synchronous steps wait for each, the others only for the last one.
    assert rows["sync"]["makespan_s"] == pytest.approx(4 * (360 + 180))
    assert rows["longest_first"]["makespan_s"] == pytest.approx(4 * 360 + 180)
    assert rows["longest_first"]["bubble"] == pytest.approx(0.0, abs=1e-9)
    assert rows["sync"]["bubble"] == pytest.approx(3 * 180 / (4 * 360 + 3 * 180))
    assert rows["longest_first"]["speedup_over_sync"] == pytest.approx(2160 / 1620)
    assert rows["longest_first"]["tokens_per_s"] == pytest.approx(4 * 6400 / 1620)
    assert report["lower_bound_s"] == pytest.approx(1620)


def test_the_same_question_has_the_same_answer_and_another_seed_another(capsys):
    assert report_of(capsys, SMALL) == report_of(capsys, SMALL)
    one, three = (report_of(capsys, replace(SMALL, num_seeds=number)) for number in (1, 3))
    assert one["lower_bound_s"] != three["lower_bound_s"]
    row = three["policies"][-1]
    assert row["worst_speedup_over_sync"] < row["speedup_over_sync"]


def read_log_step(log: Path, at: int, *, staleness: int) -> np.ndarray:
    return read_trace(log, num_rollouts=16, staleness=staleness).steps[at].forecast.lengths


def test_a_log_is_replayed_with_predictions_from_its_past(log, capsys):
    options = SimulateOptions(file=log, num_workers=2, num_slots=8, num_rollouts=16, decode="1000,100", prefill_ms=500)
    [(trace, cluster)] = make_cases(options)
    assert [step.num_rollouts for step in trace.steps] == [16] * 6
    assert (cluster.max_tokens, cluster.latency.prefill_s) == (max(step.lengths.max() for step in trace.steps), 0.5)
    assert set(trace.steps[0].num_prompt_tokens) == {7}
    # A step that is planned two steps ahead knows the previous epoch.
    later = trace.steps[4]
    assert np.abs(later.forecast.lengths / later.lengths - 1).max() < 0.5
    assert np.array_equal(later.forecast.lengths, read_log_step(log, 4, staleness=1))
    assert not np.array_equal(trace.steps[1].forecast.lengths, read_log_step(log, 1, staleness=0))
    report = report_of(capsys, options)
    assert [row["policy"] for row in report["policies"]] == ["sync", *POLICIES]
    assert len(make_cases(replace(options, num_steps=2))[0][0].steps) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": "normal:1,2"}, "a law of lengths must be lognormal:MU,SIGMA"),
        ({"decode": "20"}, "--decode must be STEP,ROW"),
        ({"decode": "20,x"}, "--decode must be STEP,ROW"),
        ({"decode": "0,1"}, "a decode step must take time"),
        ({"decode": "5,-1"}, "a decode step must take time"),
        ({"training": float("inf")}, "--training must be a share"),
        ({"load_s": -1.0}, "load_s must be seconds"),
    ],
)
def test_what_makes_no_case_is_refused(changes, message):
    with pytest.raises((ConfigError, InputError), match=message):
        make_cases(replace(SMALL, **changes))


@pytest.mark.parametrize(
    ("flag", "made_up"),
    [
        ("lengths", {"lengths": "lognormal:2,0"}),
        ("noise", {"noise": 0.0}),
        ("seeds", {"num_seeds": 2}),
    ],
)
def test_a_log_takes_no_options_of_made_up_rollouts(log, flag, made_up):
    with pytest.raises(ConfigError, match=f"FILE has its own rollouts, but --{flag} generates"):
        make_cases(SimulateOptions(file=log, **made_up))


def test_a_row_is_what_the_simulator_finds_of_the_policy_at_its_staleness():
    [(trace, cluster)] = make_cases(SMALL)
    rows = {row["policy"]: row for row in compare(2, [(trace, cluster)])}
    assert [*rows] == [SYNC, *POLICIES] == ["sync", "fifo", "longest_first", "histopipe"]
    sync = simulate(make_policy(ONE_STEP_OFF), trace, workers=replace(cluster, staleness=0))
    for name in ("longest_first", ONE_STEP_OFF):
        alone = simulate(make_policy(name), trace, workers=replace(cluster, staleness=2))
        for figure in ("makespan_s", "bubble", "bound_s", "throughput_of_bound", "tokens_per_s", "num_stolen"):
            assert rows[name][figure] == getattr(alone, figure)
        assert rows[name]["speedup_over_sync"] == sync.makespan_s / alone.makespan_s


def test_several_traces_give_means_and_the_worst():
    cases = make_cases(replace(SMALL, num_seeds=3))
    apart = [compare(1, [case])[-1] for case in cases]
    together = compare(1, cases)[-1]
    assert together["policy"] == "histopipe"
    for name in ("makespan_s", "throughput_of_bound", "bubble", "speedup_over_sync"):
        assert together[name] == pytest.approx(np.mean([row[name] for row in apart]))
    assert together["worst_speedup_over_sync"] == min(row["speedup_over_sync"] for row in apart)
    assert together["worst_throughput_of_bound"] == min(row["throughput_of_bound"] for row in apart)
    assert together["choices"] == apart[0]["choices"]


def test_rehearsals_are_a_row_and_a_sentence_of_their_own(capsys):
    without = report_of(capsys, SMALL)
    report = report_of(capsys, replace(SMALL, rehearse=1e-4))
    *others, row = report["policies"]
    assert others == without["policies"]
    assert (row["policy"], row["staleness"], row["staleness_max"]) == ("rehearsed", 0, 0)
    assert row["speedup_over_sync"] > 1
    assert 0 < row["rehearsed_share"] <= 1
    assert 0.9 < row["kept_share"] <= 1
    assert report == report_of(capsys, replace(SMALL, rehearse=1e-4))
    run(replace(SMALL, rehearse=1.0))
    printed = capsys.readouterr().out
    assert "rehearsed ends the run" in printed
    assert "if a token changes with a chance of 1; 0% of the tokens were sampled early. Its bound" in printed
