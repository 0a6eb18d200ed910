"""The calculator: observations, rewards and correct trajectories."""

import numpy as np
import pytest

from tests.rl.rollouts import prompt_of, rollout_of
from treering.rl.tasks.calculator import Calculator

TASK = Calculator(60, seed=1)
HEADER = "2+3+4 [2+3]5 [5+4]9 9. "


def answer_of(text: str) -> str | None:
    answer = TASK.observe(prompt_of(), rollout_of(TASK.encode(text)))
    return None if answer is None else TASK.decode(answer)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[17+5]", "22 "),
        ("[17+5]22 [22+30]", "52 "),
        ("[17+5]22 [022+0]", "22 "),
        ("[17+5]? [1+2]", "3 "),
        ("[999999999+999999999]", "1999999998 "),
        ("[1999999999+1]", "? "),
        ("[1+1999999999]", "? "),
        ("[17+]", "? "),
        ("[17]", "? "),
        ("17+5]", "? "),
        ("[1+2+3]", "? "),
        ("[[1+2]", "? "),
        ("5[1+2]", "? "),
        ("[1+2]]", "? "),
        ("]", "? "),
        ("52.", None),
        ("[17+5", None),
        ("", None),
    ],
)
def test_a_call_is_answered_and_a_malformed_one_is_told_so(text: str, expected: str | None) -> None:
    assert answer_of(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[17+5]22 [22+30]52 52.", 1.0),
        ("52.", 1.0),
        ("[17+]? 052.", 1.0),
        ("[17+5]22 53.", 0.0),
        ("[17+5]22 52", 0.0),
        ("[17+5]52.", 0.0),
        ("[22+30]52 .", 0.0),
        ("5 2.", 0.0),
        ("[22+30]", 0.0),
        ("52..", 0.0),
        ("", 0.0),
    ],
)
def test_the_final_number_counts_alone(text: str, expected: float) -> None:
    assert TASK.reward(prompt_of(answer="52"), rollout_of(TASK.encode(text))) == expected


def test_solutions_are_what_the_calculator_would_have_answered() -> None:
    for prompt, solution in zip(TASK.prompts, TASK.solutions(), strict=True):
        (tokens,), (mask,) = solution.sequences, solution.loss_masks
        assert TASK.decode(prompt.tokens) == f"{HEADER}{prompt.prompt_id} "
        written = iter(tokens[mask].tolist())
        rollout: list[int] = []
        trained: list[bool] = []
        for token in written:
            rollout.append(token)
            trained.append(True)
            if token in TASK.stop_tokens:
                answer = TASK.observe(prompt, rollout_of(rollout))
                rollout += [] if answer is None else answer.tolist()
                trained += [False] * (len(rollout) - len(trained))
        assert tokens.tolist() == [*prompt.tokens, *rollout]
        assert mask.tolist() == [False] * prompt.tokens.size + trained
        assert TASK.reward(prompt, rollout_of(rollout)) == 1.0


def test_a_solution_calls_once_per_addition_with_the_numbers_of_the_question() -> None:
    for prompt, solution in zip(TASK.prompts, TASK.solutions(), strict=True):
        terms = str(prompt.prompt_id).split("+")
        text = TASK.decode(solution.sequences[0][prompt.tokens.size :])
        calls = [call.partition("]")[0] for call in text.split("[")[1:]]
        assert [call.split("+")[1] for call in calls] == terms[1:]
        assert calls[0].split("+")[0] == terms[0]


def test_the_vocabulary_is_sixteen_characters() -> None:
    assert TASK.vocab_size == 16
    assert TASK.decode(np.array(TASK.stop_tokens, np.int32)) == "]."


def test_it_draws_the_sums_of_the_other_task_and_holds_others_out() -> None:
    held_out = TASK.held_out(5)
    assert isinstance(held_out, Calculator)
    assert not {p.prompt_id for p in held_out.prompts} & {p.prompt_id for p in TASK.prompts}
