"""Sums with a calculator: an object whose methods are tools, and solved episodes to begin with."""

import json
import random
import shutil
from pathlib import Path

from treering.rl.environments import EnvTask, ToolEnvironment
from treering.rl.environments.chat import BYTES_FOLDER

OUT = Path("runs/calculator_data")


class Calculator:
    """One episode: a sum of two numbers."""

    def reset(self, a: int, b: int) -> None:
        """Begins."""
        self.asked = f"{a} {b}"
        self.calls: list[str] = []

    def add(self, a: int, b: int) -> int:
        """Adds two numbers."""
        self.calls.append(f"{a} {b}")
        return a + b

    def get_reward(self) -> float:
        """The share of right characters in a single call."""
        if len(self.calls) != 1 or len(self.calls[0]) != len(self.asked):
            return 0.0
        return sum(map(str.__eq__, self.calls[0], self.asked)) / len(self.asked)


def sums(count: int, seed: int) -> list[tuple[int, int]]:
    """Distinct pairs of numbers."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    return random.Random(seed).sample(pairs, count)


def environment() -> ToolEnvironment:
    """What the configuration names: 64 sums that no solved episode has."""
    tasks = [EnvTask(id=f"{a}+{b}", data={"prompt": f"{a}+{b}", "a": a, "b": b}) for a, b in sums(3064, 0)[3000:]]
    return ToolEnvironment(Calculator, tasks, max_turns=2)


def write_solved() -> None:
    """Writes solved episodes and the tokenizer of single bytes for `treering sft`."""
    OUT.mkdir(parents=True, exist_ok=True)
    shutil.copytree(BYTES_FOLDER, OUT / "tokenizer", dirs_exist_ok=True)
    with (OUT / "solved.jsonl").open("w") as file:
        for a, b in sums(3064, 0)[:3000]:
            call = {"name": "add", "arguments": json.dumps({"a": a, "b": b}, separators=(",", ":"))}
            messages = [
                {"role": "user", "content": f"{a}+{b}"},
                {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
                {"role": "tool", "content": str(a + b)},
                {"role": "assistant", "content": str(a + b)},
            ]
            file.write(json.dumps({"task_id": f"{a}+{b}", "messages": messages}) + "\n")


if __name__ == "__main__":
    write_solved()
