"""Objects of other libraries as environments: their methods are called as the policy asks, and their rewards arrive."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from treering.data.rendering.call_formats import PlainFormat
from treering.errors import ConfigError, InputError
from treering.rl.environments.environment import Environment, EnvTask, find_environment
from treering.rl.environments.library_tools import StepEnvironment, ToolEnvironment, tool_schema
from treering.rl.environments.policy_calls import ContextFullError, Reply


class Spoken:
    """Policy that plays a script."""

    def __init__(self, *turns: str | Exception) -> None:
        self.turns, self.seen, self.tools = list(turns), [], None

    async def chat(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] = ()) -> Reply:
        self.seen, self.tools = list(messages), tools
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        text, calls = PlainFormat().split(turn, tools) if tools else (turn, ())
        number = len(messages)
        return Reply(
            call=number,
            text=text,
            tool_calls=calls,
            finish_reason="stop",
            message={"role": "assistant", "content": turn},
        )


class Calculator:
    """Adds and divides."""

    def reset(self, answer: float) -> str:
        self.answer, self.found = answer, None
        return " Use the tools."

    def add(self, a: int, b: int = 0) -> int:
        """Adds two numbers."""
        self.found = a + b
        return self.found

    async def half(self, a: float | None) -> dict[str, float]:
        """Halves a number."""
        self.found = a / 2
        return {"half": self.found}

    def get_reward(self) -> float:
        return float(self.found == self.answer)

    def _hidden(self) -> None:
        raise AssertionError


TASK = EnvTask(id="q", data={"prompt": "What is 2+2?", "answer": 4})


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def test_public_methods_are_tools_and_their_results_come_back() -> None:
    policy = Spoken(f"I see.\n{call('add', a=2, b=2)}", f"{call('half', a=8)}", "done")
    environment = ToolEnvironment(Calculator, [TASK])
    assert asyncio.run(environment.run(TASK, policy)) == 1.0
    assert [tool["function"]["name"] for tool in policy.tools] == ["add", "half"]
    assert policy.seen[0] == {"role": "user", "content": "What is 2+2? Use the tools."}
    assert [message["content"] for message in policy.seen if message["role"] == "tool"] == ["4", '{"half": 4.0}']


class Maze:
    """An environment written for TRL."""

    @property
    def place(self) -> str:
        raise RuntimeError("the maze was not entered")

    def reset(self, prompt: Any, **data: Any) -> list[dict[str, str]]:
        self.given = prompt, data
        return [{"type": "text", "text": " Go."}]

    def move(self, method: str) -> str:
        """Moves."""
        return method

    async def get_reward(self) -> float:
        return float(self.given[1]["doors"])


def test_what_trl_takes_is_taken_properties_parts_coroutines_and_prompts() -> None:
    parts = [{"type": "text", "text": "Which way?"}]
    for question in ("Which way?", [{"role": "user", "content": parts}]):
        task = EnvTask(id="m", data={"prompt": question, "doors": 3})
        policy, environment = Spoken(call("move", method="left"), "done"), ToolEnvironment(Maze, [task])
        assert [tool["function"]["name"] for tool in environment.tools] == ["move"]
        assert asyncio.run(environment.run(task, policy)) == 3.0
        assert policy.seen[0]["content"] == [*parts, {"type": "text", "text": " Go."}]
        assert policy.seen[-1]["content"] == "left"


@pytest.mark.parametrize(
    ("turn", "answer"),
    [
        (call("add", a=1, c=2), "error: got an unexpected keyword argument 'c'"),
        (call("get_reward"), "error: there is no tool 'get_reward'"),
        (call("_hidden"), "error: there is no tool '_hidden'"),
        (call("half", a="x"), "error: unsupported operand"),
    ],
)
def test_a_tools_error_is_its_answer(turn: str, answer: str) -> None:
    policy = Spoken(turn, "done")
    assert asyncio.run(ToolEnvironment(Calculator, [TASK]).run(TASK, policy)) == 0.0
    assert policy.seen[-1]["content"].startswith(answer)


def test_a_full_context_or_the_last_turn_ends_with_the_reward() -> None:
    policy = Spoken(call("add", a=2, b=2), ContextFullError("full"))
    assert asyncio.run(ToolEnvironment(Calculator, [TASK]).run(TASK, policy)) == 1.0
    policy = Spoken(call("add", a=2, b=2), "never said")
    assert asyncio.run(ToolEnvironment(Calculator, [TASK], max_turns=1).run(TASK, policy)) == 1.0
    assert policy.turns == ["never said"]


def test_schemas_say_names_types_and_what_is_required() -> None:
    function = tool_schema(Calculator().half, "half")["function"]
    assert function["parameters"] == {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}
    assert tool_schema(Calculator().add, "add")["function"]["parameters"]["required"] == ["a"]
    with pytest.raises(InputError, match="takes \\*more"):
        tool_schema(lambda *more: None, "f")


class Walk:
    """Environment that ends after three steps to the right."""

    def reset(self, length: int) -> tuple[str, dict[str, Any]]:
        self.left = length
        return f"{self.left} to go", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= action == "right"
        return f"{self.left} to go", float(action == "right"), self.left == 0, False, {}


class PlainWalk(Walk):
    """Environment whose step returns only whether it is over."""

    def step(self, action: str) -> Any:
        return super().step(action)[:3]


class OldWalk(Walk):
    """An environment with Gym's older signature."""

    def step(self, action: str) -> Any:
        return *super().step(action)[:3], {"left": self.left}


@pytest.mark.parametrize("walk", [Walk, PlainWalk, OldWalk])
def test_steps_have_their_rewards_and_end_the_episode(walk: type[Walk]) -> None:
    task = EnvTask(id="w", data={"length": 2})
    policy = Spoken("right", "left", "right", "never said")
    outcome = asyncio.run(StepEnvironment(walk, [task], system="Go right.").run(task, policy))
    assert list(outcome.turn_rewards.values()) == [1.0, 0.0, 1.0]
    assert policy.seen[0]["role"] == "system"
    assert [message["content"] for message in policy.seen[1::2]] == ["2 to go", "1 to go", "1 to go"]


SOURCE = """
from treering.rl.environments import Environment, EnvTask

class Mine(Environment):
    tasks = [EnvTask(id="a")]

    async def run(self, task, policy):
        return 1.0

class Sync:
    def run(self, task, policy):
        return 1.0

def broken():
    raise ValueError("no file")

number = 3
"""


def test_an_environment_is_found_by_its_file_and_refused_by_name(tmp_path: Any) -> None:
    (tmp_path / "envs.py").write_text(SOURCE)
    assert isinstance(find_environment("envs.py:Mine", [tmp_path]), Environment)
    for name, rule in (
        ("envs.py", "must be file.py:Name"),
        ("other.py:Mine", "other.py is not in"),
        ("envs.py:Nine", "has none named 'Nine'"),
        ("envs.py:number", "has none named 'number'"),
        ("envs.py:broken", r"envs\.py:\d+: ValueError: no file"),
        ("envs.py:Sync", "needs tasks and a coroutine run"),
    ):
        with pytest.raises(ConfigError, match=rule):
            find_environment(name, [tmp_path])
