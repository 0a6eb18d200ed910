"""`task.kind = "environment"` from the command line: it trains, resumes bitwise, and refuses unsupported settings."""

import json

import pytest

from tests.cli.runs import Commands, assert_same_weights
from treering.data.held_out_tasks import is_held_out

ENVIRONMENT = """
from treering.rl.environments import Environment, EnvTask


class Digits(Environment):
    tasks = [EnvTask(id=f"d{i}", data=i) for i in range(4)]

    async def run(self, task, policy):
        question = {"role": "user", "content": str(task.data)}
        first = await policy.chat([question])
        second = await policy.chat([question, first.message, {"role": "user", "content": "Again"}])
        return sum(map(str.islower, first.text + second.text)) / 8


class Broken(Digits):
    async def run(self, task, policy):
        raise ValueError("no such file")
"""
CONFIG = ("task.kind=environment", "task.env=envs.py:Digits", "task.max_turn_tokens=4", "sampling.max_tokens=90")


@pytest.fixture
def trained(commands: Commands) -> Commands:
    (commands.folder / "envs.py").write_text(ENVIRONMENT)
    text = (commands.folder / "train.toml").read_text().replace("max_prompts = 4\n", "").replace("max_tokens = 6\n", "")
    (commands.folder / "train.toml").write_text(text)
    return commands


def test_a_run_trains_and_a_resumed_one_ends_bitwise_as_one_that_was_not_stopped(trained: Commands) -> None:
    told = trained.done("train", *CONFIG, "run.dir=whole")
    assert "chats are read as single bytes" in told
    trained.done("train", *CONFIG, "rl.num_steps=2")
    assert "resuming the run in out after step 2" in trained.done("train", *CONFIG)
    assert_same_weights(trained.folder / "whole", trained.folder / "out", 4)
    written = json.loads((trained.folder / "out" / "config.json").read_text())
    assert written["task"]["env"] == "envs.py:Digits"
    rows = [json.loads(line) for line in (trained.folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["rewards/branches"] for row in rows if "rewards/branches" in row] == [1.0] * 4
    rollouts, whole = ((trained.folder / run / "rollouts" / "epoch-000.jsonl").read_text() for run in ("out", "whole"))
    # Two steps of 2 tasks and 3 runs each.
    assert len(rollouts.splitlines()) == 12
    assert rollouts == whole


def test_workers_run_the_episodes_of_one_process(trained: Commands) -> None:
    trained.done("train", *CONFIG, "run.dir=whole", "rl.num_steps=2")
    workers = ("runtime.workers=1", "runtime.rebalance=none", "schedule=fifo")
    trained.done("train", *CONFIG, *workers, "rl.num_steps=2")
    assert_same_weights(trained.folder / "whole", trained.folder / "out", 2)


def test_held_out_tasks_are_evaluated_and_never_trained(trained: Commands) -> None:
    own = ("eval.share=0.5", "eval.temperature=1.0", "eval.num_samples=2", "rl.kl=0.1", "rl.kl_in=reward")
    assert "held-out tasks are evaluated" in trained.done("train", *CONFIG, *own)
    found = [json.loads(line) for line in (trained.folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in found if "eval/pass_at_2" in row] == [0, 4]
    assert all("train/kl" in row for row in found if "train/loss" in row)
    files = (trained.folder / "out" / "rollouts").iterdir()
    ids = {json.loads(line)["task_id"] for file in files for line in file.read_text().splitlines()}
    held = {f"d{i}" for i in range(4) if is_held_out(f"d{i}", 0.5, seed=0)}
    assert ids == {f"d{i}" for i in range(4)} - held
    assert 0 < len(held) < 4


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (["task.env=envs.py:Broken", "runtime.workers=1"], "task.max_failed allows 50%"),
        (["task.env=envs.py:Nothing"], "has none named 'Nothing'"),
        (["task.max_number=3"], 'kind = "environment" has no max_number, which belong to "sums"'),
        (["runtime.workers=1", "runtime.rebalance=running"], "stay on the worker where they began"),
        (["warmup.num_steps=2"], 'task.kind = "environment" has none'),
        (["task.max_turn_tokens=100"], "bounds a context with its turn"),
        (["task.template=raw"], 'template = "raw" has none'),
        (["task.envs=envs.py:Digits"], "did you mean 'task.env'?"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(trained: Commands, overrides: list[str], rule: str) -> None:
    code, told = trained.run("train", *CONFIG, *overrides)
    assert code != 0
    assert rule in " ".join(told.split())
