"""`treering trl` is TRL's command line: its options and its scripts, with the tree in it."""

import sys
from pathlib import Path

import pytest

from tests.integrations.trl import runs
from treering.cli.main import main

pytestmark = pytest.mark.filterwarnings("default")

COMMON = ["--report_to", "none", "--use_cpu", "true", "--bf16", "false", "--dtype", "float32", "--max_steps", "2"]
COMMON += ["--logging_steps", "1", "--per_device_train_batch_size", "4", "--save_strategy", "no", "--seed", "3"]


def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
    return [float(len(set(ids))) for ids in completion_ids]


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["treering", "trl", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


@pytest.fixture
def given(tmp_path: Path) -> dict[str, list[str]]:
    """Arguments of each script for a tiny model and dataset."""
    options = {}
    for name, rows in (("sft", runs.conversations()), ("dpo", runs.preferences()), ("grpo", runs.prompts())):
        folder = tmp_path / f"{name}_data"
        folder.mkdir()
        rows.to_json(folder / "train.jsonl")
        paths = ["--model_name_or_path", runs.saved(), "--dataset_name", str(folder)]
        options[name] = [name, *paths, "--output_dir", str(tmp_path / name), *COMMON]
    options["grpo"] += ["--num_generations", "4", "--max_completion_length", "6"]
    options["grpo"] += ["--reward_funcs", "tests.integrations.trl.test_command.reward"]
    return options


@pytest.mark.parametrize("name", ["sft", "dpo", "grpo"])
def test_a_script_of_trl_trains_on_trees(
    name: str, given: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import trl

    stock = getattr(trl, f"{name.upper()}Trainer")
    assert call(monkeypatch, *given[name], "--verify_first", "true") == 0
    printed = capsys.readouterr().out
    assert f"treering: Tree{name.upper()}Trainer shares prefixes of its policy" in printed
    assert "'tree/token_ratio'" in printed
    assert getattr(trl, f"{name.upper()}Trainer") is stock


def test_its_options_turn_the_parts_off(
    given: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, *given["sft"], "--group_batches", "false", "--tree_backend", "reference") == 0
    printed = capsys.readouterr().out
    assert "backend reference" in printed
    assert "(group_batches=False)" in printed


def test_active_dropout_ends_with_one_line_that_names_the_flag(
    given: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, *given["sft"], "--use_peft", "--lora_target_modules", "q_proj", "v_proj") == 2
    assert "--lora_dropout 0" in [line for line in capsys.readouterr().err.splitlines() if "treering:" in line][-1]


def test_help_is_ours_for_the_command_and_trls_for_a_script_that_there_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch) == call(monkeypatch, "--help") == 0
    assert "TRL's own command line" in capsys.readouterr().out
    assert call(monkeypatch, "ppo") == 2
    assert "runs dpo, grpo, sft, got 'ppo'" in capsys.readouterr().err
    assert call(monkeypatch, "sft", "--help") == 0
    printed = capsys.readouterr().out
    assert "--tree_backend" in printed
    assert "--assistant_only_loss" in printed
