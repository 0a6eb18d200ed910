"""A recipe of the cookbook runs unchanged on the server, as its benchmark runs them."""

from pathlib import Path

import pytest

pytest.importorskip("tinker", reason="needs Tinker's client: make tinker-test")
pytest.importorskip(
    "tinker_cookbook", reason="needs Tinker's recipes: docs/tinker.md has the command that installs them"
)

from benchmarks.tinker import bench

MODEL = Path("~/.cache/treering/models/SmolLM2-135M-Instruct").expanduser()


@pytest.mark.skipif(not MODEL.is_dir(), reason="needs the tokenizer of SmolLM2: treering fetch smollm2")
def test_a_recipe_trains_a_random_model_and_its_row_is_kept(
    real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "fetched", lambda *_: MODEL)
    recipe = bench.RECIPES["sl_loop"]._replace(options="batch_size=4 max_steps=4", tiny="learning_rate=2e-2")
    monkeypatch.setitem(bench.RECIPES, "sl_loop", recipe)
    report = bench.measure(only=["sl_loop"], models=["tiny"], folder=tmp_path)
    (row,) = report["recipes"]
    losses = row["metrics"]["train_mean_nll"]
    assert (row["num_steps"], len(losses), row["recipe"]) == (4, 4, "sl_loop")
    assert losses[3] < losses[0] - 0.5 < 11
    assert 0 < row["computed_tokens"] <= row["flat_tokens"]
    assert 0 < row["training_s"] < row["server_s"]
    # What is kept does not run again.
    monkeypatch.setattr(bench, "RECIPES", dict.fromkeys(bench.RECIPES, ()))
    assert bench.measure(only=["sl_loop"], models=["tiny"], folder=tmp_path)["recipes"] == [row]
