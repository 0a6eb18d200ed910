r"""The final answer of a text, as a number or as normalised text."""

import re
from fractions import Fraction

from treering.rl.tasks.number_text import NUMBER, numbers_in, value_of, without_latex

FINAL_MARK = "####"
"""The marker before the final answer, as in GSM8K."""

# A name or a sum before the number, and words of a unit after it. Short words are more often variables (2 pi, 5 x).
_NAMED = r"(?:(?:[^\W\d_]|[\s'])*(?:=|:|\b(?:is|are)\b)|[0-9\s.,+*/×÷()-]+=)"
_UNIT = r"(?:\s*[%°]|\s+(?:[^\W\d_]{3,}|[kcm]m|[km]g|ml|ft|lb|oz)(?:,?\s+[^\W\d_]{2,})*)"
_ONE_NUMBER = re.compile(rf"{_NAMED}?\s*\+?((?>{NUMBER}))(?!(?s:.*)\b(?:or|and)\b){_UNIT}?")
_WRAPPED = re.compile(
    r"\$\$(.*)\$\$|\$([^$]*)\$|\\\((.*)\\\)|\\\[(.*)\\\]|\\(?:text|mathrm|mbox)\{([^{}]*)\}|\*\*(.*)\*\*", re.DOTALL
)
_MAX_WRAPPERS = 8
_BRACES = re.compile(r"(?<!\\)(?:\\boxed\s*\{|[{}])")


def final_answer(text: str) -> str:
    r"""What stands in the last closed `\boxed{}` after the last "####", or after that mark, or in the last line.

    Without the mark the whole text is searched for the box. The result has no surrounding spaces and may be empty.

    Example: both "x = 3\n#### Paris" and `so \boxed{Paris}, I think` give "Paris", and "Well.\nParis!" gives "Paris!".
    """
    _, mark, final = text.rpartition(FINAL_MARK)
    boxed = _boxed(final)
    if boxed is not None:
        return boxed
    return final.strip() if mark else final.strip().rpartition("\n")[2].strip()


def find_number(text: str) -> Fraction | None:
    r"""The number that a response gives as its answer; None if there is none, or it has no value.

    It is the number in the last `\boxed{}` (see `single_number`), else the first one after the last "####", else the
    last one of the text. See `number_text` for what is a number.

    Example: "so 5 * 2 = $1,010.50." gives 2021/2, "#### -7 apples, 2 left" gives -7, and "9-4" gives 4.
    """
    _, mark, final = text.rpartition(FINAL_MARK)
    boxed = _boxed(final)
    if boxed is not None:
        return single_number(boxed)
    found = numbers_in(final)
    return value_of(found[0 if mark else -1]) if found else None


def single_number(answer: str) -> Fraction | None:
    """The number that an answer is; None if it is anything else, such as two numbers or a term with variables.

    Before it may stand a currency, a name with "=", ":" or "is", or a sum with "="; after it words of a unit.

    Example: "x = 5", "2 + 3 = 5", "$5.00." and "5 apples" are 5; "3 or 4", "(1, 2)", "5x", "3:4" and "H2O" are none.
    """
    text = re.sub("[$€£¥]", "", without_latex(_unwrapped(answer)))
    found = _ONE_NUMBER.fullmatch(text.strip())
    # The pattern takes a whole number before an improper fraction for one number.
    return value_of(found[1]) if found is not None and numbers_in(found[1]) == [found[1]] else None


def normalized(answer: str) -> str:
    r"""The answer as it is compared with others, if it is no number.

    Letters are case-folded, runs of spaces become one, spaces beside a sign are dropped, and so are a final full stop,
    comma, semicolon or colon, an exclamation mark after a word, and `$`, `$$`, `\(`, `\[`, `**` or `\text{}` around
    the whole.

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
    # The factorials 5! and n! keep their sign.
    return word if len(word) > 1 and word[-2:].isalpha() else text


def _boxed(text: str) -> str | None:
    r"""The contents of the last `\boxed{}` that is closed."""
    last, opened = None, []
    for found in _BRACES.finditer(text):
        if found[0].endswith("{"):
            opened.append((found.end(), found[0] != "{"))
        elif opened:
            start, is_box = opened.pop()
            last = text[start : found.start()].strip() if is_box else last
    return last
