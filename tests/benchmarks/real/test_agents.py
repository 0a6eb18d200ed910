"""The part agents with a small model: both kinds of environment, one rule, and trees of turns with thoughts."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.real import agents
from benchmarks.real.tasks import write_task
from benchmarks.real.taskset.calculator_rules import SUMS
from tokenizers import Tokenizer

from tests.integrations.verifiers.conftest import python, tokenizer
from tests.models import build
from treering.data import Message, Trajectory

__all__ = ["python", "tokenizer"]


@pytest.fixture(autouse=True)
def _long_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make room for prompts of single bytes."""

    def written(*args: Any, **options: Any) -> dict[str, Any]:
        sections = dict(write_task(*args, **options))
        return {**sections, "sampling": {**sections["sampling"], "max_tokens": 400}}

    monkeypatch.setattr(agents, "write_task", written)


NUM_HELD = 17
"""Tasks whose ids fall into a share of a third."""
SIZE = replace(agents.SIZE, num_prompts=16, prompts_per_step=16, group_size=2, num_epochs=1)


@pytest.fixture
def model(tmp_path: Path, tokenizer: Path) -> Path:
    """A random model that reads single bytes."""
    folder = tmp_path / "model"
    shutil.copytree(tokenizer, folder)
    num_ids = max(Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab().values()) + 1
    build(vocab_size=num_ids, max_position_embeddings=1024).save_pretrained(folder)
    return folder


def test_a_run_that_is_done_is_read_again(tmp_path: Path, model: Path) -> None:
    steps: list[str] = []
    found = agents.trained_agent(tmp_path / "own", model, size=SIZE, on_progress=steps.append)
    again = agents.trained_agent(tmp_path / "own", model, size=SIZE, on_progress=steps.append)
    assert found == again
    assert len(found["reward_by_step"]) == len(steps) == 2
    assert found["held_out_reward"] == [0.0] * len(found["held_out_reward"])


@pytest.mark.timeout(300)
def test_the_taskset_of_verifiers_has_the_same_tasks_and_rewards(tmp_path: Path, model: Path, python: str) -> None:
    sections = agents.verifiers_sections(python)
    with agents.taskset_path():
        found = agents.trained_agent(tmp_path / "v", model, sections, size=SIZE, on_progress=lambda text: None)
    assert len(found["reward_by_step"]) == 2
    run = tmp_path / "v" / "treering"
    num_rollouts = 2 * (len(SUMS) - NUM_HELD)
    assert agents.replayed(run, model) == {"num_rollouts": num_rollouts, "num_equal": num_rollouts}


def test_replayed_rewards_are_those_of_our_own_rule(tmp_path: Path, model: Path) -> None:
    a, b = SUMS[0]
    encoder = Tokenizer.from_file(str(model / "tokenizer.json"))
    turns = [encoder.encode(text, add_special_tokens=False).ids for text in (f"CALC: {a} + {b}", f"{a + b}.")]
    row = {"task_id": f"{a} + {b}", "reward": 1.0, "tokens": [7, *turns[0], 8, *turns[1]]}
    second = 2 + len(turns[0])
    row["episode"] = {"calls": [[0, 1, second - 1], [1, second, second + len(turns[1])]]}
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "epoch-000.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in (row, {**row, "reward": 0.2}))
    )
    assert agents.replayed(tmp_path, model) == {"num_rollouts": 2, "num_equal": 1}


def test_dropped_thoughts_branch_at_each_turn_and_cost_only_the_turns(tmp_path: Path, model: Path) -> None:
    def chat(number: int) -> Trajectory:
        said = [f"Thought {i}: {'t' * 20}{number}\nAction {i}: a{number}\n" for i in (1, 2)]
        roles = ("user", "assistant", "tool", "assistant")
        texts = ("q" * 50, said[0], "seen", said[1])
        messages = tuple(Message(role=role, content=text) for role, text in zip(roles, texts, strict=True))
        return Trajectory(task_id="q", messages=messages, format="raw")

    found = agents.thoughts([chat(1), chat(2)], model, tmp_path)
    assert (found["kept"]["num_sequences"], found["dropped"]["num_sequences"]) == (2, 4)
    # Single bytes, and one token per marker: the lengths can be counted.
    question, opened = len("user\n") + 50 + 3, 1 + len("assistant\n")
    thought, action, seen = len("<think>\n</think>\n") + 1 + 21, len("Action 1: a1") + 2, len("tool\nseen") + 3
    turn = opened + thought + action
    assert found["kept"]["flat_tokens"] == 2 * (question + 2 * turn + seen)
    assert found["dropped"]["flat_tokens"] == 2 * (question + turn + question + turn - thought + seen + turn)
    assert found["dropped"]["computed_tokens"] > found["kept"]["computed_tokens"]
