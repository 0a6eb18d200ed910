"""The example of images runs: its data, a supervised step, and a step of GRPO on prompts with images."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from treering.cli.main import main

FOLDER = Path(__file__).parents[2] / "examples" / "images"

pytest.importorskip("transformers.image_processing_backends")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["treering", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code


def test_the_example_trains_on_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = runpy.run_path(str(FOLDER / "dots.py"))
    example["write_model"]()
    example["write_data"](num_solved=64, num_prompts=4)
    run(monkeypatch, "sft", str(FOLDER / "start.toml"), "train.num_steps=20")
    small = ["rl.num_steps=2", "rl.prompts_per_step=4"]
    model = "model.path=runs/dots_start/checkpoints/step-000020"
    run(monkeypatch, "train", str(FOLDER / "config.toml"), model, *small)
    lines = (tmp_path / "runs" / "dots" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "train/loss" in row]
    assert len(rows) == 2
    assert sum(row["train/grad_norm"] for row in rows) > 0
