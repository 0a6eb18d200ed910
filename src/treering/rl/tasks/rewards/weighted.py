"""The reward of a response: one reward function, or a weighted sum of several."""

import asyncio
import inspect
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from treering.errors import ConfigError, InputError
from treering.rl.tasks.rewards.bound import BoundReward, bind
from treering.rl.tasks.rewards.judge import Judge
from treering.rl.tasks.rewards.named import NAMED_REWARDS, check_answer, find_reward
from treering.rl.tasks.score import Score, checked_reward
from treering.rl.tasks.task import Prompt
from treering.rl.user_code import contained, in_copy, in_words

TRIAL_S = 60.0
"""Seconds that the call before a run may take; a slower reward is not judged by it."""

_MISTAKES = (AttributeError, ImportError, InputError, NameError, TypeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedReward:
    """One of several rewards.

    Example: `WeightedReward(name="rewards.py:short", weight=0.2)`
    """

    name: str
    """See `find_reward`."""
    weight: float = 1.0


class TextReward:
    """A weighted sum of rewards on the text of responses.

    A reward that returns None is left out of the sum; if all do, so is the response of its group.

    Example: of `exact_answer` with weight 1 and a reward 0.5 with weight 0.2, a right answer gets 1.1, and the numbers
    "exact_answer" 1.0 and "short" 0.5.
    """

    def __init__(
        self, reward: str | Sequence[WeightedReward], folders: Sequence[Path], judge: Judge | None = None
    ) -> None:
        """Finds the functions.

        Args:
            reward: one by its name, or several.
            folders: where files and modules are looked up, see `find_reward`.
            judge: the reward "judge"; None if there is none.

        Raises:
            ConfigError: no reward, two of one name, or one that is not found.
        """
        parts = [WeightedReward(name=reward)] if isinstance(reward, str) else list(reward)
        self._parts = {part.name.rpartition(":")[2]: part for part in parts}
        if not parts or len(self._parts) < len(parts):
            names = ", ".join(part.name for part in parts) or "none"
            raise ConfigError(f"rewards are one or more functions of different names, got {names}; rename or drop some")
        self.name = " + ".join(part.name for part in parts)
        """For errors: the names of the rewards."""
        self._functions: dict[str, Callable[..., object]] = {
            label: judge if judge is not None and part.name == "judge" else find_reward(part.name, folders)
            for label, part in self._parts.items()
        }
        self._rewards: list[BoundReward] = []
        # One event loop for all calls: clients that a reward keeps belong to the loop in which they were made.
        self._runner = asyncio.Runner()
        weakref.finalize(self, self._runner.close)

    @property
    def is_own(self) -> bool:
        """Whether one of the rewards is no ready one."""
        return any(part.name not in NAMED_REWARDS for part in self._parts.values())

    @property
    def takes_groups(self) -> bool:
        """Whether `scores` gets whole groups: a reward needs one, or is a coroutine, of which many run at a time."""
        return any(reward.takes_group or reward.is_async for reward in self._rewards)

    def check_answer(self, answer: str | None) -> None:
        """Refuses an answer that a ready reward cannot use; see `named.check_answer`."""
        for part in self._parts.values():
            check_answer(part.name, answer)

    def bind(self, columns: Collection[str]) -> None:
        """Checks the signatures of the functions against the columns of the prompts file; see `bound.bind`."""
        self._rewards = [bind(label, function, columns) for label, function in self._functions.items()]

    def scores(self, prompt: Prompt, texts: Sequence[str]) -> list[Score | Exception]:
        """The score of each response, or why it has none."""
        started = [reward.start(prompt, texts) for reward in self._rewards]
        self._await(started)
        parts = [reward.scores(done, len(texts)) for reward, done in zip(self._rewards, started, strict=True)]
        return [self._sum(scores) for scores in zip(*parts, strict=True)]

    def try_on(self, prompt: Prompt) -> None:
        """Calls rewards of your own once, on the prompt's answer or an empty text, in a copy of this process.

        Nothing counts it. What raises for an empty text may mean to, unless it is a mistake in the code.

        Raises:
            InputError: one raises, or returns no reward.
        """
        if not self.is_own:
            return
        error = in_copy(lambda: self._trial_error(prompt), TRIAL_S)
        if error:
            raise InputError(
                f"a reward returns a number for every text, or None to leave it out, and {self.name} on prompt "
                f"{prompt.prompt_id!r} with the text {(prompt.answer or '')!r:.60} raised {error}; correct it"
            )

    def _trial_error(self, prompt: Prompt) -> str:
        text = prompt.answer or ""
        try:
            with contained():
                scores = self.scores(prompt, [text, text] if self.takes_groups else [text])
        except InputError as error:
            return "" if prompt.answer is None else in_words(error)
        for score in scores:
            if isinstance(score, Exception) and (prompt.answer is not None or isinstance(score, _MISTAKES)):
                return in_words(score)
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
        """Replaces awaitables by their results; all run at the same time."""
        places = [
            (results, i) for results in started for i, result in enumerate(results) if inspect.isawaitable(result)
        ]
        if not places:
            return
        done = self._run([results[i] for results, i in places])
        for (results, i), result in zip(places, done, strict=True):
            results[i] = result

    def _run(self, awaitables: Sequence[object]) -> list[object]:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._runner.run(_settled(awaitables))
        # The caller has a loop of its own in this thread, as notebooks do.
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(self._runner.run, _settled(awaitables)).result()


async def _settled(awaitables: Sequence[object]) -> list[object]:
    """The results in order; an exception stands for one that raised."""

    async def settle(awaitable: object) -> object:
        try:
            return await awaitable  # type: ignore[misc]
        except Exception as error:
            return error

    return await asyncio.gather(*map(settle, awaitables))
