"""The loop benchmark: runs differ only in their parts, and the arithmetic of parts and whole is as described."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.loop import bench as loop

from tests.benchmarks.loop.loops import TINY, random_start


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
