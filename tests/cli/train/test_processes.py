"""`treering train` with worker processes gives the same rollouts and weights, and an account of its time."""

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from tests.cli.runs import Call, metrics_of
from tests.cli.train.test_command import config, prompts
from treering.cli.train_report import timeline_log, times_of
from treering.config.runtime import Schedule
from treering.data import read_trajectories
from treering.errors import StateError
from treering.report.run_data import read_timeline
from treering.schedule.cluster import Latency, linear_latency
from treering.schedule.histopipe import POLICIES

REWARD = "tests.cli.train.test_command:length_of"


def check_timeline(spans: list[dict[str, Any]], *, num_steps: int) -> None:
    """Check that each rollout of a step ends in a worker's span, and the trainer works after the last of them began."""
    assert {span["step"] for span in spans} == set(range(1, num_steps + 1))
    for step in range(1, num_steps + 1):
        own = [span for span in spans if span["step"] == step]
        workers, trainers = ([span for span in own if (span["worker"] is None) == is_it] for is_it in (False, True))
        assert len(trainers) == 1
        # Two prompts in groups of three; the last step of an epoch of five has one prompt.
        assert sum(span["num_rollouts"] for span in workers) == (3 if step == 3 else 6)
        assert all(span["started_s"] <= span["ended_s"] for span in own)
        assert all(span["started_s"] <= trainers[0]["ended_s"] for span in workers)


def rows_of(run_dir: Path) -> list[tuple[object, ...]]:
    files = sorted((run_dir / "rollouts").iterdir())
    return [
        (t.step, t.task_id, t.trial, t.tokens.tolist(), t.reward) for file in files for t in read_trajectories(file)
    ]


def assert_close(left: dict[str, Any], right: dict[str, Any]) -> None:
    """Check that two runs, given by their summaries, end with the same weights."""
    ours, theirs = (AutoModelForCausalLM.from_pretrained(each["checkpoint"]).state_dict() for each in (left, right))
    # float32: which rollouts share a batch, and which ranks add up a sum, decides how it is rounded.
    assert all((ours[name] - theirs[name]).abs().max() < 1e-4 for name in ours)


def test_workers_change_neither_rollouts_nor_weights(folder: Path, train: Call) -> None:
    path = prompts(folder, REWARD)
    plain = train(path, "run.dir=plain")[0]
    several = train(path, "run.dir=several", "runtime.workers=2")[0]
    assert plain["account"] is plain["latency"] is None
    assert plain["total"]["num_updates"] > 0
    assert rows_of(folder / "plain") == rows_of(folder / "several")
    assert not (folder / "plain" / "timeline.jsonl").exists()
    check_timeline(read_timeline(folder / "several"), num_steps=several["num_steps"])
    assert_close(plain, several)


def test_a_stale_run_goes_on_and_its_account_covers_all_of_it(folder: Path, train: Call) -> None:
    path = prompts(folder, REWARD)
    overrides = ("run.dir=out", "runtime.workers=2", "rl.staleness=1", "schedule=longest_first")
    train(path, *overrides, "rl.num_steps=2")
    with pytest.raises(StateError, match=r"rl\.staleness is 1 there"):
        train(path, "run.dir=out", "rl.num_steps=3")
    # The state after a kill just after step 3 began.
    [*_, last] = (folder / "out" / "timeline.jsonl").read_text().splitlines()
    with (folder / "out" / "timeline.jsonl").open("a") as log:
        log.write(last.replace('"step": 2', '"step": 3') + '\n{"step": 3, "wor')
    summary = train(path, *overrides, "rl.num_steps=4", "runtime.workers=1")[0]
    account = summary["account"]
    # Five prompts in steps of 2, 2, 1 and 2, in groups of three.
    assert summary["resumed_from_step"] == 2
    assert account["scheduled"] == account["sampled"] == account["evaluated"] == 3 * 7
    assert account["trained"] + account["without_variance"] + account["reward_errors"] + account["empty"] == 3 * 7
    assert [row["rollout/staleness"] for row in metrics_of(folder / "out")] == [0, 1, 1, 1]
    check_timeline(read_timeline(folder / "out"), num_steps=4)


def test_a_damaged_timeline_is_kept_with_a_warning_and_goes_on_without_its_bad_lines(tmp_path: Path) -> None:
    file, lines = tmp_path / "timeline.jsonl", ['{"step": 1}\n', "broken\n", '{"step": 2}\n', '{"step": 3}\n']
    file.write_text("".join(lines))
    with pytest.warns(UserWarning, match="1 unreadable line"):
        timeline_log(file, 2)
    assert file.read_text() == lines[0] + lines[2]
    assert file.with_name("timeline.jsonl.damaged").read_text() == "".join(lines)


def test_a_run_reports_its_measurements(folder: Path, train: Call) -> None:
    # Every other step has six rollouts, four at a time, so passes have four rows and two. A latency needs 16 passes of
    # each size that nothing slowed down much, and a busy machine slows some. Drafts would reduce the number of passes.
    overrides = ("runtime.workers=1", "engine.max_batch=4", "rl.num_steps=16", "history.drafts=off")
    measured = train(config(folder), "run.dir=queued", *overrides)[0]["latency"]
    assert measured.keys() == {"step_s", "row_s", "prefill_s", "load_s", "training_s"}
    assert min(measured.values()) >= 0
    assert measured["step_s"] + measured["row_s"] > 0
    assert measured["training_s"] > 0
    off = ("runtime.rebalance=none", "runtime.workers=1", "rl.num_steps=1")
    assert train(config(folder), "run.dir=none", *off)[0]["latency"] is None


def test_measured_times_are_a_line() -> None:
    latency = linear_latency(step_s=0.002, row_s=0.0005, prefill_s=0.25, load_s=0.5, training_s=3.0)
    assert times_of(latency) == pytest.approx(
        {"step_s": 0.002, "row_s": 0.0005, "prefill_s": 0.25, "load_s": 0.5, "training_s": 3.0}
    )
    sloped = Latency(num_rows=np.array([1, 2, 9]), decode_s=np.array([0.5, 1.0, 4.5]))
    assert times_of(sloped)["step_s"] == pytest.approx(0.0)


def test_settings_name_what_there_is() -> None:
    assert get_args(Schedule) == tuple(POLICIES)
