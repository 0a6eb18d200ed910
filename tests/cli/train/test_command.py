"""`treering train`: what it reads, what it writes, and that a stopped run resumes."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from tests.cli.hub_cache import save_tokenizer
from tests.cli.runs import MODEL, Call, is_same, metrics_of, started
from treering.cli.run_training import run_train as run
from treering.data import read_trajectories
from treering.errors import ConfigError, InputError, StateError
from treering.rl.tasks.task import Prompt

TINY = f"""{MODEL}
[task]
{{task}}
[sampling]
max_tokens = 8
[rl]
num_steps = 4
prompts_per_step = 2
group_size = 3
{{rl}}
[engine]
num_threads = 1
[optim]
learning_rate = 1e-2
"""
SUMS = "max_prompts = 3"
WORDS = ["?", "q", "<|im_start|>", "<|im_end|>", "user", "assistant", "yes", "no", "1", "2", "3"]


@pytest.fixture(autouse=True)
def _rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tests_rewards", sys.modules[__name__])


def length_of(prompt: Prompt, text: str) -> float:
    """A reward that differs between rollouts already with random weights."""
    return float(len(text.split()))


def broken_at_times(prompt: Prompt, text: str) -> float:
    if len(text.split()) % 2 == 0:
        raise ValueError("no judge today")
    return len(text)


def misspelt(prompt: Prompt, text: str) -> float:
    return lenght(text)  # type: ignore[name-defined, no-any-return]  # noqa: F821


def abstaining(prompt: Prompt, text: str) -> None:
    return None


def config(folder: Path, task: str = SUMS, rl: str = "") -> Path:
    path = folder / "conf" / "run.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(TINY.format(task=task, rl=rl))
    return path


def prompts(folder: Path, reward: str = "tests_rewards:length_of") -> Path:
    """Write a configuration over five prompts, whose rewards differ from the first step on."""
    save_tokenizer(folder / "words", WORDS)
    lines = [{"prompt": f"q q {word} {i}", "answer": word, "id": f"{word}-{i}"} for i, word in enumerate(WORDS[6:11])]
    (folder / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = f'kind = "prompts"\nfile = "p.jsonl"\ntokenizer = "words"\ntemplate = "raw"\nreward = "{reward}"'
    return config(folder, task)


def test_a_run_leaves_settings_metrics_rollouts_history_and_a_model(folder: Path, train: Call) -> None:
    summary, err = train(prompts(folder), "run.dir=out", "rl.num_steps=12")
    rows = metrics_of(folder / "out")
    assert [row["step"] for row in rows] == list(range(1, 13))
    total = summary["total"]
    assert total["num_rollouts"] == 4 * 5 * 3 == sum(row["rollout/num_rollouts"] for row in rows)
    assert total["num_updates"] == sum("train/loss" in row for row in rows) > 0
    assert total["num_sampled"] == sum(row["rollout/num_sampled"] for row in rows)
    assert total["unique_tokens"] == sum(row.get("train/num_tokens", 0) for row in rows) < total["flat_tokens"]
    first = [row["reward/mean"] * row["rollout/num_rollouts"] for row in rows[:3]]
    assert total["first_reward"] == pytest.approx(sum(first) / 15)
    assert (summary["task"], summary["num_prompts"], summary["resumed_from_step"]) == ("prompts", 5, None)
    model = AutoModelForCausalLM.from_pretrained(summary["checkpoint"])
    assert model.num_parameters() == summary["num_parameters"]
    assert (Path(summary["checkpoint"]) / "tokenizer.json").is_file()
    settings = json.loads((folder / "out" / "config.json").read_text())
    assert (settings["rl"]["num_steps"], settings["rl"]["estimator"]) == (12, "grpo")
    steps = ["step-000010", "step-000012"]
    for part in ("checkpoints", "history"):
        assert sorted(path.name for path in (folder / "out" / part).iterdir()) == steps
    assert "step 12/12 reward" in err


def test_a_failed_reward_names_the_line_of_its_prompt(folder: Path, train: Call) -> None:
    path = prompts(folder, "tests_rewards:misspelt")
    lines = [json.loads(line) for line in (folder / "p.jsonl").read_text().splitlines()]
    (folder / "p.jsonl").write_text("".join(json.dumps({**line, "id": None}) + "\n" for line in lines))
    with pytest.raises((StateError, InputError), match=r"prompt '[0-9a-f]{32}' \(p.jsonl:[1-5]\)"):
        train(path, "run.dir=out", "rl.num_steps=6")


def test_the_advice_on_weights_that_have_diverged_works(folder: Path, train: Call) -> None:
    path, settings = prompts(folder), ["optim.learning_rate=1e38", "optim.max_grad_norm=0.0"]
    with pytest.raises(
        StateError, match=r"run \(run.dir=...\) from an earlier checkpoint \(model.path=...\) with a lower"
    ):
        train(path, "run.dir=out", *settings)
    train(path, "run.dir=whole", "rl.num_steps=1")
    path.write_text(re.sub(r"(?s)hidden_size.*?num_layers = 1\n", "", path.read_text()))
    assert train(path, "run.dir=next", "model.path=whole/checkpoints/step-000001")[0]["num_steps"] == 4


def constant(prompt: Prompt, text: str) -> float:
    return 0.0


def test_a_run_whose_groups_have_equal_rewards_warns_early_and_at_its_end(folder: Path, train: Call) -> None:
    path = prompts(folder, "tests_rewards:constant")
    _, err = train(path, "run.dir=out", "rl.num_steps=12")
    said = [line for line in err.splitlines() if "no group of" in line]
    assert [re.search(r"no group of (\d+) steps had two different rewards", line)[1] for line in said] == ["10", "12"]
    _, err = train(prompts(folder), "run.dir=out2", "rl.num_steps=12")
    assert "no group of" not in err


def test_every_rollout_is_a_trajectory_of_its_epoch(folder: Path, train: Call) -> None:
    train(prompts(folder), "run.dir=out", "rl.num_steps=6")
    files = sorted((folder / "out" / "rollouts").iterdir())
    assert [file.name for file in files] == ["epoch-000.jsonl", "epoch-001.jsonl"]
    for epoch, file in enumerate(files):
        rows = read_trajectories(file)
        assert sorted((str(row.task_id), row.trial) for row in rows) == sorted(
            (f"{word}-{i}", trial) for i, word in enumerate(WORDS[6:11]) for trial in range(3)
        )
        assert {row.epoch for row in rows} == {epoch}
        assert all(row.reward is not None and row.advantage is not None for row in rows)
    versions = {row.step: row.version for file in files for row in read_trajectories(file)}
    assert versions == {row["step"]: row["rollout/version"] for row in metrics_of(folder / "out")}
    assert versions[6] > versions[1] == 0
    train(prompts(folder), "run.dir=without", "run.rollouts=off")
    assert not (folder / "without" / "rollouts").exists()


def test_a_warm_up_trains_on_other_prompts_first_and_only_once(folder: Path, train: Call) -> None:
    path = config(folder)
    start = ["warmup.num_steps=6"]
    first, err = train(path, "run.dir=out", *start)
    assert "warm-up 6/6 loss" in err
    rows = metrics_of(folder / "out" / "warmup")
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    assert {row["train/num_branches"] for row in rows} == {64}
    assert rows[0]["train/sharing"] > 0.1
    _, err = train(path, "run.dir=out", "rl.num_steps=5", *start)
    assert "warm-up" not in err
    other, _ = train(path, "run.dir=without")
    assert not is_same(first, other)


def test_a_run_with_a_warm_up_goes_on_from_its_policy_and_not_from_the_warm_up(folder: Path, train: Call) -> None:
    # Easy enough that some answers are right, so that rewards vary and the policy moves.
    easy = config(folder, "max_prompts = 3\nmax_terms = 2\nmax_number = 3")
    start = ["warmup.num_steps=80", "warmup.learning_rate=2e-2", "model.hidden_size=32"]
    whole, _ = train(easy, "run.dir=whole", "rl.num_steps=5", *start)
    train(easy, "run.dir=parts", *start)
    rest, _ = train(easy, "run.dir=parts", "rl.num_steps=5", *start)
    assert rest["resumed_from_step"] == 4
    assert whole["total"]["num_updates"] > rest["total"]["num_updates"]
    assert is_same(whole, rest)


def test_a_warm_up_that_was_stopped_goes_on(folder: Path, train: Call) -> None:
    path = config(folder)
    start = ["warmup.num_steps=6"]
    whole, _ = train(path, "run.dir=whole", *start)
    train(path, "run.dir=parts", *start)
    # The state after a kill in the warm-up: its checkpoint of step 4, and nothing of what follows.
    for part in ("checkpoints", "history", "rollouts", "metrics.jsonl", "warmup/checkpoints/step-000006"):
        remove(folder / "parts" / part)
    assert not (folder / "parts" / "checkpoints").exists()
    again, err = train(path, "run.dir=parts", *start)
    assert "warm-up 6/6" in err
    assert is_same(whole, again)


def remove(path: Path) -> None:
    for inner in path.iterdir() if path.is_dir() else ():
        remove(inner)
    path.rmdir() if path.is_dir() else path.unlink()


def test_rewards_that_raise_are_counted_and_reported(folder: Path, train: Call) -> None:
    path = prompts(folder, "tests_rewards:broken_at_times")
    summary, err = train(path, "run.dir=out", "rl.num_steps=2", "rl.group_size=8")
    total = summary["total"]
    assert total["num_reward_errors"] + total["num_rollouts"] == 32
    assert 0 < total["num_reward_errors"] < 32
    assert f"warning: step 1: {metrics_of(folder / 'out')[0]['reward/num_errors']:.0f} rollouts dropped" in err
    assert "test_command.py" in err
    assert "no judge today" in err


OWN_REWARDS = """
import beside_of_shell
async def async_length(prompt, text, level):
    return {"reward": len(text.split()) + level, "level": level}
