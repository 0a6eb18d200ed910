"""The demo compares the two layouts on the same steps and says what it measured."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from treering.cli import demo
from treering.errors import InputError


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No real data, and the smallest of everything."""
    monkeypatch.setenv("TREERING_DATA", str(tmp_path / "absent"))
    monkeypatch.setattr(demo, "NUM_STEPS", 3)
    stand_in = demo.StandInConfig(num_tasks=4, num_trials=3, vocab_size=64)
    monkeypatch.setattr(demo, "StandInConfig", lambda **settings: stand_in)
    small = {"vocab_size": 64, "hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_size": 16}
    monkeypatch.setattr(demo, "MODEL", demo.ModelConfig(**small))


def quiet() -> Console:
    return Console(quiet=True)


@pytest.mark.usefixtures("tiny")
def test_both_sides_train_the_same_steps_to_the_same_losses(tmp_path: Path) -> None:
    result = demo.compare(seed=0, out=None, console=quiet(), num_steps=3)
    assert (result.data, result.num_tasks, result.num_steps) == ("generated", 4, 3)
    assert result.largest_loss_difference < 1e-5
    assert result.token_bound == pytest.approx(result.flat_tokens / result.unique_tokens)
    assert result.flop_bound > 1
    assert result.sharing == pytest.approx(1 - 1 / result.token_bound)
    assert result.speedup == pytest.approx(result.packed_s / result.tree_s)


@pytest.mark.usefixtures("tiny")
def test_out_keeps_the_result_and_the_metrics_of_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    demo.run(out=out, seed=1, json_output=True)
    assert json.loads(capsys.readouterr().out) == json.loads((out / "demo.json").read_text())
    rows = {side: (out / f"{side}.jsonl").read_text().splitlines() for side in ("tree", "packed")}
    assert [len(lines) for lines in rows.values()] == [3, 3]
    losses = [[json.loads(line)["train/loss"] for line in lines] for lines in rows.values()]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    with pytest.raises(InputError, match="needs a new or empty folder"):
        demo.run(out=out, seed=1, json_output=True)


@pytest.mark.usefixtures("tiny")
def test_the_table_names_seconds_ratio_bound_and_loss_difference(capsys: pytest.CaptureFixture[str]) -> None:
    demo.run(out=None, seed=0, json_output=False)
    printed = capsys.readouterr()
    for words in ("training, seconds", "counted FLOPs", "share of that bound", "largest difference of the loss curves"):
        assert words in printed.out
    assert "generated stand-in instead" in printed.err
    assert "step 3/3" in printed.err
