"""The loop benchmark: runs differ in nothing but their parts, and the arithmetic of parts and whole is what it says."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.loop import bench as loop
from benchmarks.loop.runs import Variant, configuration

from tests.benchmarks.loop.loops import TINY, random_start


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
