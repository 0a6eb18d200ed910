"""Environments from other libraries' objects: objects whose methods are tools, and objects with reset and step."""

import asyncio
import inspect
import json
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Union, get_args, get_origin, get_type_hints

from treering.data.trajectory import ToolCall
from treering.errors import ContextFullError, InputError
from treering.rl.environments.environment import Environment, EnvTask, Outcome
from treering.rl.environments.policy_calls import Policy

_JSON_TYPES: Mapping[Any, str] = types.MappingProxyType(
    {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
)
_RESERVED = frozenset({"reset", "get_reward"})


class ToolObject(Protocol):
    """An object whose other public methods are tools, as TRL's `environment_factory` makes them."""

    def reset(self, **data: Any) -> Any:
        """Begin an episode with the fields of a task, and with its prompt if there is a parameter for it.

        Return text or message parts to add to the question, or None.
        """

    def get_reward(self) -> Any:
        """Return the reward of the episode; may be a coroutine."""


class StepObject(Protocol):
    """An object with reset and step, as in Gymnasium, whose observations and actions are texts."""

    def reset(self, **data: Any) -> Any:
        """Begin an episode; return the first observation, or a pair that begins with it."""

    def step(self, action: str) -> Sequence[Any]:
        """Take an action; return observation, reward, whether it is over, and maybe more, as in Gymnasium."""


class ToolEnvironment(Environment):
    """Episodes of an object whose public methods are tools: they end with the first turn without a call.

    A task's data is a mapping with "prompt", a text or messages, and the fields that `reset` takes. Each episode has
    its own object, whose methods run in other threads unless they are coroutines.

    Example:
        >>> class Calculator:
        ...     def reset(self, answer):
        ...         self.answer, self.found = answer, None
        ...
        ...     def add(self, a: int, b: int) -> int:
        ...         'Adds two numbers.'
        ...         self.found = a + b
        ...         return self.found
        ...
        ...     def get_reward(self):
        ...         return float(self.found == self.answer)
        >>> tasks = [EnvTask(id="2+2", data={"prompt": "What is 2+2?", "answer": 4})]
        >>> ToolEnvironment(Calculator, tasks).tools[0]["function"]["parameters"]["required"]
        ['a', 'b']
    """

    def __init__(self, factory: Callable[[], ToolObject], tasks: Sequence[EnvTask], *, max_turns: int = 16) -> None:
        """Make one object to read its tools.

        Args:
            factory: makes an object; it may be a class.
            tasks: tasks with data as above.
            max_turns: most turns of an episode.

        Raises:
            InputError: the object has no tools.
        """
        self.tasks = tasks
        self._factory, self._max_turns = factory, max_turns
        self.tools = _tools_of(factory())

    async def run(self, task: EnvTask, policy: Policy) -> float | Outcome:
        """Run an episode with one object."""
        data = dict(task.data)
        prompt = data.get("prompt")
        if not isinstance(prompt, str) and not (isinstance(prompt, list | tuple) and prompt):
            raise InputError(
                f'a task\'s data must have a "prompt", a text or messages, got {prompt!r:.60} in {task.id!r}'
            )
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        thing = self._factory()
        if not _takes(thing.reset, "prompt"):
            del data["prompt"]
        more = await _called(thing.reset, **data)
        if more:
            messages[-1] = _extended(messages[-1], more)
        try:
            for _ in range(self._max_turns):
                reply = await policy.chat(messages, tools=self.tools)
                if not reply.tool_calls:
                    break
                messages.append(reply.message)
                messages += [await _answer(thing, call, self.tools) for call in reply.tool_calls]
        except ContextFullError:
            pass
        return float(await _called(thing.get_reward))


class StepEnvironment(Environment):
    """Episodes of an object with reset and step: observations are the user's messages, turns are actions.

    The reward of a step belongs to the call that chose the action, so a call is worth the rewards of its episode from
    that step on. A task's data is a mapping with the fields that `reset` takes.

    Example: if three steps have rewards 0, 0 and 1, each of the three calls is worth 1; with 1, 0 and 0 only the first
    is.
    """

    def __init__(
        self,
        factory: Callable[[], StepObject],
        tasks: Sequence[EnvTask],
        *,
        system: str | None = None,
        max_turns: int = 16,
    ) -> None:
        """Set up the environment; objects are made later.

        Args:
            factory: makes an object, one for each episode.
            tasks: tasks with data as above.
            system: text of the first message; None for no system message.
            max_turns: most turns of an episode.
        """
        self.tasks = tasks
        self._factory, self._system, self._max_turns = factory, system, max_turns

    async def run(self, task: EnvTask, policy: Policy) -> float | Outcome:
        """Run an episode with one object."""
        thing = self._factory()
        observed = await asyncio.to_thread(thing.reset, **dict(task.data or {}))
        messages: list[Mapping[str, Any]] = [{"role": "system", "content": self._system}] if self._system else []
        rewards: dict[int, float] = {}
        try:
            for _ in range(self._max_turns):
                text = observed[0] if isinstance(observed, tuple) else observed
                messages.append({"role": "user", "content": str(text)})
                reply = await policy.chat(messages)
                messages.append(reply.message)
                observed, reward, *ends = await asyncio.to_thread(thing.step, reply.text)
                rewards[reply.call] = float(reward)
                # Gym, unlike Gymnasium, returns info as the second value.
                if any(end for end in ends[:2] if not isinstance(end, Mapping)):
                    break
        except ContextFullError:
            pass
        return Outcome(reward=0.0, turn_rewards=rewards)


def tool_schema(function: Callable[..., Any], name: str) -> Mapping[str, Any]:
    """Return the JSON schema of a method as a tool: its name, docstring and parameters.

    Example: `def add(self, a: int, b: int = 0)` has integers "a" and "b", and only "a" is required.
    """
    hints = get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    wrong = [each.name for each in parameters if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    if wrong:
        raise InputError(f"the arguments of a tool must have names, and {name} takes *{wrong[0]}; name each")
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": inspect.getdoc(function) or "",
            "parameters": {
                "type": "object",
                "properties": {each.name: _json_type(hints.get(each.name)) for each in parameters},
                "required": [each.name for each in parameters if each.default is each.empty],
            },
        },
    }


