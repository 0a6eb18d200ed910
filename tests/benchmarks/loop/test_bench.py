"""The loop benchmark: runs differ in nothing but their parts, and the arithmetic of parts and whole is what it says."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.loop import bench as loop
from benchmarks.loop.runs import LoopRun, Variant, configuration, count_differing, prompts_of_step, run_loop

from tests.benchmarks.loop.loops import TINY, random_start
from treering.data import Trajectory
from treering.engine.protocol import EngineStats
from treering.rl.step_report import Overlap, Phases, RlStepReport, RolloutReport


def trajectory(tokens: list[int], num_prompt: int = 1) -> Trajectory:
    mask = np.arange(len(tokens)) >= num_prompt
    return Trajectory(task_id="a", tokens=np.array(tokens, np.int32), loss_mask=mask)


def report(rollout_s: float, train_s: float, update_s: float, bubble: float | None = None) -> RlStepReport:
    rollouts = RolloutReport(
        num_rollouts=1,
        num_tokens=1,
        reward_mean=0.0,
        reward_std=0.0,
        num_groups=1,
        num_zero_variance=0,
        num_empty_groups=0,
        num_reward_errors=0,
        num_unscored=0,
        num_empty=0,
        num_overlong=0,
        num_turns=1,
    )
    overlap = None
    if bubble is not None:
        overlap = Overlap(trainer_wait_s=0.0, bubble=bubble, staleness=1, num_stolen=0, num_moved=0, num_resampled=0)
    return RlStepReport(
        step=1,
        epoch=0,
        version=0,
        rollouts=rollouts,
        engine=EngineStats(),
        update=None,
        phases=Phases(rollout_s=rollout_s, train_s=train_s, update_s=update_s, step_s=9.0),
        overlap=overlap,
    )


def run_of(reports: list[RlStepReport], ended: list[float]) -> LoopRun:
    return LoopRun(reports=reports, latest=[[] for _ in reports], ended_s=np.array(ended))


def test_factors_multiply_to_the_product_and_the_ladder_to_the_whole() -> None:
    step_s = {"plain": 8.0, "tree": 4.0, "drafts": 6.5, "runtime": 8.0, "histopipe": 6.4}
    step_s |= {"tree+drafts": 2.5, "tree+drafts+runtime": 2.0, "all": 1.6}
    product = loop.multiply(step_s)
    # 8 / 4, 8 / 6.5 and 8 / 8; overlap is added to the processes: 8 / 6.4.
    assert product["factors"] == pytest.approx({"tree": 2.0, "drafts": 16 / 13, "runtime": 1.0, "overlap": 1.25})
    assert product["product"] == pytest.approx(2.0 * 16 / 13 * 1.25)
    assert product["ladder"] == pytest.approx({"tree": 2.0, "drafts": 1.6, "runtime": 1.25, "overlap": 1.25})
    assert np.prod(list(product["ladder"].values())) == pytest.approx(product["whole"]) == pytest.approx(5.0)


def test_step_times_leave_the_first_epoch_out() -> None:
    run = run_of([report(1.0, 1.0, 0.0)] * 5, [10.0, 12.0, 13.0, 17.0, 18.0])
    assert run.step_s(2) == pytest.approx(2.0)
    assert run.median_step_s(2) == pytest.approx(1.0)


def test_shares_are_of_the_steps_time_and_waits_are_what_is_left() -> None:
    plain = run_of([report(9.0, 9.0, 9.0), report(1.0, 2.5, 0.1), report(1.0, 2.5, 0.1)], [9.0, 13.0, 17.0])
    found = loop.shares([plain], 1)
    assert found == pytest.approx(
        {"rollout": 0.25, "train": 0.625, "update": 0.025, "trainer_waits": 0.35, "engines_wait": 0.75}
    )
    piped = run_of([report(9.0, 9.0, 9.0, 0.9), report(6.0, 2.0, 0.0, 0.2), report(6.0, 2.0, 0.0, 0.4)], [9, 13, 17])
    assert loop.shares([piped], 1) == pytest.approx(
        {"rollout": 1.5, "train": 0.5, "update": 0.0, "trainer_waits": 0.5, "engines_wait": 0.3}
    )


def test_differing_rollouts_are_counted_by_their_place() -> None:
    def run(*texts: list[int]) -> LoopRun:
        return LoopRun(reports=[], latest=[[trajectory(text) for text in texts]], ended_s=np.zeros(0))

    assert count_differing(run([1, 2, 3], [1, 4]), run([9, 2, 3], [1, 4])) == 0
    assert count_differing(run([1, 2, 3], [1, 4]), run([1, 4], [1, 2, 3])) == 2
    assert run([1, 2, 3], [1, 4]).lengths()[0].tolist() == [2, 1]


def test_variants_differ_from_the_plain_loop_in_their_own_parts_only(tmp_path: Path) -> None:
    start = random_start(tmp_path / "start")
    changed: dict[str, Any] = {}
    for variant in loop.VARIANTS:
        config = configuration(start, TINY, variant, seed=3, run_dir=tmp_path / "run")
        changed[variant.name] = (
            config.rl.layout,
            config.history.drafts,
            config.runtime.workers,
            config.schedule,
            config.rl.staleness,
        )
        same = config.model_copy(update={"history": None, "runtime": None, "schedule": None})
        rl = config.rl.model_copy(update={"layout": "tree", "staleness": 0})
        base = configuration(start, TINY, Variant(name="plain"), seed=3, run_dir=tmp_path / "run")
        assert rl == base.rl.model_copy(update={"layout": "tree", "staleness": 0})
        assert (same.model, same.task, same.engine, same.optim) == (base.model, base.task, base.engine, base.optim)
        assert config.rl.seed == config.task.seed == config.engine.seed == 3
    assert changed["plain"] == ("packed", "off", 0, "fifo", 0)
    assert changed["tree"] == ("tree", "off", 0, "fifo", 0)
    assert changed["drafts"] == ("packed", "on", 0, "fifo", 0)
    assert changed["runtime"] == ("packed", "off", 2, "fifo", 0)
    assert changed["histopipe"] == ("packed", "off", 2, "histopipe", 1)
    assert changed["all"] == ("tree", "on", 2, "histopipe", 1)


def test_prompts_of_a_step_are_those_that_the_loop_takes(tmp_path: Path) -> None:
    config = configuration(random_start(tmp_path / "start"), TINY, Variant(name="plain"), seed=1, run_dir=tmp_path)
    run = run_loop(config)
    ids = [[each.task_id for each in step[:: TINY.group_size]] for step in run.latest]
    numbers = prompts_of_step(config, TINY.num_steps)
    named = {tuple(own.tolist()): tuple(names) for own, names in zip(numbers, ids, strict=True)}
    # Every prompt keeps its number from epoch to epoch.
    pairs = {pair for own, names in named.items() for pair in zip(own, names, strict=True)}
    assert len(pairs) == TINY.num_prompts
    assert sorted(np.concatenate(numbers[:2]).tolist()) == list(range(TINY.num_prompts))


@pytest.mark.slow
def test_the_report_holds_every_variant_and_none_at_staleness_zero_changes_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    alone = [replace(variant, workers=0, schedule="fifo", staleness=0) for variant in loop.VARIANTS]
    monkeypatch.setattr(loop, "VARIANTS", tuple(alone))
    start = random_start(tmp_path / "start")
    found = loop.measure(num_runs=1, size=TINY, start=start, on_progress=told.append)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    rows = {row["variant"]["name"]: row for row in found["variants"]}
    assert list(rows) == [variant.name for variant in loop.VARIANTS]
    assert {name: row["num_differing"] for name, row in rows.items()} == {variant.name: 0 for variant in loop.VARIANTS}
    assert len(told) == len(loop.VARIANTS)
    assert all(row["num_rollouts"] == 24 and row["step_s"] > 0 for row in rows.values())
    assert rows["plain"]["speedup"] == 1.0
    assert rows["plain"]["tokens_per_forward"] == 1.0
    assert found["product"]["whole"] == pytest.approx(rows["plain"]["step_s"] / rows["all"]["step_s"])
    assert found["environment"]["first_timed_step"] == 3
