"""A reward function bound to the columns of a prompts file: which signature it has, and how it is called."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from treering.errors import ConfigError, InputError
from treering.rl.tasks.score import Score, as_score
from treering.rl.tasks.task import Prompt
from treering.rl.user_code import place_of_function

SIGNATURES = (
    "def reward(prompt, text), or def reward(prompts, completions) for a group at once, each with parameters that are "
    "columns of the prompts file, or with **columns for all of them"
)
_GROUP = ("prompts", "completions")
_TEXTS = ("text", "response", "completion", "output", "generation", "solution_str", "data_source")
_ANSWERS = ("answer", "ground_truth", "solution", "label", "target", "reference")
_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoundReward:
    """A reward function and the columns that it takes."""

    label: str
    """Its name in metrics."""
    function: Callable[..., object]
    takes_group: bool
    """Whether it is called once for a group, as TRL calls rewards."""
    is_async: bool
    """Whether its calls are coroutines, which run at the same time."""
    columns: tuple[str, ...]
    """Names of the columns that it is called with."""

    def start(self, prompt: Prompt, texts: Sequence[str]) -> list[object]:
        """Calls the function: the result for each text, or one for all if it takes groups.

        An exception stands for a call that raised, and awaitables are not awaited yet.
        """
        columns = {name: prompt.columns.get(name) for name in self.columns}
        if not self.takes_group:
            return [_called(self.function, prompt, text, **columns) for text in texts]
        size = len(texts)
        given: dict[str, object] = {name: [value] * size for name, value in columns.items()}
        value = prompt.columns.get("prompt")
        if value is None:
            value = prompt.columns.get("question")
        completions = [[{"role": "assistant", "content": text}] if isinstance(value, list) else text for text in texts]
        if "prompts" in _parameters(self.function) or _takes_any(self.function):
            given["prompts"] = [value] * size
        return [_called(self.function, completions=completions, **given)]

    def scores(self, results: Sequence[object], num_texts: int) -> list[Score | Exception]:
        """The score of each text, or its error, from the awaited results of `start`."""
        if self.takes_group:
            results = self._split(results[0], num_texts)
        return [self._score(result) for result in results]

    def _split(self, answer: object, num_texts: int) -> Sequence[object]:
        if isinstance(answer, Exception):
            return [answer] * num_texts
        parts = None if isinstance(answer, str | Mapping) else _listed(answer)
        if parts is not None and len(parts) == num_texts:
            return parts
        got = f"{answer!r:.60} ({type(answer).__name__})" if parts is None else f"{len(parts)}"
        return [
            InputError(
                f"a reward of a group returns a list of one reward for each of its {num_texts} completions, and "
                f"{self.label} at {place_of_function(self.function)} returned {got}; return None for one without reward"
            )
        ] * num_texts

    def _score(self, result: object) -> Score | Exception:
        if isinstance(result, Exception):
            return result
        try:
            return as_score(result)
        except InputError as error:
            return InputError(f"{place_of_function(self.function)}: {error}")


def bind(label: str, function: Callable[..., object], columns: Collection[str]) -> BoundReward:
    """Binds a function to the columns of a prompts file by the names of its parameters.

    Raises:
        ConfigError: a signature that is none of `SIGNATURES`, or a parameter that is no column.

    Example: with the columns "prompt" and "unit", `def reward(prompt, text, unit)` is called with the unit of each
    prompt, `def reward(completions, **columns)` once for a group with `prompts` and `unit` as lists, and
    `def reward(text)` is refused.
    """
    parameters = _parameters(function)
    takes_group = _GROUP[1] in parameters
    if takes_group:
        given: tuple[str, ...] = _GROUP
    else:
        given = tuple(name for name, each in parameters.items() if each.kind in _BY_POSITION)[:2]
        _check_first(function, given, columns)
    others = [each for name, each in parameters.items() if name not in given]
    _check_columns(function, others, columns)
    names = {each.name for each in others}
    wanted = [name for name in columns if name not in given and (_takes_any(function) or name in names)]
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return BoundReward(
        label=label, function=function, takes_group=takes_group, is_async=is_async, columns=tuple(wanted)
    )


def _check_first(function: Callable[..., object], first: Sequence[str], columns: Collection[str]) -> None:
    """The first two parameters are the prompt and the text, whatever their names, unless those say otherwise."""
    has_any = any(each.kind is Parameter.VAR_POSITIONAL for each in _parameters(function).values())
    names = [*first, *["prompt", "text"][len(first) :]] if has_any else [*first]
    # A column in their place would silently get the prompt or the text, and so would what other trainers call them.
    foreign = ({*columns, *_TEXTS, *_ANSWERS} - {"prompt"}, {*columns, *_ANSWERS, "prompt", "question"} - {"text"})
    if len(names) == 2 and not any(name in others for name, others in zip(names, foreign, strict=True)):
        return
    raise ConfigError(f"a reward is {SIGNATURES}; got {_described(function)}; rename or add its parameters")


def _check_columns(function: Callable[..., object], others: Sequence[Parameter], columns: Collection[str]) -> None:
    variable = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    needed = [each.name for each in others if each.kind not in variable and each.default is Parameter.empty]
    missing = [name for name in needed if name not in columns]
    if missing:
        raise ConfigError(
            f"a reward is {SIGNATURES}; got {_described(function)}, and {', '.join(missing)} is no column: they are "
            f"{', '.join(columns) or 'none'}; rename it, or give it a default"
        )


def _described(function: Callable[..., object]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return f"def {name}{inspect.signature(function)} at {place_of_function(function)}"


def _parameters(function: Callable[..., object]) -> Mapping[str, Parameter]:
    try:
        return inspect.signature(function).parameters
    except (ValueError, TypeError):
        # Compiled code may not say.
        return {name: Parameter(name, Parameter.POSITIONAL_ONLY) for name in ("prompt", "text")}


def _takes_any(function: Callable[..., object]) -> bool:
    return any(each.kind is Parameter.VAR_KEYWORD for each in _parameters(function).values())


def _called(function: Callable[..., object], *args: object, **columns: object) -> object:
    try:
        return function(*args, **columns)
    except Exception as error:
        return error


def _listed(answer: Any) -> list[object] | None:
    """The items of a list, an array or a tensor; None of what has no items."""
    try:
        return list(answer)
    except TypeError:
        return None