def rank(prompts, completions, **columns):
    return [sorted(completions).index(text) * beside_of_shell.ONE for text in completions]
"""


def test_rewards_next_to_the_configuration_and_in_the_shells_folder_are_the_same_in_workers(
    folder: Path, train: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    reward = '[{name = "own.py:async_length"}, {name = "shell_of_test:rank", weight = -0.5}]'
    path = prompts(folder)
    lines = [json.loads(line) | {"level": i} for i, line in enumerate((folder / "p.jsonl").read_text().splitlines())]
    (folder / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("conf/own.py", "shell_of_test.py"):
        (folder / name).write_text(OWN_REWARDS)
    (folder / "beside_of_shell.py").write_text("ONE = 1.0\n")
    settings = ["rl.num_steps=2", f"task.reward={reward}"]
    first, _ = train(path, "run.dir=out", *settings)
    second, _ = train(path, "run.dir=workers", "runtime.workers=1", *settings)
    assert first["total"]["num_rollouts"] == second["total"]["num_rollouts"] == 12
    names = {"rewards/async_length", "rewards/async_length/level", "rewards/rank", "reward/mean"}
    rows = [[{name: row[name] for name in names} for row in metrics_of(folder / run)] for run in ("out", "workers")]
    assert rows[0] == rows[1]
    mean = rows[0][0]
    assert mean["reward/mean"] == pytest.approx(mean["rewards/async_length"] - 0.5 * mean["rewards/rank"])


def test_a_reward_that_raises_on_its_trial_ends_the_run_before_the_model_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treering.cli.train.make_model", lambda *_: pytest.fail("made"))
    message = rf"test_command\.py:{misspelt.__code__.co_firstlineno + 1}: NameError: name 'lenght'"
    with pytest.raises(InputError, match=rf"{message}.*\(reward .*, prompt 'yes-0' \(p.jsonl:1\), text 'yes'\)"):
        run(config_path=prompts(folder, "tests_rewards:misspelt"), overrides=["run.dir=out"], json_output=True)
    assert not (folder / "out" / "metrics.jsonl").exists()


def test_a_run_whose_every_reward_abstains_ends_with_an_error(folder: Path) -> None:
    with pytest.raises(StateError, match=r"abstaining returned None for all 12 rollouts"):
        run(
            config_path=prompts(folder, "tests_rewards:abstaining"),
            overrides=["run.dir=out", "rl.num_steps=2"],
            json_output=True,
        )


def test_skipped_prompts_are_reported(folder: Path, train: Call) -> None:
    path = prompts(folder)
    (folder / "p.jsonl").write_text('{"prompt": "q"}\n{"prompt": "q q q"}\n{"prompt": "q"}\n{"prompt": "no"}\n')
    summary, err = train(path, "run.dir=out", "task.max_prompt_tokens=2")
    assert summary["num_prompts"] == 2
    assert "1 prompt has more than 2 tokens and is dropped" in err
    assert "1 prompt has the same tokens as an earlier one and is dropped" in err


def test_a_damaged_history_is_named_to_the_user(folder: Path, train: Call) -> None:
    path = prompts(folder)
    train(path, "run.dir=out")
    (folder / "out" / "history" / "step-000004").write_bytes(b"")
    summary, err = train(path, "run.dir=out", "rl.num_steps=5")
    assert "warning: " in err
    assert "step-000004" in err
    assert summary["resumed_from_step"] == 4


def test_prompts_are_read_by_the_tokenizer_of_the_model_folder(folder: Path, train: Call) -> None:
    first, _ = train(prompts(folder), "run.dir=first", "rl.num_steps=1")
    path = folder / "second.toml"
    path.write_text(
        f'[model]\npath = "{first["checkpoint"]}"\n[task]\nkind = "prompts"\nfile = "p.jsonl"\ntemplate = "raw"\n'
        'reward = "tests_rewards:length_of"\n[sampling]\nmax_tokens = 4\n[rl]\nnum_steps = 1\n'
    )
    second, _ = train(path, "run.dir=second")
    assert second["num_prompts"] == first["num_prompts"] == 5
    assert (Path(second["checkpoint"]) / "tokenizer.json").is_file()


def test_what_cannot_be_trained_is_refused(folder: Path, train: Call) -> None:
    with pytest.raises(ConfigError, match="there are 3 sums"):
        train(config(folder), "task.max_prompts=10", "task.max_number=1")


@pytest.mark.slow
def test_the_gsm8k_example_runs_on_real_prompts(
    real_data: Path, tmp_path: Path, train: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREERING_DATA", str(real_data.resolve()))
    example = Path(__file__).parents[3] / "examples" / "gsm8k" / "config.toml"
    short = ["rl.num_steps=1", "rl.prompts_per_step=2", "sampling.max_tokens=8", "task.max_prompts=2"]
    summary, _ = train(example, f"run.dir={tmp_path / 'out'}", *short)
    assert (summary["num_prompts"], summary["total"]["num_rollouts"]) == (2, 8)


def test_the_run_reports_where_its_rollouts_stop(folder: Path, train: Call) -> None:
    steps = "rl.num_steps=1"
    _, err = train(prompts(folder), "run.dir=out", steps, 'task.stop_tokens=["yes", 8]')
    assert "rollouts stop at <|im_end|> (3, tokenizer), yes (6, task.stop_tokens), 1 (8, task.stop_tokens)" in err
    rows = read_trajectories(folder / "out" / "rollouts" / "epoch-000.jsonl")
    sampled = [row.tokens[row.loss_mask] for row in rows if row.tokens is not None and row.loss_mask is not None]
    assert not any(np.isin(tokens[:-1], [3, 6, 8]).any() for tokens in sampled)
    with pytest.raises(StateError, match=r"task\.stop_tokens is \"\('yes', 8\)\" there and '\(\)' here"):
        train(prompts(folder), "run.dir=out", steps)
    with pytest.raises(ConfigError, match=r"task\.stop_tokens must name single tokens, and 'maybe' is not one of"):
        train(prompts(folder), "run.dir=other", steps, 'task.stop_tokens=["maybe"]')


def test_an_engine_without_room_for_a_rollout_is_refused_at_the_start(folder: Path) -> None:
    """The longest prompts have 4 words, and rollouts 8 tokens, of which the last is never computed."""
    with pytest.raises(InputError, match=r"need 11; raise it"):
        run(config_path=prompts(folder), overrides=["run.dir=out", "engine.max_tokens=10"], json_output=True)
    assert not (folder / "out").exists()
    run(
        config_path=prompts(folder),
        overrides=["run.dir=out", "engine.max_tokens=11", "rl.num_steps=1"],
        json_output=True,
    )


NOISY = """
import ctypes, os, subprocess, sys, threading

print("printed at import")

def reward(prompt, text):
    print("printed by python")
    sys.__stdout__.write("written to the first stdout\\n")
    os.write(1, b"written to the descriptor\\n")
    subprocess.run(["echo", "printed by a process"], check=True)
    libc = ctypes.CDLL(None)
    libc.puts(b"printed by C")
    libc.fflush(None)
    threading.Thread(target=print, args=("printed by a thread",)).start()
    sys.stdout.close()
    return float(len(text.split()))
"""


def test_what_user_code_prints_goes_to_stderr(folder: Path) -> None:
    (folder / "noisy.py").write_text(NOISY)
    path = prompts(folder, "noisy:reward")
    process = started(folder, "train", str(path), "--json", "run.dir=out", "rl.num_steps=1")
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    assert json.loads(out)["num_steps"] == 1
    for line in ("at import", "by python", "to the first stdout", "to the descriptor", "by a process", "by C"):
        assert line in err
