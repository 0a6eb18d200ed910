"""Final answers and their numbers: where they stand, what counts as a number, and which texts are equal."""

from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from treering.rl.tasks.ready_rewards import (
    MAX_DIGITS,
    final_answer,
    find_number,
    normalized,
    numbers_in,
    single_number,
    value_of,
)

WHOLE = st.integers(0, 10**12)
SIGNS = st.sampled_from(["", "-", "−"])


def sole_value(text: str) -> Fraction | None:
    (number,) = numbers_in(text)
    return value_of(number)


def signed(sign: str, value: Fraction | int) -> Fraction:
    return Fraction(-value if sign else value)


@given(st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers(-(10**30), 10**30)))
@example(1e16)
@example(1e-07)
def test_a_number_of_json_has_the_value_of_its_text(value: float) -> None:
    assert sole_value(repr(value)) == Fraction(repr(value))


@given(SIGNS, WHOLE, st.from_regex(r"[0-9]{0,12}", fullmatch=True), st.integers(-99, 99), st.sampled_from("eE"))
def test_decimals_and_exponents_are_exact(sign: str, whole: int, decimals: str, power: int, mark: str) -> None:
    mantissa = f"{whole}.{decimals}" if decimals else str(whole)
    value = signed(sign, Fraction(mantissa))
    assert sole_value(f"{sign}{mantissa}") == value
    assert sole_value(f"{sign}{mantissa}{mark}{power:+d}") == value * Fraction(10) ** power
    times = [f"×10^{power}", f" × 10^{power}", f"*10**{power}", f" x 10^{{{power}}}", rf" \times 10^{{{power}}}"]
    raised = str(power).translate(str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"))
    for exponent in (*times, f"·10{raised}", f"×10^{power}".replace("-", "−")):
        assert sole_value(f"{sign}{mantissa}{exponent}") == value * Fraction(10) ** power


@given(SIGNS, WHOLE, st.sampled_from([",", "_", "\N{THIN SPACE}", "\N{NO-BREAK SPACE}", "\N{NARROW NO-BREAK SPACE}"]))
def test_groups_of_three_digits_are_one_number(sign: str, whole: int, mark: str) -> None:
    grouped = f"{whole:,}".replace(",", mark)
    assert sole_value(f"It is {sign}{grouped}.") == signed(sign, whole)
    assert sole_value(rf"$ {sign}{f'{whole:,}'.replace(',', chr(92) + ',')}$") == signed(sign, whole)


@given(SIGNS, WHOLE, st.integers(1, 10**6), st.integers(0, 1000))
def test_fractions_and_mixed_numbers_are_those_of_python(sign: str, above: int, below: int, whole: int) -> None:
    value = Fraction(above, below)
    for text in (
        f"{above}/{below}",
        f"{above} / {below}",
        rf"\frac{{{above}}}{{{below}}}",
        rf"\dfrac{{{above}}} {{{below}}}",
    ):
        assert sole_value(f"{sign}{text}") == signed(sign, value)
    mixed = numbers_in(f"{sign}{whole} {above}/{below}"), numbers_in(rf"{sign}{whole}\frac{{{above}}}{{{below}}}")
    for found in mixed:
        values = [value_of(number) for number in found]
        assert values == ([signed(sign, whole + value)] if value < 1 else [signed(sign, whole), value])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9-4 (2+3)-4 x-4", ["9", "4", "2", "3", "4", "4"]),
        ("1,2 and 1,2345", ["1", "2", "1", "2345"]),
        ("1,000_000 _1,000_", ["1", "000_000", "1,000"]),
        ("1/2/2024", ["1", "2", "2024"]),
        ("v1e5 H2O x1y", []),
        ("Rs500 2e 5km 3:30", ["500", "2", "5", "3", "30"]),
        ("half.5", ["5"]),
        ("about .5 and -.5", [".5", "-.5"]),
        ("٣ ⅓", []),
        (r"18\text{ cm}^2 and 90^\circ", ["18", "90"]),
        (r"\frac12 \frac{x}{3}", ["1/2", "3"]),
        (r"1{,}000", ["1,000"]),
        ("5 10^3", ["5", "10", "3"]),
    ],
)
def test_what_is_a_number(text: str, expected: list[str]) -> None:
    assert numbers_in(text) == expected


