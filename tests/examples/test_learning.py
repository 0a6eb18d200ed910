"""Each example learns what its page claims: its reward rises, or its loss falls, by more than noise.

Noise is the spread of the steps themselves: the standard error of the difference between the means of the first and the
last quarter. It includes progress within a quarter, so that a pass is never mere luck.
"""

import json
import re
import runpy
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from treering.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"
ERRORS = 3.0
"""Standard errors that a gain must exceed."""

pytestmark = pytest.mark.learns


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREERING_DATA", str(tmp_path / "none"))


def test_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = trained(monkeypatch, "sums/config.toml", "reward/mean", "rl.num_epochs=8")
    assert gain(rewards) > ERRORS * noise(rewards)
    # A reader's first run begins from the result of the supervised start, and loses none of it.
    assert np.mean(rewards[4:12]) > np.mean(rewards[:4]) - ERRORS * noise(rewards)


@pytest.mark.parametrize("name", ["two_seats", "notes"])
def test_environments(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    rewards = trained(monkeypatch, f"environments/{name}.toml", "reward/mean")
    assert gain(rewards) > ERRORS * noise(rewards)


def test_calculator(monkeypatch: pytest.MonkeyPatch) -> None:
    runpy.run_path(str(EXAMPLES / "environments/calculator.py"))["write_solved"]()
    losses = trained(monkeypatch, "environments/calculator_start.toml", "train/loss")
    assert -gain(losses) > ERRORS * noise(losses)
    rewards = trained(monkeypatch, "environments/calculator.toml", "reward/mean", "rl.num_steps=48")
    assert gain(rewards) > ERRORS * noise(rewards)


def test_images(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers.image_processing_backends")
    example = runpy.run_path(str(EXAMPLES / "images/dots.py"))
    example["write_model"]()
    example["write_data"]()
    losses = trained(monkeypatch, "images/start.toml", "train/loss")
    assert -gain(losses) > ERRORS * noise(losses)
    rewards = trained(monkeypatch, "images/config.toml", "reward/mean", "rl.num_steps=100")
    assert gain(rewards) > ERRORS * noise(rewards)


def test_agent_sft(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = trained(monkeypatch, "agent_sft/config.toml", "train/loss", "train.num_epochs=4")
    assert -gain(losses) > ERRORS * noise(losses)


def test_distill_sums(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLES / "distill_sums/run.py"))["main"]
    # A smaller teacher gets 0.6 right after 500 steps, and then only written solutions teach anything.
    main(["--steps", "30", "--check-every", "30"])
    found = re.findall(r"(distilled|grpo|sft) +right every 30 steps: (\d\.\d\d)  (\d\.\d\d)", capsys.readouterr().out)
    assert [name for name, *_ in found] == ["distilled", "grpo", "sft"]
    for _, before, after in found:
        # Each is the share of 256 sums: a binomial.
        shares = np.array([float(before), float(after)])
        assert shares[1] - shares[0] > 2 * np.sqrt((shares * (1 - shares)).sum() / 256)


def test_tree_rollouts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "tree_rollouts")
    runpy.run_path(str(EXAMPLES / "tree_rollouts/run.py"))["main"]([])
    rewards = [float(reward) for reward in re.findall(r"reward (\d\.\d+)", capsys.readouterr().out)]
    assert gain(rewards) > ERRORS * noise(rewards)


def trained(monkeypatch: pytest.MonkeyPatch, config: str, metric: str, *settings: str) -> list[float]:
    """Return a metric of each step of the example."""
    command = "sft" if metric == "train/loss" else "train"
    given = ["treering", command, str(EXAMPLES / config), "run.save_every=1000", *settings]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    folder = Path(tomllib.loads((EXAMPLES / config).read_text())["run"]["dir"])
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row[metric] for row in rows if metric in row]


def quarters(values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    size = len(values) // 4
    return np.array(values[:size]), np.array(values[-size:])


def gain(values: Sequence[float]) -> float:
    """Return the mean of the last quarter less that of the first."""
    first, last = quarters(values)
    return float(last.mean() - first.mean())


def noise(values: Sequence[float]) -> float:
    """Return the standard error of `gain`."""
    return float(np.sqrt(sum(part.var(ddof=1) / part.size for part in quarters(values))))
