"""Final answers: where they stand, which of them are numbers, and which texts are the same."""

from fractions import Fraction

import pytest

from treering.rl.tasks.answers import final_answer, find_number, normalized, single_number


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
