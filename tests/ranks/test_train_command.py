"""`treering train` under torchrun: one process prints and writes the results of a run of one, and all end together."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.ranks.commands import treering, weights_of
from treering.cli.run_training import run_train
from treering.cli.train import train
from treering.config import RlConfig, load
from treering.data import read_trajectories
from treering.errors import ConfigError

CONFIG = """
[task]
kind = "prompts"
file = "prompts.jsonl"
tokenizer = "words"
template = "raw"
reward = "rank_rewards:num_words"

[model]
hidden_size = 32
num_layers = 2
device = "cpu"

[sampling]
max_tokens = 8

[rl]
num_steps = 4
prompts_per_step = 3
group_size = 4

[engine]
num_threads = 1

[optim]
learning_rate = 1e-3

[run]
save_every = 1
"""
REWARDS = """
import os, signal
from treering.errors import StateError
from treering.rl.trainer import Trainer

NUM_REWARDS = 0


def refuse(*_, **__):
    raise StateError("rank 1 refuses this step")


def num_words(prompt, text):
    global NUM_REWARDS
    NUM_REWARDS += 1
    fault, rank, number = os.environ.get("FAIL", "none of 0").split()
    if rank == os.environ.get("RANK") and NUM_REWARDS == int(number):
        if fault == "error":
            Trainer.train = refuse
        else:
            os.kill(os.getpid(), getattr(signal, fault))
    return float(len(text.split()))
