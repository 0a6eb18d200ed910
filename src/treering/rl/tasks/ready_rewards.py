"""Built-in rewards by name, and the final answers that they compare.

They read the text after a response's thought; a response whose thought does not end gets 0.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

from treering.data.rendering.thoughts import answer_part
from treering.errors import ConfigError, InputError
from treering.extras import require
from treering.rl.tasks.task import Prompt
from treering.rl.user_code import load_own

MAX_DIGITS = 1000
"""Most digits of a number, and the largest exponent; a number beyond them has no value here."""

_SPACE = "\N{THIN SPACE}\N{NARROW NO-BREAK SPACE}\N{NO-BREAK SPACE}"
# A number uses one kind of mark; a fourth digit after a mark means that the mark does not group digits.
_GROUPED = "|".join(rf"[0-9]{{1,3}}(?:{mark}[0-9]{{3}})+(?!_?[0-9])" for mark in (",", "_", f"[{_SPACE}]"))
_WHOLE = f"(?:{_GROUPED}|[0-9]+)"
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻"
_POWER = rf"[ {_SPACE}]?(?:[×x*·]|\\times|\\cdot)[ {_SPACE}]?10"
_SIGNED = "[+\N{MINUS SIGN}-]?[0-9]+"
_EXPONENT = rf"(?:[eE]{_SIGNED}|{_POWER}(?:(?:\^|\*\*)(?:{_SIGNED}|\{{{_SIGNED}\}})|[{_RAISED}]+))"
_UNSIGNED = rf"(?:{_WHOLE}(?:\.[0-9]+)?|(?<!\w)\.[0-9]+){_EXPONENT}?"
# Three numbers with slashes are a date.
_RATIO = rf"(?<![0-9]/){_UNSIGNED} ?/ ?{_UNSIGNED}(?!\.?[0-9]| ?/ ?[0-9])"

NUMBER = rf"(?:(?<![\w)\]}}])[-\N{{MINUS SIGN}}]\$?)?(?:[0-9]+ {_RATIO}|{_RATIO}|{_UNSIGNED})"
"""Pattern of a number, without groups."""

_NUMBER = re.compile(NUMBER)
_MIXED = re.compile(r"(.*[0-9]) ([0-9]+)/([0-9]+)")
# Names such as v1e5 and H2O; but Rs500 may be a currency and its amount.
_NAME = re.compile(r"(?<!\\)\b[^\W\d_][^\W\d]*[0-9]+[^\W\d]\w*")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}\s*\{([^{}]*)\}|([0-9])\s*([0-9]))")
_LATEX_UNIT = re.compile(r"\\(?:text|mathrm|mbox)\{[^{}0-9]*\}(?:\^\{?[0-9]\}?)?|\^\{?\\circ\}?")
_LATEX_MARKS = {r"\,": "\N{THIN SPACE}", "{,}": ",", r"\$": "$", r"\%": "%"}
_ASCII = str.maketrans({"\N{MINUS SIGN}": "-", **dict(zip(_RAISED, "0123456789+-", strict=True))})


def numbers_in(text: str) -> list[str]:
    """Return the numbers of a text as written, in order; `value_of` reads them.

    Digits inside a name, such as v1e5 or H2O, do not count.

    Example: "5 * 2 = $1,010.50, or 3/4" has "5", "2", "1,010.50" and "3/4".
    """
    found = _NUMBER.findall(_NAME.sub(" ", without_latex(text)))
    return [part for number in found for part in _split(number)]


def value_of(number: str) -> Fraction | None:
    """Return the value of a text that matches `NUMBER`; None if it divides by zero or is beyond `MAX_DIGITS`.

    Example: "1,010.50" is 2021/2, "-1 1/2" is -3/2, "5×10^3" is 5000, and "1e999999999" and "1/0" are None.
    """
    text = re.sub(rf"[$,_{_SPACE}]", "", re.sub(_POWER, "×10", number)).translate(_ASCII)
    text = re.sub(r"×10(?:\^|\*\*)?\{?([+-]?[0-9]+)\}?", r"e\1", text)
    sign = -1 if text.startswith("-") else 1
    whole, _, ratio = re.sub(r" ?/ ?", "/", text.removeprefix("-")).rpartition(" ")
    parts = [_decimal(part) for part in ((whole or "0"), *ratio.split("/"))]
    if any(part is None for part in parts) or parts[2:] == [0]:
        return None
    first, above, below = [*(part for part in parts if part is not None), Fraction(1)][:3]
    return sign * (first + above / below)


def without_latex(text: str) -> str:
    r"""Return the text with a/b for `\frac{a}{b}` of two numbers, and without LaTeX's units and escapes.

    Example: `1\frac{1}{2}\text{ cm}` becomes "1 1/2 ".
    """
    for latex, plain in _LATEX_MARKS.items():
        text = text.replace(latex, plain)
    return _LATEX_FRACTION.sub(_plain_fraction, _LATEX_UNIT.sub(" ", text))


def _plain_fraction(found: re.Match[str]) -> str:
    above, below = (part.strip() for part in (found.groups()[:2] if found[3] is None else found.groups()[2:]))
    if not all(_NUMBER.fullmatch(part) for part in (above, below)):
        return found[0]
    return f"{' ' if found.string[: found.start()][-1:].isalnum() else ''}{above}/{below}"


def _split(number: str) -> Iterator[str]:
    """Split a whole number from a fraction that is not proper; with a proper fraction they are one number."""
    mixed = _MIXED.fullmatch(number)
    if mixed is None or int(mixed[2][:MAX_DIGITS]) < int(mixed[3][:MAX_DIGITS]):
        yield number
    else:
        yield from (mixed[1], f"{mixed[2]}/{mixed[3]}")


def _decimal(text: str) -> Fraction | None:
    """Return the value of digits with a point and an exponent."""
    mantissa, _, exponent = text.lower().partition("e")
    size = exponent.lstrip("+-").lstrip("0") or "0"
    # Count the digits first: Python refuses to read thousands of them as an integer.
    if len(mantissa) > MAX_DIGITS or len(size) > len(str(MAX_DIGITS)) or int(size) > MAX_DIGITS:
        return None
    return Fraction(mantissa) * Fraction(10) ** (-int(size) if exponent.startswith("-") else int(size))


FINAL_MARK = "####"
"""Marker before the final answer, as in GSM8K."""

# A name or a sum before the number, and words of a unit after it. Short words are mostly variables (2 pi, 5 x).
_NAMED = r"(?:(?:[^\W\d_]|[\s'])*(?:=|:|\b(?:is|are)\b)|[0-9\s.,+*/×÷()-]+=)"
_UNIT = r"(?:\s*[%°]|\s+(?:[^\W\d_]{3,}|[kcm]m|[km]g|ml|ft|lb|oz)(?:,?\s+[^\W\d_]{2,})*)"
_ONE_NUMBER = re.compile(rf"{_NAMED}?\s*\+?((?>{NUMBER}))(?!(?s:.*)\b(?:or|and)\b){_UNIT}?")
_WRAPPED = re.compile(
    r"\$\$(.*)\$\$|\$([^$]*)\$|\\\((.*)\\\)|\\\[(.*)\\\]|\\(?:text|mathrm|mbox)\{([^{}]*)\}|\*\*(.*)\*\*", re.DOTALL
)
_MAX_WRAPPERS = 8
_BRACES = re.compile(r"(?<!\\)(?:\\boxed\s*\{|[{}])")


def final_answer(text: str) -> str:
    r"""Return the contents of the last closed `\boxed{}`, else the text after the last "####", else the last line.

    With the mark "####" only the text after the last one is searched for a box. The result has no surrounding spaces
    and may be empty.

    Example: both "x = 3\n#### Paris" and `so \boxed{Paris}, I think` give "Paris", and "Well.\nParis!" gives "Paris!".
    """
    _, mark, final = text.rpartition(FINAL_MARK)
    boxed = _boxed(final)
    if boxed is not None:
        return boxed
    return final.strip() if mark else final.strip().rpartition("\n")[2].strip()


def find_number(text: str) -> Fraction | None:
    r"""Return the number that a response gives as its answer; None if there is none, or it has no value.

    It is the number in the last `\boxed{}` (see `single_number`), else the first one after the last "####", else the
    last one of the text. `numbers_in` defines what counts as a number.

    Example: "so 5 * 2 = $1,010.50." gives 2021/2, "#### -7 apples, 2 left" gives -7, and "9-4" gives 4.
    """
    _, mark, final = text.rpartition(FINAL_MARK)
    boxed = _boxed(final)
    if boxed is not None:
        return single_number(boxed)
    found = numbers_in(final)
    return value_of(found[0 if mark else -1]) if found else None


def single_number(answer: str) -> Fraction | None:
    """Return the number that an answer is; None for anything else, such as two numbers or a term with variables.

    A currency, a name with "=", ":" or "is", or a sum with "=" may precede it, and words of a unit may follow.

    Example: "x = 5", "2 + 3 = 5", "$5.00." and "5 apples" are 5; "3 or 4", "(1, 2)", "5x", "3:4" and "H2O" give None.
    """
    text = re.sub("[$€£¥]", "", without_latex(_unwrapped(answer)))
    found = _ONE_NUMBER.fullmatch(text.strip())
    # The pattern reads a whole number before an improper fraction as one number.
    return value_of(found[1]) if found is not None and numbers_in(found[1]) == [found[1]] else None


def normalized(answer: str) -> str:
    r"""Return an answer that is not a number as it is compared.

    Letters are case-folded, runs of spaces become one, and spaces next to a sign are dropped. A final full stop, comma,
    semicolon or colon, an exclamation mark after a word, and `$`, `$$`, `\(`, `\[`, `**` or `\text{}` around the whole
    are dropped too.

    Example: "**New  York**." becomes "new york", and "( 1, 2 )" becomes "(1,2)".
    """
    text = " ".join(_unwrapped(answer).casefold().split())
    return re.sub(r" ?([^\w\s]) ?", r"\1", text)


def _unwrapped(answer: str) -> str:
    for _ in range(_MAX_WRAPPERS):
        shorter = _without_final_punctuation(answer.strip())
        wrapped = _WRAPPED.fullmatch(shorter)
        shorter = shorter if wrapped is None else next(group for group in wrapped.groups() if group is not None)
        if shorter == answer:
            break
        answer = shorter
    return answer


def _without_final_punctuation(text: str) -> str:
    text = text.rstrip(".,;:")
    word = text.rstrip("!")
    # Keep the sign of the factorials 5! and n!.
    return word if len(word) > 1 and word[-2:].isalpha() else text


def _boxed(text: str) -> str | None:
    r"""Return the contents of the last `\boxed{}` that is closed."""
    last, opened = None, []
    for found in _BRACES.finditer(text):
        if found[0].endswith("{"):
            opened.append((found.end(), found[0] != "{"))
        elif opened:
            start, is_box = opened.pop()
            last = text[start : found.start()].strip() if is_box else last
    return last


RewardFunction = Callable[[Prompt, str], float]
"""Maps a prompt and the text of a rollout to a finite number."""


def exact_answer(prompt: Prompt, text: str) -> float:
    r"""Return 1.0 if text and answer agree, else 0.0.

    An answer whose final part is one number (`single_number` of `final_answer`) is compared as a number: `find_number`
    of the text must have exactly its value. Any other answer is compared as text: the final answers of both must be
    equal after `normalized`.

    Raises InputError if the prompt has no answer.

    Example: for the answer "9 + 9 = 18\n#### 18", "It is 18.0" gets 1.0 and "It is 18 of 20" gets 0.0. For "3/4",
    "It is 0.75" gets 1.0. For "(1, 2)", `So \boxed{(1,2)}.` gets 1.0 and "It is (1, 2)" gets 0.0.
    """
    wanted, text = final_answer(_answer(prompt)), answer_part(text)
    number = single_number(wanted)
    if number is not None:
        return float(find_number(text) == number)
    return float(normalized(final_answer(text)) == normalized(wanted))


def contains_answer(prompt: Prompt, text: str) -> float:
    """Return 1.0 if the text contains the answer as whole words, ignoring case, else 0.0.

    The answer is the part after the last "####", or the whole text, without surrounding spaces.

    Example: for the answer "Paris", "It is PARIS." gets 1.0 and "Parisian" gets 0.0.
    """
    wanted = re.escape(_final(_answer(prompt)).casefold())
    return float(re.search(rf"(?<!\w){wanted}(?!\w)", answer_part(text).casefold()) is not None)


def math_verify(prompt: Prompt, text: str) -> float:
    r"""Return 1.0 if the library math-verify finds the answer's formula in the text, else 0.0; needs `treering[math]`.

    It reads LaTeX and plain numbers, and compares formulas by algebra and numbers to six decimals; see
    https://github.com/huggingface/Math-Verify. A signal ends reading and comparing after 5 seconds each, so it runs in
    the main thread only. It reads words as products of letters: use exact_answer for them.

    Raises:
        InputError: the prompt has no answer, or the library cannot read it.
        MissingExtraError: the library is not installed.

    Example: for the answer `\frac{\sqrt{2}}{2}`, "It is $1/\sqrt{2}$" gets 1.0.
    """
    expected = _formula(_answer(prompt))
    from math_verify import parse, verify

    text = answer_part(text)
    # The library knows boxes but not the mark.
    final = f"\\boxed{{{final_answer(text)}}}" if FINAL_MARK in text else text
    return float(verify(expected, parse(final)))


NAMED_REWARDS: Mapping[str, RewardFunction] = MappingProxyType(
    {"exact_answer": exact_answer, "contains_answer": contains_answer, "math_verify": math_verify}
)
"""Built-in rewards by name."""


def check_answer(name: str, answer: str | None) -> None:
    """Refuse an answer that a built-in reward cannot use, before anything is sampled.

    All of them refuse a missing answer and one without a letter, a digit or a sign in its final part. math_verify also
    refuses an answer that its library cannot read. User functions are not checked.

    Raises:
        InputError: the reward cannot use the answer.
        MissingExtraError: the reward is math_verify and its library is not installed.

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
        raise InputError(f"this reward compares with an answer, and prompt {prompt.name} has none; add one")
    return prompt.answer


