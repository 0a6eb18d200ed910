"""Reward functions on texts, and how they are found."""

import re
import sys
from pathlib import Path

import pytest

from tests.rl.rollouts import prompt_of
from treering.data.formats import record_files
from treering.errors import ConfigError, InputError, MissingExtraError
from treering.rl.tasks.ready_rewards import NAMED_REWARDS, check_answer, contains_answer, exact_answer, find_reward


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("a\n#### 1,000", "$1000.00", 1.0),
        ("18", "#### 18 of 20", 1.0),
        ("18", "18 of 20", 0.0),
        ("18", "I do not know", 0.0),
        ("100000000000000000001", "100000000000000000000", 0.0),
        ("x = 3/4", "so 0.75", 1.0),
        ("Paris", "I think.\nPARIS.", 1.0),
        ("Paris", "It is Paris", 0.0),
        (r"a \boxed{\text{B}}", "#### b", 1.0),
        ("(1, 2)", r"so \boxed{(1,2)}", 1.0),
        ("x = 3 or 4", "4", 0.0),
        ("v1e5", "100000", 0.0),
        ("1e999999999", "1e999999998", 0.0),
    ],
)
def test_exact_answers_are_equal_as_numbers_and_else_as_text(answer: str, text: str, expected: float) -> None:
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


def test_a_reward_is_found_by_name_or_by_path() -> None:
    assert find_reward("exact_answer") is exact_answer
    assert find_reward("contains_answer") is contains_answer
    assert find_reward("treering.rl.tasks.ready_rewards:exact_answer") is exact_answer
    assert find_reward("treering.data.formats.record_files:first_bytes") is record_files.first_bytes


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact_anser", "got 'exact_anser'; nearest names: exact_answer"),
        ("zzz", "nearest names: exact_answer, contains_answer"),
        (":f", "nearest names"),
        ("treering:", "nearest names"),
        ("no_such_package.rewards:f", "raises ModuleNotFoundError: No module named 'no_such_package'"),
        ("treering.rl.tasks.ready_rewards:no_such", "has no such name; check the spelling"),
        ("treering.rl.tasks.ready_rewards:FINAL_MARK", "has a str of that name"),
    ],
)
def test_an_unknown_reward_is_refused_with_what_is_near(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_reward(name)


def test_answers_that_a_named_reward_cannot_use_are_refused_early() -> None:
    for name in ("exact_answer", "contains_answer", "math_verify"):
        for answer in (None, "", " ", "18\n#### ", "."):
            with pytest.raises(InputError, match=f"{name} needs an answer, got {re.escape(repr(answer))}"):
                check_answer(name, answer)
    with pytest.raises(InputError, match="exact_answer needs an answer"):
        check_answer("exact_answer", r"\boxed{ }")
    for name in ("exact_answer", "contains_answer"):
        check_answer(name, "many")
    check_answer("package.module:function", None)


def test_math_verify_names_the_extra_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(MissingExtraError, match=r"math_verify needs math_verify: pip install 'math-verify>=0.9'"):
        check_answer("math_verify", "1")


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        (r"\frac{\sqrt{2}}{2}", r"It is $1/\sqrt{2}$", 1.0),
        (r"\frac{\sqrt{2}}{2}", r"It is $\sqrt{2}$", 0.0),
        (r"so\n#### $\frac{3}{4}$", "#### 0.75", 1.0),
        ("#### 3", "2 apples\n#### 3 and 4 more", 0.0),
        (r"\{1, 2\}", r"\boxed{\{2, 1\}}", 1.0),
        ("2x + 1", "$1 + 2x$", 1.0),
        ("2x + 1", "$1 + x$", 0.0),
        ("1e+16", "10000000000000000", 1.0),
        ("1e+16", "1", 0.0),
        ("18", "I do not know", 0.0),
    ],
)
def test_math_verify_compares_formulas(answer: str, text: str, expected: float) -> None:
    pytest.importorskip("math_verify", reason="needs treering[math]")
    check_answer("math_verify", answer)
    assert find_reward("math_verify")(prompt_of(answer=answer), text) == expected


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


THOUGHTS = (
    ("<think>\n", "\n</think>\n\n"),
    ("", "</think>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<Thought>\n", "</Thought>\n"),
    ("<THINK>", "</THINK>"),
    ("<unused94>thought\n", "<unused95>"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
)


@pytest.mark.parametrize(("begin", "end"), THOUGHTS)
@pytest.mark.parametrize("name", NAMED_REWARDS)
def test_ready_rewards_read_only_the_text_after_the_thought(name: str, begin: str, end: str) -> None:
    if name == "math_verify":
        pytest.importorskip("math_verify")
    reward, prompt = find_reward(name), prompt_of(answer="4")
    for thought in ("so maybe 4", r"so \boxed{4}", "#### 4", "it is $4$."):
        if begin:
            assert reward(prompt, f"{begin}{thought}") == 0.0
            assert reward(prompt, f"{begin}5{end}5 {begin}{thought}") == 0.0
        assert reward(prompt, f"{begin}{thought}{end}It is 5") == 0.0
        assert reward(prompt, f"{begin}5 or {thought}{end}") == 0.0
        assert reward(prompt, f"{begin}{thought}, no, 5{end}{thought}") == 1.0
    assert reward(prompt, f"{begin}5{end}x {begin}6{end}It is 4") == 1.0
    assert reward(prompt, "It is 4") == 1.0


def test_another_familys_end_does_not_end_a_thought() -> None:
    for text in ("<think>use [/THINK] 4", "[THINK]use </think> 4", "<think>as <|end|> 4", "<think></thinking> 4"):
        assert exact_answer(prompt_of(answer="4"), text) == 0.0
