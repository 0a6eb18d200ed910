"""Reward functions on texts, and how they are found."""

from decimal import Decimal
from pathlib import Path

import pytest

from tests.rl.rollouts import prompt_of
from treering.data.formats import files
from treering.errors import ConfigError, InputError
from treering.rl.tasks import rewards
from treering.rl.tasks.rewards import check_answer, contains_answer, exact_answer, find_number, find_reward


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is 18.", "18"),
        ("first 3, then 4", "4"),
        ("#### 18", "18"),
        ("x = 3\n#### $1,234.50 in all, 7 left", "1234.50"),
        ("#### 1 no, #### 2", "2"),
        ("so $5", "5"),
        ("-5", "-5"),
        ("it fell to -5", "-5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("9-4", "4"),
        ("9 - 4", "4"),
        ("(2+3)-4", "4"),
        ("x-4", "4"),
        ("12,345,678", "12345678"),
        ("1,2", "2"),
        ("1,2345", "2345"),
        ("0.50", "0.5"),
        ("about .5", "0.5"),
        ("-.5", "-0.5"),
        ("half.5", "5"),
        ("007", "7"),
        ("50%", "50"),
        ("٣", None),
        ("5 ####", None),
        ("none", None),
        ("", None),
    ],
)
def test_the_number_of_a_text(text: str, expected: str | None) -> None:
    assert find_number(text) == (None if expected is None else Decimal(expected))


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("a\n#### 18", "so it is 18.0", 1.0),
        ("a\n#### 1,000", "$1000.00", 1.0),
        ("18", "18 of 20", 0.0),
        ("18", "#### 18 of 20", 1.0),
        ("18", "19", 0.0),
        ("18", "I do not know", 0.0),
        ("-3", "3", 0.0),
        ("0.1", "0.10", 1.0),
        ("100000000000000000001", "100000000000000000000", 0.0),
    ],
)
def test_exact_answers_are_equal_as_decimals(answer: str, text: str, expected: float) -> None:
    assert exact_answer(prompt_of(answer=answer), text) == expected


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("Paris", "It is PARIS.", 1.0),
        ("Paris", "Parisian", 0.0),
        ("8", "18", 0.0),
        (" why\n#### New York ", "in new york, of course", 1.0),
        ("a.c", "abc", 0.0),
        ("(x)", "f(x)", 0.0),
        ("(x)", "it is (x).", 1.0),
    ],
)
def test_a_contained_answer_stands_as_whole_words(answer: str, text: str, expected: float) -> None:
    assert contains_answer(prompt_of(answer=answer), text) == expected


def test_a_missing_answer_is_refused() -> None:
    for reward in (exact_answer, contains_answer):
        with pytest.raises(InputError, match="prompt 'p' has none; add one"):
            reward(prompt_of(), "1")
    with pytest.raises(InputError, match="the answer has none, got 'many'"):
        exact_answer(prompt_of(answer="many"), "1")


def test_a_reward_is_found_by_name_or_by_path() -> None:
    assert find_reward("exact_answer") is exact_answer
    assert find_reward("contains_answer") is contains_answer
    assert find_reward("treering.rl.tasks.rewards:exact_answer") is rewards.exact_answer
    assert find_reward("treering.data.formats.files:read_trajectories") is files.read_trajectories


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact_anser", "got 'exact_anser'; nearest names: exact_answer"),
        ("zzz", "nearest names: exact_answer, contains_answer"),
        (":f", "nearest names"),
        ("treering:", "nearest names"),
        ("no_such_package.rewards:f", r"cannot \(No module named 'no_such_package'\); check the spelling"),
        ("treering.rl.tasks.rewards:no_such", "has no attribute 'no_such'"),
        ("treering.rl.tasks.rewards:FINAL_MARK", "is a str"),
    ],
)
def test_an_unknown_reward_is_refused_with_what_is_near(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_reward(name)


def test_answers_that_a_named_reward_cannot_use_are_refused_early() -> None:
    for name, answer in [("exact_answer", None), ("exact_answer", "#### "), ("contains_answer", " ")]:
        with pytest.raises(InputError, match="needs an answer"):
            check_answer(name, answer)
    with pytest.raises(InputError, match="needs a number in the answer, got 'many'"):
        check_answer("exact_answer", "many")
    check_answer("contains_answer", "many")
    check_answer("package.module:function", None)


def test_the_answers_of_gsm8k_are_right_by_their_own_measure(real_data: Path) -> None:
    import gzip
    import json

    with gzip.open(real_data / "gsm8k" / "test.jsonl.gz", "rt", encoding="utf-8") as lines:
        answers = [json.loads(line)["answer"] for line in lines]
    assert len(answers) > 1000
    for answer in answers:
        final = answer.split("#### ")[1]
        assert exact_answer(prompt_of(answer=answer), f"The answer is {final}.") == 1.0
        assert exact_answer(prompt_of(answer=answer), f"#### {final}1") == 0.0
