"""Chained sums: their text, their reward, and how they are drawn."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rl.rollouts import prompt_of, rollout_of
from treering.errors import ConfigError
from treering.rl.tasks.sums import ChainedSums, SumTask, TermsSpec, draw_terms

TASK = ChainedSums(100, seed=3)


def reward_of(text: str, answer: str = "52") -> float:
    return TASK.reward(prompt_of(answer=answer), rollout_of(TASK.encode(text)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("17+5=22;22+30=52.", 1.0),
        ("=52.", 1.0),
        ("17+5=23;22+30=052.", 1.0),
        ("17+5=22;22+30=53.", 0.0),
        ("17+5=52;22+30=53.", 0.0),
        ("17+5=22;22+30=52", 0.0),
        ("17+5=22;22+30=52.1.", 0.0),
        ("17+5=22;22+30=52..", 0.0),
        ("17+5=22;22+30=52.=52.", 0.0),
        ("17+5=22;22+30=5252.", 0.0),
        ("17+5=22;22+30=+52.", 0.0),
        ("52.", 0.0),
        ("=.", 0.0),
        (".", 0.0),
        ("", 0.0),
        ("=" + "9" * 5000 + ".", 0.0),
    ],
)
def test_only_the_final_number_counts(text: str, expected: float) -> None:
    assert reward_of(text) == expected


def test_ids_without_a_symbol_are_malformed() -> None:
    tokens = [*TASK.encode("17+5=22;22+30=52."), 99]
    assert TASK.reward(prompt_of(answer="52"), rollout_of(tokens)) == 0.0
    assert TASK.decode(np.array([-1, 0, 15, 16], np.int32)) == "\N{REPLACEMENT CHARACTER}0\n\N{REPLACEMENT CHARACTER}"


def test_every_solution_is_right_and_trained_where_the_policy_writes() -> None:
    for prompt, solution in zip(TASK.prompts, TASK.solutions(), strict=True):
        (tokens,), (mask,) = solution.sequences, solution.loss_masks
        num_prompt = prompt.tokens.size
        assert tokens[:num_prompt].tolist() == prompt.tokens.tolist()
        assert mask.tolist() == [False] * num_prompt + [True] * (tokens.size - num_prompt)
        assert TASK.reward(prompt, rollout_of(tokens[num_prompt:])) == 1.0
        assert solution.task_id == prompt.prompt_id
        assert tokens[-1] in TASK.stop_tokens
        assert np.isin(tokens[num_prompt:-1], TASK.stop_tokens).sum() == 0


@given(st.lists(st.integers(0, 15)))
def test_decoding_gives_the_text_back(tokens: list[int]) -> None:
    assert TASK.encode(TASK.decode(np.array(tokens, np.int32))).tolist() == tokens


def test_prompts_are_the_same_on_every_machine() -> None:
    assert [prompt.prompt_id for prompt in ChainedSums(3, seed=0).prompts] == [
        "6+28+40+94+4",
        "55+19+98+74+90",
        "11+60+29+28",
    ]


@given(
    seed=st.integers(0, 3),
    num_prompts=st.integers(1, 6),
    num_skipped=st.integers(0, 4),
    min_terms=st.integers(2, 3),
    num_more=st.integers(0, 2),
    max_number=st.integers(3, 9),
)
def test_drawn_sums_are_distinct_and_within_their_bounds(
    seed: int, num_prompts: int, num_skipped: int, min_terms: int, num_more: int, max_number: int
) -> None:
    bounds = {"seed": seed, "min_terms": min_terms, "max_terms": min_terms + num_more, "max_number": max_number}
    terms = draw_terms(TermsSpec(num_prompts=num_prompts, num_skipped=num_skipped, **bounds))
    assert len(set(terms)) == num_prompts
    assert all(min_terms <= len(sums) <= min_terms + num_more for sums in terms)
    assert all(1 <= term <= max_number for sums in terms for term in sums)
    assert terms == draw_terms(TermsSpec(num_prompts=num_prompts + num_skipped, **bounds))[num_skipped:]


def test_all_sums_can_be_drawn_and_no_more() -> None:
    everything = draw_terms(TermsSpec(num_prompts=12, min_terms=2, max_terms=3, max_number=2))
    pairs = [(a, b) for a in (1, 2) for b in (1, 2)]
    assert sorted(everything) == sorted([*pairs, *((a, *pair) for a in (1, 2) for pair in pairs)])
    with pytest.raises(ConfigError, match="there are 12 sums of 2 to 3 numbers up to 2, got 13 to draw"):
        TermsSpec(num_prompts=9, num_skipped=4, min_terms=2, max_terms=3, max_number=2)


def test_held_out_prompts_are_others_of_the_same_kind() -> None:
    task = ChainedSums(20, seed=7, min_terms=2, max_terms=2, max_number=6)
    held_out = task.held_out(16)
    assert {p.prompt_id for p in task.prompts} | {p.prompt_id for p in held_out.prompts} == {
        f"{a}+{b}" for a in range(1, 7) for b in range(1, 7)
    }
    assert [p.prompt_id for p in task.held_out(9).held_out(7).prompts] == [p.prompt_id for p in held_out.prompts[9:]]
    assert isinstance(held_out, SumTask)
    with pytest.raises(ConfigError, match="got 37 to draw"):
        task.held_out(17)