def _final(answer: str) -> str:
    return answer.rpartition(FINAL_MARK)[2].strip()


def _formula(answer: str) -> list[Any]:
    """Parse the answer with math-verify."""
    require("the reward math_verify", "math_verify")
    from math_verify import parse

    final = final_answer(answer)
    number = single_number(final)
    # JSON's exponents are not LaTeX: 1e-07 would be -7 + e.
    final = str(number) if number is not None and re.search("[0-9]e", final, re.IGNORECASE) else final
    formula: list[Any] = parse(f"\\boxed{{{final}}}", fallback_mode="no_fallback")
    if not formula:
        raise InputError(f"the reward math_verify needs a number or LaTeX as answer, got {answer!r}; correct it")
    return formula


def find_reward(name: str, folders: Sequence[Path] = (Path(),)) -> Callable[..., object]:
    """Return the built-in reward of that name, or the function of "file.py:function" or "package.module:function".

    Files and modules are looked up in the folders as `load_own` says.

    Raises:
        ConfigError: the name (the nearest ones are listed), file, module or function does not exist, or importing it
            raises (with its file and line).

    Example: `find_reward("exact_answer")` is `exact_answer`; `find_reward("rewards.py:short", [Path("conf")])` is
    `short` of `conf/rewards.py`.
    """
    if name in NAMED_REWARDS:
        return NAMED_REWARDS[name]
    module, _, function = name.rpartition(":")
    if not (module and function):
        near = difflib.get_close_matches(name, NAMED_REWARDS, n=3, cutoff=0.4) or list(NAMED_REWARDS)
        raise ConfigError(
            f"a reward must be a known name, file.py:function or package.module:function, got {name!r}; nearest names: "
            f"{', '.join(near)}"
        )
    found = getattr(load_own("reward", name, folders), function, None)
    if not callable(found):
        what = "has no such name" if found is None else f"has a {type(found).__name__} of that name"
        raise ConfigError(f"a reward must be a function, and {module} of {name!r} {what}; check the spelling")
    return found  # type: ignore[no-any-return]
