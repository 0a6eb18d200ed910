"""Ready rewards, and how a reward is found: by name, or as a function of your own in a file or a module."""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from treering.errors import ConfigError, InputError
from treering.extras import require
from treering.rl.tasks.answers import FINAL_MARK, final_answer, find_number, normalized, single_number
from treering.rl.tasks.task import Prompt
from treering.rl.user_code import load_own

RewardFunction = Callable[[Prompt, str], float]
"""Maps a prompt and the text of a rollout to a finite number."""


def exact_answer(prompt: Prompt, text: str) -> float:
    r"""1.0 if text and answer agree, else 0.0.

    An answer whose final part is one number (`answers.single_number` of `answers.final_answer`) is compared as a
    number: `answers.find_number` of the text has the same value, exactly. Any other answer is compared as text: the
    final answers of both are equal after `answers.normalized`.

    Raises InputError if the prompt has no answer.

    Example: for the answer "9 + 9 = 18\n#### 18", "It is 18.0" gets 1.0 and "It is 18 of 20" gets 0.0. For "3/4",
    "It is 0.75" gets 1.0. For "(1, 2)", `So \boxed{(1,2)}.` gets 1.0 and "It is (1, 2)" gets 0.0.
    """
    wanted = final_answer(_answer(prompt))
    number = single_number(wanted)
    if number is not None:
        return float(find_number(text) == number)
    return float(normalized(final_answer(text)) == normalized(wanted))


def contains_answer(prompt: Prompt, text: str) -> float:
    """1.0 if the text contains the answer as whole words, ignoring case, else 0.0.

    The answer is the part after the last "####", or all of it, without surrounding spaces.

    Example: for the answer "Paris", "It is PARIS." gets 1.0 and "Parisian" gets 0.0.
    """
    wanted = re.escape(_final(_answer(prompt)).casefold())
    return float(re.search(rf"(?<!\w){wanted}(?!\w)", text.casefold()) is not None)


def math_verify(prompt: Prompt, text: str) -> float:
    r"""1.0 if the library math-verify finds the answer's formula in the text, else 0.0; needs `treering[math]`.

    It reads LaTeX and plain numbers, and compares formulas by algebra, and numbers to six decimals: see
    https://github.com/huggingface/Math-Verify. It stops after 5 seconds for each of reading and comparing, by a signal,
    so that it runs in the main thread only. Words are products of letters to it: take exact_answer for them.

    Raises:
        InputError: the prompt has no answer, or one that the library cannot read.
        MissingExtraError: the library is not installed.

    Example: for the answer `\frac{\sqrt{2}}{2}`, "It is $1/\sqrt{2}$" gets 1.0.
    """
    expected = _formula(_answer(prompt))
    from math_verify import parse, verify

    # The library knows boxes and no mark.
    final = f"\\boxed{{{final_answer(text)}}}" if FINAL_MARK in text else text
    return float(verify(expected, parse(final)))


NAMED_REWARDS: Mapping[str, RewardFunction] = MappingProxyType(
    {"exact_answer": exact_answer, "contains_answer": contains_answer, "math_verify": math_verify}
)
"""Built-in rewards, by name."""


def check_answer(name: str, answer: str | None) -> None:
    """Refuses an answer that a built-in reward cannot use, before anything is sampled.

    All of them refuse a missing answer and one without a letter, a digit or a sign in its final part. math_verify also
    refuses what its library cannot read. User functions are not checked.

    Raises:
        InputError: such an answer.
        MissingExtraError: math_verify without its library.

    Example: `check_answer("exact_answer", "#### .")` raises, and `check_answer("exact_answer", "Paris")` does not.
    """
    if name not in NAMED_REWARDS:
        return
    final = _final if name == "contains_answer" else final_answer
    if answer is None or not normalized(final(answer)):
        raise InputError(f"the reward {name} needs an answer, got {answer!r}; add one, or choose another reward")
    if name == "math_verify":
        _formula(answer)


def _answer(prompt: Prompt) -> str:
    if prompt.answer is None:
        raise InputError(f"this reward compares with an answer, and prompt {prompt.prompt_id!r} has none; add one")
    return prompt.answer


def _final(answer: str) -> str:
    return answer.rpartition(FINAL_MARK)[2].strip()


def _formula(answer: str) -> list[Any]:
    """The answer as math-verify reads it."""
    require("the reward math_verify", "math_verify")
    from math_verify import parse

    final = final_answer(answer)
    number = single_number(final)
    # JSON's exponents are no LaTeX: 1e-07 would be -7 + e.
    final = str(number) if number is not None and re.search("[0-9]e", final, re.IGNORECASE) else final
    formula: list[Any] = parse(f"\\boxed{{{final}}}", fallback_mode="no_fallback")
    if not formula:
        raise InputError(f"the reward math_verify needs a number or LaTeX as answer, got {answer!r}; correct it")
    return formula


def find_reward(name: str, folders: Sequence[Path] = (Path(),)) -> Callable[..., object]:
    """The ready reward of that name, or the function of "file.py:function" or "package.module:function".

    Files are looked up in the folders in order. Modules are too, before the rest of Python's import path; the folders
    stay on the path of this process, because the code may import more when it is called.

    Raises:
        ConfigError: an unknown name (with the nearest ones), file, module or function, or code that cannot be imported
            (with its file and line).

    Example: `find_reward("exact_answer")` is `named.exact_answer`; `find_reward("rewards.py:short", [Path("conf")])` is
    `short` of `conf/rewards.py`.
    """
    if name in NAMED_REWARDS:
        return NAMED_REWARDS[name]
    module, _, function = name.rpartition(":")
    if not (module and function):
        near = difflib.get_close_matches(name, NAMED_REWARDS, n=3, cutoff=0.4) or list(NAMED_REWARDS)
        raise ConfigError(
            f"a reward is a known name, file.py:function or package.module:function, got {name!r}; nearest names: "
            f"{', '.join(near)}"
        )
    found = getattr(load_own("reward", name, folders), function, None)
    if not callable(found):
        what = "has no such name" if found is None else f"has a {type(found).__name__} of that name"
        raise ConfigError(f"a reward is a function, and {module} of {name!r} {what}; check the spelling")
    return found  # type: ignore[no-any-return]
