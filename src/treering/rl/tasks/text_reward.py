"""Reward of a response: one function, built-in or the user's, or a weighted sum of several."""

import asyncio
import inspect
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Any

from treering.errors import ConfigError, InputError
from treering.rl.tasks.judge import Judge
from treering.rl.tasks.ready_rewards import NAMED_REWARDS, check_answer, find_reward
from treering.rl.tasks.task import Prompt, Score, as_score, checked_reward
from treering.rl.user_code import contained, in_copy, in_words, location_of_function

SIGNATURES = (
    "def reward(prompt, text), or def reward(prompts, completions) for a group, each with columns of the prompts file "
    "as further parameters"
)
_GROUP = ("prompts", "completions")
_TEXTS = ("text", "response", "completion", "output", "generation", "solution_str")
_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoundReward:
    """A reward function and the columns that it takes."""

    label: str
    """Name in metrics."""
    function: Callable[..., object]
    takes_group: bool
    """Whether one call gets a whole group, as in TRL."""
    is_async: bool
    """Whether calls are coroutines, which run concurrently."""
    columns: tuple[str, ...]
    """Names of the columns passed to it."""

    def start(self, prompt: Prompt, texts: Sequence[str]) -> list[object]:
        """Call the function and return the result for each text, or one for all if it takes groups.

        A call that raised gives its exception. Awaitables are not awaited yet.
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
        """Return the score or error of each text, from the awaited results of `start`."""
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
                f"a reward of a group must return a list with one reward for each of its {num_texts} completions, and "
                f"{self.label} at {location_of_function(self.function)} returned {got}; return None to skip one"
            )
        ] * num_texts

    def _score(self, result: object) -> Score | Exception:
        if isinstance(result, Exception):
            return result
        try:
            return as_score(result)
        except InputError as error:
            return InputError(f"{location_of_function(self.function)}: {error}")


def bind(label: str, function: Callable[..., object], columns: Collection[str]) -> BoundReward:
    """Bind a function to the columns of a prompts file by the names of its parameters.

    Raises:
        ConfigError: a signature that is not one of `SIGNATURES`, or a parameter that is not a column.

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
    """Check that the first two parameters are the prompt and the text; an unused one may begin with an underscore."""
    has_any = any(each.kind is Parameter.VAR_POSITIONAL for each in _parameters(function).values())
    names = [*first, *["prompt", "text"][len(first) :]] if has_any else [*first]
    # Any other parameter, or a column in their place, would silently get the prompt or the text.
    known = ({"prompt"}, set(_TEXTS) - set(columns) | {"text"})
    if len(names) == 2 and all(name[:1] == "_" or name in own for name, own in zip(names, known, strict=True)):
        return
    raise ConfigError(
        f"{_described(function)} begins with other parameters than a reward's: {SIGNATURES}; rename or add its "
        "parameters"
    )


def _check_columns(function: Callable[..., object], others: Sequence[Parameter], columns: Collection[str]) -> None:
    variable = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    needed = [each.name for each in others if each.kind not in variable and each.default is Parameter.empty]
    missing = [name for name in needed if name not in columns]
    if missing:
        raise ConfigError(
            f"{_described(function)} needs {', '.join(missing)}, and the prompts file has the columns "
            f"{', '.join(columns) or 'none'}; rename the parameter, or give it a default"
        )


