"""Three tasks whose rewards are rules: a number alone, the form of an answer, a calculator to ask and to believe."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.real.taskset.calculator_rules import SUMS, observation, question, reward
from treering.cli.demo import DemoSize, Sections, sums_in_words, write_real_task
from treering.rl.environments import Environment, EnvTask

NUM_HELD_OUT, MAX_TURN_TOKENS = 16, 24
HELD_OUT_FILE = "held_out.jsonl"

_THINGS = ("bird", "city", "colour", "country", "drink", "fish", "flower", "fruit", "game", "metal", "month", "planet",
           "river", "sport", "tool", "tree")  # fmt: skip
_ASKED = {
    "words": "Name a {thing}. Answer in exactly {count} words.",
    "lower": "Name a {thing}. Answer in lowercase letters only.",
    "json": 'Name a {thing}. Answer with JSON alone, such as {{"name": "x"}}.',
}


def forms(count: int, seed: int) -> list[dict[str, Any]]:
    """Distinct prompts that ask for a form, with the rule as a column.

    Example: one is "Name a fish. Answer in lowercase letters only." with the rule "lower".
    """
    draws = random.Random(seed)
    lines = [
        {
            "prompt_id": f"{rule} {thing}",
            "prompt": asked.format(thing=thing, count=number),
            "rule": rule,
            "count": number,
        }
        for rule, asked in _ASKED.items()
        for thing in _THINGS
        for number in (draws.randint(2, 3),)
    ]
    return draws.sample(lines, count)


def follows_form(prompt: Any, text: str, rule: str, count: int) -> float:
    """1.0 if the answer has the form that its prompt asks for, else 0.0."""
    text = text.strip()
    if rule == "words":
        return float(len(text.split()) == count)
    if rule == "lower":
        return float(text.islower())
    try:
        found = json.loads(text)
    except ValueError:
        return 0.0
    return float(isinstance(found, dict) and set(found) == {"name"})


class Calculator(Environment):
    """Sums of numbers that the model cannot add alone: it asks the calculator, and answers with what it says."""

    tasks = tuple(EnvTask(id=f"{a} + {b}", data=(a, b)) for a, b in SUMS)

    async def run(self, task: EnvTask, policy: Any) -> float:
        """Return the reward of one episode: at most two turns."""
        messages: list[Mapping[str, Any]] = [*question(*task.data)]
        asked = await policy.chat(messages)
        seen = observation(asked.text)
        answers = [] if seen is None else [await policy.chat([*messages, asked.message, seen])]
        return reward(*task.data, [each.text for each in (asked, *answers)])


TASKS = ("sums", "forms", "calculator")


def write_task(name: str, out: Path, model: Path, size: DemoSize, *, seed: int, temperature: float) -> Sections:
    """Writes prompts, held-out ones and rewards into a folder; the settings of a run, which evaluates every epoch."""
    out.mkdir(parents=True, exist_ok=True)
    sections = {key: dict(own) for key, own in write_real_task(out, model, size, seed=seed).sections.items()}
    sections["sampling"]["temperature"] = temperature
    sections["eval"] = {"every": size.steps_per_epoch}
    if name == "calculator":
        sections["task"] = {
            "kind": "environment",
            "env": "benchmarks.real.tasks:Calculator",
            "max_turn_tokens": MAX_TURN_TOKENS,
        }
        sections["sampling"]["max_tokens"] = 192
        sections["eval"]["share"] = NUM_HELD_OUT / len(Calculator.tasks)
        return sections
    lines = (sums_in_words if name == "sums" else forms)(size.num_prompts + NUM_HELD_OUT, seed)
    _write(out / sections["task"]["file"], lines[NUM_HELD_OUT:])
    _write(out / HELD_OUT_FILE, lines[:NUM_HELD_OUT])
    sections["eval"]["file"] = HELD_OUT_FILE
    if name == "forms":
        sections["task"]["reward"] = "benchmarks.real.tasks:follows_form"
    return sections


def _write(file: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
