"""The pipe benchmark: passes are timed as they are, a machine is fitted to them, the simulator predicts from it."""

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.pipe import bench as pipe
from benchmarks.pipe.passes import LOAD, PASS, TimedEngine, read_passes

from tests.benchmarks.loop.loops import TINY, random_start
from treering.cli.demo.policy import demo_task
from treering.cli.models import build_model
from treering.config.model import ModelConfig
from treering.engine.request import Request, Sampling
from treering.engine.torch_engine import TorchEngine


def test_a_timed_engine_samples_the_same_and_writes_each_pass_down(tmp_path: Path) -> None:
    task = demo_task(2, 0)
    model = build_model(ModelConfig(hidden_size=16, num_layers=1), num_ids=task.vocab_size, seed=0, folder=None)
    sampling = Sampling(max_tokens=5)
    requests = [Request(prompt_id=p.prompt_id, prompt=p.tokens, sampling=sampling) for p in task.prompts]

    def engine() -> TorchEngine:
        return TorchEngine(model, max_batch=2, max_tokens=200)

    timed = TimedEngine(engine(), tmp_path)
    expected = {rollout.key: rollout.tokens.tolist() for rollout in engine().generate(requests)}
    assert {rollout.key: rollout.tokens.tolist() for rollout in timed.generate(requests)} == expected
    timed.update_weights(1)
    assert timed.version == 1
    assert not list(timed.generate([]))
    list(timed.generate(requests[:1]))
    found = read_passes(tmp_path)
    passes, loads = found[found[:, 0] == PASS], found[found[:, 0] == LOAD]
    assert len(loads) == 1
    assert passes[:, 3].sum() == timed.stats.num_rows == passes[:, 5].sum() == 15
    assert passes[:, 4].sum() == timed.stats.num_prefilled
    assert (passes[:, 2] > 0).all()
    assert (np.diff(passes[:, 1]) > 0).all()
    assert len(read_passes(tmp_path, since_s=float(loads[0, 1]))) == len(found) - 5
    assert read_passes(tmp_path / "absent").shape == (0, 7)


@pytest.mark.slow
def test_every_policy_samples_the_same_and_has_a_prediction(tmp_path: Path) -> None:
    said: list[str] = []
    start = random_start(tmp_path / "start")
    found = pipe.measure(
        num_runs=1, size=TINY, start=start, policies=("fifo", "work_stealing"), on_progress=said.append
    )
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    rows = found["policies"]
    assert [(row["policy"], row["staleness"], row["drafts"]) for row in rows] == [
        ("fifo", 0, "off"),
        ("work_stealing", 0, "off"),
        ("fifo", 1, "off"),
        ("work_stealing", 1, "off"),
        ("fifo", 1, "on"),
        ("work_stealing", 1, "on"),
    ]
    assert len(said) == 1 + 6
    for row in rows:
        assert (row["num_differing"], row["num_rollouts"]) == (0, 24)
        assert row["ratio"] == pytest.approx(row["predicted_step_s"] / row["step_s"])
        assert row["is_base"] == (row["policy"] == "fifo")
        assert 0.0 <= row["bubble"] <= 1.0
        if row["is_base"]:
            assert row["speedup"] == row["predicted_speedup"] == 1.0
    assert set(found["latency"]) == {f"{row['policy']}-{row['staleness']}-{row['drafts']}" for row in rows}
    assert found["latency"]["fifo-0-off"]["tokens_per_step"] is None
    assert any(note.startswith("predicted within 15%") for note in found["notes"])