def _described(function: Callable[..., object]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return f"def {name}{inspect.signature(function)!s:.80} at {location_of_function(function)}"


def _parameters(function: Callable[..., object]) -> Mapping[str, Parameter]:
    try:
        return inspect.signature(function).parameters
    except (ValueError, TypeError):
        # Compiled code may have no signature.
        return {name: Parameter(name, Parameter.POSITIONAL_ONLY) for name in ("prompt", "text")}


def _takes_any(function: Callable[..., object]) -> bool:
    return any(each.kind is Parameter.VAR_KEYWORD for each in _parameters(function).values())


def _called(function: Callable[..., object], *args: object, **columns: object) -> object:
    try:
        return function(*args, **columns)
    except Exception as error:
        return error


def _listed(answer: Any) -> list[object] | None:
    """Return the items of a list, an array or a tensor, or None if the value has none."""
    try:
        return list(answer)
    except TypeError:
        return None


_MISTAKES = (AttributeError, ImportError, InputError, NameError, TypeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedReward:
    """One of several rewards."""

    name: str
    """Name of the function, as `find_reward` takes it."""
    weight: float = 1.0


class TextReward:
    """Weighted sum of rewards on the text of responses.

    A reward that returns None is left out of the sum; if all do, the response is dropped from its group.

    Example: `exact_answer` with weight 1 and a reward "short" of 0.5 with weight 0.2 give a right answer 1.1, and the
    numbers "exact_answer" 1.0 and "short" 0.5.
    """

    def __init__(
        self, reward: str | Sequence[WeightedReward], folders: Sequence[Path], judge: Judge | None = None
    ) -> None:
        """Find the functions.

        Args:
            reward: name of a reward, or several.
            folders: where files and modules are looked up, see `find_reward`.
            judge: the reward "judge", if the run has one.

        Raises:
            ConfigError: no reward, two with the same name, or one that is not found.
        """
        parts = [WeightedReward(name=reward)] if isinstance(reward, str) else list(reward)
        self._parts = {part.name.rpartition(":")[2]: part for part in parts}
        if not parts or len(self._parts) < len(parts):
            names = ", ".join(part.name for part in parts) or "none"
            raise ConfigError(
                f"rewards must be one or more functions of different names, got {names}; rename or drop some"
            )
        self.name = " + ".join(part.name for part in parts)
        """Names of the rewards, for errors."""
        self._judge = judge
        self._functions: dict[str, Callable[..., object]] = {
            label: judge if judge is not None and part.name == "judge" else find_reward(part.name, folders)
            for label, part in self._parts.items()
        }
        self._rewards: list[BoundReward] = []
        # One event loop for all calls: clients that a reward keeps belong to the loop that they were made in.
        self._runner = asyncio.Runner()
        weakref.finalize(self, _close, self._runner)

    @property
    def is_own(self) -> bool:
        """Whether one of the rewards is not built in."""
        return any(part.name not in NAMED_REWARDS for part in self._parts.values())

    @property
    def takes_groups(self) -> bool:
        """Whether `scores` gets whole groups: a reward needs one, or is a coroutine, so that many run at a time."""
        return any(reward.takes_group or reward.is_async for reward in self._rewards)

    def check_answer(self, answer: str | None) -> None:
        """Refuse an answer that a built-in reward cannot use; see `ready_rewards.check_answer`."""
        for part in self._parts.values():
            check_answer(part.name, answer)

    def bind(self, columns: Collection[str]) -> None:
        """Check the signatures of the functions against the columns of the prompts file; see `bind`."""
        self._rewards = [bind(label, function, columns) for label, function in self._functions.items()]

    def scores(
        self, prompt: Prompt, texts: Sequence[str], answers: Sequence[str] | None = None
    ) -> list[Score | Exception]:
        """Return the score of each response, or the error that left it without one.

        Args:
            prompt: prompt of the responses.
            texts: texts for the user's rewards.
            answers: texts after the thoughts, for built-in rewards; None finds thoughts by their tags in the texts.
        """
        ready = [*NAMED_REWARDS.values(), self._judge]
        started = [
            reward.start(prompt, texts if answers is None or reward.function not in ready else answers)
            for reward in self._rewards
        ]
        self._await(started)
        parts = [reward.scores(done, len(texts)) for reward, done in zip(self._rewards, started, strict=True)]
        return [self._sum(scores) for scores in zip(*parts, strict=True)]

    def try_on(self, prompt: Prompt, time_limit_s: float = 60.0) -> None:
        """Call the user's rewards once, on the prompt's answer or an empty text, in a copy of this process.

        The call is not counted. A reward may raise for an empty text, unless the error is a mistake in the code.

        Raises:
            InputError: a reward raises, returns no reward, ends its process, or takes longer than `time_limit_s`.
        """
        if not self.is_own:
            return
        try:
            error = in_copy(lambda: self._trial_error(prompt), time_limit_s)
        except TimeoutError:
            raise InputError(
                f"{self.name} took longer than runtime.reward_time_limit_s = {time_limit_s:g} s in its trial call "
                f"(prompt {prompt.name}, text {(prompt.answer or '')!r:.60}); set a time limit for whatever it waits "
                "for, or raise the setting"
            ) from None
        if error or (error is None and prompt.answer is not None):
            what = error or "the reward's process crashed or ended; return a number for every text, or None to skip it"
            raise InputError(f"{what} (reward {self.name}, prompt {prompt.name}, text {(prompt.answer or '')!r:.60})")

    def _trial_error(self, prompt: Prompt) -> str:
        text = prompt.answer or ""
        try:
            with contained():
                scores = self.scores(prompt, [text, text] if self.takes_groups else [text])
        except InputError as error:
            return "" if prompt.answer is None else in_words(error)
        for score in scores:
            if isinstance(score, InputError):
                return in_words(score)
            if isinstance(score, Exception) and (prompt.answer is not None or isinstance(score, _MISTAKES)):
                return f"{in_words(score)}; return a number for every text, or None to skip it"
        return ""

    def _sum(self, scores: Sequence[Score | Exception]) -> Score | Exception:
        numbers: dict[str, float] = {}
        terms = []
        for (label, part), score in zip(self._parts.items(), scores, strict=True):
            if isinstance(score, Exception):
                return score
            numbers |= {f"{label}/{name}": number for name, number in score.numbers.items()}
            if score.reward is None:
                continue
            terms.append(part.weight * score.reward)
            if len(scores) > 1:
                numbers[label] = score.reward
        try:
            return Score(reward=checked_reward(sum(terms)) if terms else None, numbers=numbers)
        except InputError as error:
            return error

    def _await(self, started: Sequence[list[object]]) -> None:
        """Replace awaitables by their results; all run concurrently."""
        pending = [
            (results, i) for results in started for i, result in enumerate(results) if inspect.isawaitable(result)
        ]
        if not pending:
            return
        done = self._run([results[i] for results, i in pending])
        for (results, i), result in zip(pending, done, strict=True):
            results[i] = result

    def _run(self, awaitables: Sequence[object]) -> list[object]:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._runner.run(_settled(awaitables))
        # The caller already runs a loop in this thread, as notebooks do.
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(self._runner.run, _settled(awaitables)).result()


async def _settled(awaitables: Sequence[object]) -> list[object]:
    """Return the results in order; an awaitable that raised gives its exception."""

    async def settle(awaitable: object) -> object:
        try:
            return await awaitable  # type: ignore[misc]
        except Exception as error:
            return error

    return await asyncio.gather(*map(settle, awaitables))


def _close(runner: asyncio.Runner) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        runner.close()
    else:
        # Collected while another loop runs in this thread, in which no second one can run to its end.
        runner.get_loop().close()