"""
WORDS = ["?", "q", "<|im_start|>", "<|im_end|>", "user", "assistant", "yes", "no", "1", "2", "3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration over five prompts, whose rewards differ from the first step on."""
    made: Path = tmp_path_factory.mktemp("train")
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (made / "words").mkdir()
    tokenizer.save(str(made / "words" / "tokenizer.json"))
    lines = [{"prompt": f"q q {word} {i}", "answer": word, "id": f"{word}-{i}"} for i, word in enumerate(WORDS[6:11])]
    (made / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (made / "rank_rewards.py").write_text(REWARDS)
    (made / "run.toml").write_text(CONFIG)
    sys.path.insert(0, str(made))
    return made


@pytest.fixture(scope="module")
def of_two(folder: Path) -> subprocess.CompletedProcess[str]:
    """The run of two ranks in `two`."""
    return treering("train", "run.toml", "run.dir=two", "--json", folder=folder)


@pytest.fixture(scope="module")
def of_one(folder: Path) -> dict[str, Any]:
    """The run of one process in `one`."""
    return alone(folder, f"run.dir={folder / 'one'}")


def alone(folder: Path, *overrides: str, file: str = "run.toml") -> dict[str, Any]:
    config = load(RlConfig, folder / file, list(overrides))
    return train(config, config_dir=folder, console=Console(quiet=True))[0]


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def rollouts(run: Path) -> list[Any]:
    """Return every logged rollout, in order of the log."""
    found = [row for file in sorted((run / "rollouts").iterdir()) for row in read_trajectories(file)]
    return [(row.step, row.task_id, row.trial, row.version, row.tokens.tolist(), row.reward) for row in found]  # type: ignore[union-attr]


def assert_close(found: Any, expected: Any) -> None:
    theirs = weights_of(expected)
    for name, weight in weights_of(found).items():
        # Adam's first steps move each weight by the learning rate, even where a gradient is only rounding.
        assert float((weight - theirs[name]).norm() / theirs[name].norm()) < 1e-4, name


@pytest.mark.ranks
def test_two_ranks_write_the_run_of_one(
    folder: Path, of_two: subprocess.CompletedProcess[str], of_one: dict[str, Any]
) -> None:
    assert of_two.returncode == 0, of_two.stderr[-2000:]
    # One object, and one line a step, although two processes ran.
    summary = json.loads(of_two.stdout)
    summary["checkpoint"] = str(folder / summary["checkpoint"])
    assert of_two.stderr.count("step 4/4") == 1
    names = ("step", "reward/mean", "rollout/num_rollouts", "rollout/num_sampled", "train/num_branch_tokens")
    assert [[row.get(name) for name in names] for row in rows(folder / "two")] == [
        [row.get(name) for name in names] for row in rows(folder / "one")
    ]
    assert rollouts(folder / "two") == rollouts(folder / "one")
    assert summary["total"]["num_updates"] == of_one["total"]["num_updates"] > 0
    assert summary["total"]["num_rollouts"] == of_one["total"]["num_rollouts"] == 40
    assert (Path(summary["checkpoint"]) / "tokenizer.json").is_file()
    assert_close(summary, of_one)


@pytest.mark.ranks
def test_ranks_and_one_process_go_on_with_the_runs_of_each_other(
    folder: Path, of_two: subprocess.CompletedProcess[str], of_one: dict[str, Any]
) -> None:
    assert of_two.returncode == 0, of_two.stderr[-2000:]
    one = alone(folder, f"run.dir={folder / 'two'}", "rl.num_steps=6")
    assert (one["resumed_from_step"], one["num_steps"]) == (4, 6)
    # The other way to keep step changes nothing either.
    done = treering(
        *("train", "run.toml", "run.dir=one", "rl.num_steps=6", "rl.ranks=sharded", "--json"), folder=folder
    )
    assert done.returncode == 0, done.stderr[-2000:]
    two = json.loads(done.stdout)
    assert (two["resumed_from_step"], two["num_steps"]) == (4, 6)
    two["checkpoint"] = str(folder / two["checkpoint"])
    assert rollouts(folder / "one") == rollouts(folder / "two")
    assert_close(two, one)


ENVIRONMENT = """
from treering.rl.environments import Environment, EnvTask


class Letters(Environment):
    tasks = [EnvTask(id=f"d{i}", data=i) for i in range(5)]

    async def run(self, task, policy):
        question = {"role": "user", "content": str(task.data)}
        first = await policy.chat([question])
        second = await policy.agent("other").chat([question, {"role": "user", "content": first.text}])
        return sum(map(str.islower, first.text + second.text)) / 8
"""


@pytest.mark.ranks
def test_two_ranks_run_and_train_the_episodes_of_one(folder: Path) -> None:
    (folder / "rank_envs.py").write_text(ENVIRONMENT)
    task = '[task]\nkind = "environment"\nenv = "rank_envs.py:Letters"\nmax_turn_tokens = 4\n'
    text = CONFIG.replace("max_tokens = 8", "max_tokens = 90")
    (folder / "episodes.toml").write_text(task + text[text.index("\n[model]") :])
    done = treering("train", "episodes.toml", "run.dir=episodes-two", "--json", folder=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    of_one = alone(folder, f"run.dir={folder / 'episodes-one'}", file="episodes.toml")
    assert rollouts(folder / "episodes-two") == rollouts(folder / "episodes-one")
    of_two = {"checkpoint": str(folder / json.loads(done.stdout)["checkpoint"])}
    assert_close(of_two, of_one)


# What happens to which rank at which of its rewards, the first of the second step, and the line that is printed.
ENDS = {
    "error 1 5": "rank 1 refuses this step",
    "SIGTERM 1 5": "interrupted by SIGTERM; step 2 is saved and 3 is next; the same command resumes the run",
    "SIGKILL 0 9": "found that another rank has ended|interrupted by SIGTERM",
}


@pytest.mark.ranks
@pytest.mark.parametrize("fault", ENDS)
def test_what_ends_one_rank_ends_all_with_one_line(fault: str, folder: Path) -> None:
    run = fault.replace(" ", "")
    done = treering("train", "run.toml", f"run.dir={run}", folder=folder, FAIL=fault)
    lines = [line for line in done.stderr.splitlines() if line.startswith("treering: ")]
    assert done.returncode != 0
    assert len(lines) == 1, done.stderr
    assert any(words in lines[0] for words in ENDS[fault].split("|"))
    # The previous step is complete, and after a signal the running one too.
    num_done = 2 if "SIGTERM" in fault else 1
    assert [row["step"] for row in rows(folder / run)] == [*range(1, num_done + 1)]
    assert alone(folder, f"run.dir={folder / run}", "rl.num_steps=3")["resumed_from_step"] == num_done


@pytest.mark.parametrize(
    ("overrides", "pattern"),
    [
        (["runtime.workers=1"], "runtime.workers = 1 starts its own processes: set runtime.workers=0"),
        (["engine.kind=vllm"], 'engine.kind = "vllm" starts its own processes: set engine.kind="torch"'),
    ],
)
def test_what_starts_other_processes_is_refused_under_torchrun(
    overrides: list[str], pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "run.toml").write_text("[rl]\nnum_steps = 1\n")
    with pytest.raises(ConfigError, match=pattern):
        run_train(tmp_path / "run.toml", overrides, json_output=True)
