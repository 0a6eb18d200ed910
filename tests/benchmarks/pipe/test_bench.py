"""The pipe benchmark: passes are timed as they run, and the simulator predicts a run from the times of others."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.pipe import bench as pipe
from benchmarks.pipe.passes import LOAD, PASS, read_passes, record_passes

from tests.benchmarks.loop.loops import TINY, random_start
from treering.cli.demo import demo_task
from treering.cli.models import build_model
from treering.config.model import ModelConfig
from treering.engine.protocol import Request, Sampling
from treering.engine.torch_engine import TorchEngine


def test_a_timed_engine_samples_the_same_and_writes_each_pass_down(tmp_path: Path) -> None:
    task = demo_task(2)
    model = build_model(ModelConfig(hidden_size=16, num_layers=1), num_ids=task.vocab_size, seed=0, folder=None)
    requests = [Request(prompt_id=p.prompt_id, prompt=p.tokens, sampling=Sampling(max_tokens=5)) for p in task.prompts]
    plain, engine = (TorchEngine(model, max_batch=2, max_tokens=200) for _ in range(2))
    timed = record_passes(engine, tmp_path / "passes-1.csv")
    expected = {rollout.key: rollout.tokens.tolist() for rollout in plain.generate(requests)}
    assert {rollout.key: rollout.tokens.tolist() for rollout in timed.generate(requests)} == expected
    timed.update_weights(1)
    list(timed.generate(requests[:1]))
    found = read_passes(tmp_path)
    passes, loads = found[found[:, 0] == PASS], found[found[:, 0] == LOAD]
    assert len(loads) == 1
    assert passes[:, 3].sum() == timed.stats.num_rows == passes[:, 5].sum() == 15
    assert passes[:, 4].sum() == timed.stats.num_prefilled
    assert (passes[:, 2] > 0).all()
    assert (np.diff(passes[:, 1]) > 0).all()
    num_before = int(np.flatnonzero(found[:, 0] == LOAD)[0])
    assert len(read_passes(tmp_path, since_s=float(loads[0, 1]))) == len(found) - num_before


@pytest.mark.slow
def test_every_policy_samples_the_same_and_has_a_prediction(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray starts the workers: make ray-test")
    policies = ("fifo", "longest_first")
    # Enough that some timed steps are sampled after the first ones have ended, however fast all are.
    size = replace(TINY, num_steps=7)
    found = pipe.measure(num_runs=1, size=size, start=random_start(tmp_path / "start"), policies=policies)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    rows = found["policies"]
    assert [(row["policy"], row["staleness"], row["drafts"]) for row in rows] == [
        (policy, *group) for group in ((0, "off"), (1, "off"), (1, "on")) for policy in policies
    ]
    for row in rows:
        assert (row["num_differing"], row["num_rollouts"]) == (0, 42)
        assert row["ratio"] == pytest.approx(row["predicted_step_s"] / row["step_s"])
        assert row["predicted_step_s"] > 0