def _json_type(hint: Any) -> dict[str, str]:
    options = [each for each in get_args(hint) if each is not type(None)]
    if get_origin(hint) in (Union, types.UnionType) and len(options) == 1:
        return _json_type(options[0])
    found = _JSON_TYPES.get(get_origin(hint) or hint)
    return {} if found is None else {"type": found}


def _tools_of(thing: object) -> list[Mapping[str, Any]]:
    # Read the class, because the object's properties may not have values yet.
    names = [name for name, _ in inspect.getmembers(type(thing), inspect.isfunction)]
    found = [
        tool_schema(getattr(thing, name), name) for name in names if not name.startswith("_") and name not in _RESERVED
    ]
    if not found:
        raise InputError(
            f"the public methods of a tool object are its tools, and {type(thing).__qualname__} has none besides "
            f"{' and '.join(sorted(_RESERVED))}; add one"
        )
    return found


def _extended(message: Mapping[str, Any], more: Any) -> Mapping[str, Any]:
    """Return a message with more at its end; both may be text or lists of parts."""
    content = message["content"]
    if isinstance(content, str) and isinstance(more, str):
        return {**message, "content": content + more}
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else list(each) for each in (content, more)]
    return {**message, "content": [*parts[0], *parts[1]]}


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


async def _called(method: Callable[..., Any], /, **arguments: Any) -> Any:
    if inspect.iscoroutinefunction(method):
        return await method(**arguments)
    return await asyncio.to_thread(method, **arguments)


async def _answer(thing: object, call: ToolCall, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the message with a call's result; an exception of the tool becomes the result, so the policy sees it."""
    message = {"role": "tool", "tool_call_id": call.id, "name": call.name}
    try:
        arguments = json.loads(call.given) if isinstance(call.given, str) else dict(call.given)
        if call.name not in {tool["function"]["name"] for tool in tools}:
            raise InputError(f"there is no tool {call.name!r}")
        method = getattr(thing, call.name)
        inspect.signature(method).bind(**arguments)
        found = await _called(method, **arguments)
        return {**message, "content": found if isinstance(found, str) else json.dumps(found, default=str)}
    except Exception as error:
        return {**message, "content": f"error: {error}"}
