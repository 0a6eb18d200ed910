r"""Numbers as people and models write them, read exactly, as fractions.

A number has digits and perhaps a decimal point. Its digits may be grouped by threes with commas, underscores, or thin,
narrow or non-breaking spaces, and LaTeX's `\,` is a thin one. An exponent follows as in 3.2e-5, 1E5, 5×10^3, 5*10**3,
5×10⁻³ or `5 \times 10^{3}`. Two numbers with a slash between them, or in `\frac`, are a fraction, and a whole number
before a proper fraction is a part of it. A minus is "-" or U+2212; after a letter, a digit or a closing bracket it is a
subtraction. A percent sign does not change a number: 50% is 50, not 0.5.
"""

import re
from collections.abc import Iterator
from fractions import Fraction

MAX_DIGITS = 1000
"""Digits of a number, and the largest size of an exponent; beyond them a number has no value here."""

_SPACE = "\N{THIN SPACE}\N{NARROW NO-BREAK SPACE}\N{NO-BREAK SPACE}"
# One kind of mark per number; a fourth digit after a mark means that it groups nothing.
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
"""The pattern of a number, without groups."""

_NUMBER = re.compile(NUMBER)
_MIXED = re.compile(r"(.*[0-9]) ([0-9]+)/([0-9]+)")
# v1e5 and H2O; but Rs500 may be a currency and its amount.
_NAME = re.compile(r"(?<!\\)\b[^\W\d_][^\W\d]*[0-9]+[^\W\d]\w*")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}\s*\{([^{}]*)\}|([0-9])\s*([0-9]))")
_LATEX_UNIT = re.compile(r"\\(?:text|mathrm|mbox)\{[^{}0-9]*\}(?:\^\{?[0-9]\}?)?|\^\{?\\circ\}?")
_LATEX_MARKS = {r"\,": "\N{THIN SPACE}", "{,}": ",", r"\$": "$", r"\%": "%"}
_ASCII = str.maketrans({"\N{MINUS SIGN}": "-", **dict(zip(_RAISED, "0123456789+-", strict=True))})


def numbers_in(text: str) -> list[str]:
    """The numbers of a text as they are written, in their order; `value_of` reads them.

    Digits inside a name, such as v1e5 or H2O, are none.

    Example: "5 * 2 = $1,010.50, or 3/4" has "5", "2", "1,010.50" and "3/4".
    """
    found = _NUMBER.findall(_NAME.sub(" ", without_latex(text)))
    return [part for number in found for part in _split(number)]


def value_of(number: str) -> Fraction | None:
    """The value of a text that matches `NUMBER`; None if it divides by zero or is beyond `MAX_DIGITS`.

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
    r"""The text with a/b for `\frac{a}{b}` of two numbers, and without LaTeX's units and escapes.

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
    """A whole number and a fraction are one number only if the fraction is proper."""
    mixed = _MIXED.fullmatch(number)
    if mixed is None or int(mixed[2][:MAX_DIGITS]) < int(mixed[3][:MAX_DIGITS]):
        yield number
    else:
        yield from (mixed[1], f"{mixed[2]}/{mixed[3]}")


def _decimal(text: str) -> Fraction | None:
    """The value of digits, a point and an exponent."""
    mantissa, _, exponent = text.lower().partition("e")
    size = exponent.lstrip("+-").lstrip("0") or "0"
    # Digits are counted first: Python refuses to read thousands of them as an integer.
    if len(mantissa) > MAX_DIGITS or len(size) > len(str(MAX_DIGITS)) or int(size) > MAX_DIGITS:
        return None
    return Fraction(mantissa) * Fraction(10) ** (-int(size) if exponent.startswith("-") else int(size))
