"""Reward functions on text: named ones, and user functions by import path."""

import difflib
import importlib
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from types import MappingProxyType

from treering.errors import ConfigError, InputError
from treering.rl.tasks.task import Prompt

RewardFunction = Callable[[Prompt, str], float]
"""Maps a prompt and the text of a rollout to a finite number."""

FINAL_MARK = "####"
"""The marker before the final answer, as in GSM8K."""

_NUMBER = re.compile(
    r"(?:(?<![\w)])-\$?)?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<!\w)\.[0-9]+)"
)


def find_number(text: str) -> Decimal | None:
    """The first number after the last "####", or the last number of a text without that mark; None if there is none.

    Ignores dollar signs and commas between groups of three digits. A minus after a letter, a digit or a bracket is a
    subtraction, not a sign.

    Example: "so 5 * 2 = $1,010.50." gives 1010.50, "#### -7 apples, 2 left" gives -7, and "9-4" gives 4.
    """
    _, mark, final = text.rpartition(FINAL_MARK)
    found = _NUMBER.findall(final if mark else text)
    if not found:
        return None
    return Decimal(re.sub(r"[$,]", "", found[0] if mark else found[-1]))


def exact_answer(prompt: Prompt, text: str) -> float:
    r"""1.0 if the numbers of text and answer are equal as decimals, else 0.0; see `find_number`.

    Raises InputError if the answer has no number.

    Example: for the answer "9 + 9 = 18\n#### 18", "It is 18.0" gets 1.0 and "It is 18 of 20" gets 0.0.
    """
    expected = find_number(_answer(prompt))
    if expected is None:
        raise InputError(f"exact_answer compares numbers, and the answer has none, got {prompt.answer!r}; correct it")
    return float(find_number(text) == expected)


def contains_answer(prompt: Prompt, text: str) -> float:
    """1.0 if the text contains the answer as whole words, ignoring case, else 0.0.

    The answer is the part after the last "####", or all of it, without surrounding spaces.

    Example: for the answer "Paris", "It is PARIS." gets 1.0 and "Parisian" gets 0.0.
    """
    wanted = re.escape(_final(_answer(prompt)).casefold())
    return float(re.search(rf"(?<!\w){wanted}(?!\w)", text.casefold()) is not None)


NAMED_REWARDS: Mapping[str, RewardFunction] = MappingProxyType(
    {"exact_answer": exact_answer, "contains_answer": contains_answer}
)
"""Built-in rewards, by name."""


def find_reward(name: str) -> RewardFunction:
    """The built-in reward of that name, or the imported "package.module:function".

    Raises ConfigError for an unknown name (with the nearest ones), module or function.

    Example: `find_reward("exact_answer")` is `exact_answer`.
    """
    if name in NAMED_REWARDS:
        return NAMED_REWARDS[name]
    module, colon, function = name.partition(":")
    if not (colon and module and function):
        near = difflib.get_close_matches(name, NAMED_REWARDS, n=3, cutoff=0.4) or list(NAMED_REWARDS)
        raise ConfigError(
            f"a reward is a known name or package.module:function, got {name!r}; nearest names: {', '.join(near)}"
        )
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"a reward package.module:function can be imported, and {name!r} cannot ({error}); check the spelling and "
            "PYTHONPATH"
        ) from error
    if not callable(found):
        raise ConfigError(f"a reward is a function of (prompt, text), and {name!r} is a {type(found).__name__}; fix it")
    return found  # type: ignore[no-any-return]


def check_answer(name: str, answer: str | None) -> None:
    """Refuses an answer that a built-in reward cannot use, before anything is sampled.

    Raises InputError. User functions are not checked.

    Example: `check_answer("exact_answer", "no idea")` raises, `check_answer("contains_answer", "no idea")` does not.
    """
    if name not in NAMED_REWARDS:
        return
    if answer is None or not _final(answer):
        raise InputError(f"the reward {name} needs an answer, got {answer!r}; add one, or choose another reward")
    if name == "exact_answer" and find_number(answer) is None:
        raise InputError(f"the reward exact_answer needs a number in the answer, got {answer!r}; correct it")


def _answer(prompt: Prompt) -> str:
    if prompt.answer is None:
        raise InputError(f"this reward compares with an answer, and prompt {prompt.prompt_id!r} has none; add one")
    return prompt.answer


def _final(answer: str) -> str:
    return answer.rpartition(FINAL_MARK)[2].strip()