@pytest.mark.parametrize("text", ["1e999999999", "1e-999999999", "1/0", "0 / 0.0", "1" * 5000, "1e" + "9" * 5000])
def test_a_number_out_of_bounds_has_no_value(text: str) -> None:
    assert sole_value(text) is None


def test_the_bounds_themselves_have_values() -> None:
    assert sole_value("9" * MAX_DIGITS) == 10**MAX_DIGITS - 1
    assert sole_value(f"1e+000{MAX_DIGITS}") == 10**MAX_DIGITS
    assert sole_value(f"1e-{MAX_DIGITS}") == Fraction(1, 10**MAX_DIGITS)
    assert sole_value(f"1e{MAX_DIGITS + 1}") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is\nParis.\n", "Paris."),
        ("a\n#### Paris\n", "Paris"),
        ("#### 1 no\n#### 2", "2"),
        ("5 ####", ""),
        ("", ""),
        (r"so \boxed{Paris} I think", "Paris"),
        (r"\boxed{1} or \boxed{ \frac{1}{2} }.", r"\frac{1}{2}"),
        (r"\boxed {\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"} \boxed{1}}", "1"),
        (r"\boxed{1} #### 2", "2"),
        (r"1 #### \boxed{2} apples", "2"),
        ("\\boxed{" * 20_000, "\\boxed{" * 20_000),
    ],
)
def test_the_final_answer_of_a_text(text: str, expected: str) -> None:
    assert final_answer(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is 18.", "18"),
        ("first 3, then 4", "4"),
        ("#### 18", "18"),
        ("x = 3\n#### $1,234.50 in all, 7 left", "1234.50"),
        ("#### 1 no, #### 2", "2"),
        ("so $5", "5"),
        ("it fell to -5", "-5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("9-4", "4"),
        ("12,345,678", "12345678"),
        ("007", "7"),
        ("50%", "50"),
        ("3/4", "0.75"),
        ("−2.5", "-2.5"),
        (r"So \boxed{4}, and not 5.", "4"),
        (r"So \boxed{x = 4}.", "4"),
        (r"So \boxed{3 or 4}.", None),
        (r"So \boxed{\sqrt{2}}.", None),
        ("1e999999999", None),
        ("5 ####", None),
        ("none", None),
        ("", None),
    ],
)
def test_the_number_of_a_response(text: str, expected: str | None) -> None:
    assert find_number(text) == (None if expected is None else Fraction(expected))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        *[(text, "5") for text in ("5", " 5. ", "$5", "+5", "€5", r"\$5", "$5$", r"\(5\)", "**5**", "5.00", "10/2")],
        *[(text, "5") for text in ("5%", r"5\%", "5°", r"5^\circ", r"5\text{ cm}^2", "5 km", "5 apples, of two kinds")],
        *[(text, "5") for text in ("x = 5", "$x = 5$", "Answer: 5", "The answer is 5.", "2 + 3 = 5", "(2+3)*1 = 5")],
        *[(text, "-1.5") for text in ("-1.5", "−3/2", "-1 1/2", r"-\frac{3}{2}", r"-1\frac12")],
        *[
            (text, None)
            for text in ("x = 3 or 4", "(1, 2)", "Paris", "", "3:4", "3:30", "1/2/2024", "5 3/2", "3 apples or 4")
        ],
        *[(text, None) for text in ("5x", "5 x", "2 pi", "3 i", "x+5", "x - 5", "5!", r"\sqrt{5}", "x^2", "7 am")],
        *[
            (text, None)
            for text in ("x^2+y^2 = 5", "2x = 5", "H2O", "v1e5", "Apollo 11", "1e999999999", "1/0", "5 and x")
        ],
    ],
)
def test_an_answer_is_a_number_if_it_is_nothing_else(answer: str, expected: str | None) -> None:
    assert single_number(answer) == (None if expected is None else Fraction(expected))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("**New \n York**.", "new york"),
        ("$x = 3$ or $4$", "$x=3$or$4$"),
        ("( 1, 2 )", "(1,2)"),
        (r"$$\text{Paris}$$", "paris"),
        (r"\[ x \]", "x"),
        ("STRASSE, Straße;", "strasse,strasse"),
        ("Yes!", "yes"),
        ("5!", "5!"),
        ("n!", "n!"),
        ("...", ""),
        ("$$", ""),
        ("**" * 50_000 + "a", "**" * 50_000 + "a"),
    ],
)
def test_how_answers_are_compared_as_text(answer: str, expected: str) -> None:
    assert normalized(answer) == expected
