"""Turns that a trainer samples one by one come back as whole rollouts of their first prompts."""

from treering.integrations.trl.turns import Turns
from treering.types import hash_of_prompt


def rollouts_of(turns: Turns) -> list[tuple[object, list[int]]]:
    return [(prompt_id, tokens.tolist()) for prompt_id, tokens in turns.take()]


def test_a_later_turn_replaces_the_one_that_it_continues() -> None:
    turns, prompt = Turns(), [5, 6]
    turns.add([prompt, prompt], [[7, 1], [7, 2]])
    # The environment said 8 after the second rollout, and that rollout alone goes on.
    turns.add([[*prompt, 7, 2, 8]], [[9]])
    turns.add([[*prompt, 7, 2, 8, 9, 8]], [[3]])
    assert rollouts_of(turns) == [(hash_of_prompt(prompt), [7, 1]), (hash_of_prompt(prompt), [7, 2, 8, 9, 8, 3])]
    assert rollouts_of(turns) == []


def test_the_next_batch_begins_anew_under_the_same_ids() -> None:
    turns = Turns()
    turns.add([[5, 6], [4]], [[7], [7]])
    first = rollouts_of(turns)
    turns.add([[5, 6], [4]], [[7], [7]])
    assert rollouts_of(turns) == first == [(hash_of_prompt([5, 6]), [7]), (hash_of_prompt([4]), [7])]


def test_equal_rollouts_are_both_kept() -> None:
    turns = Turns()
    turns.add([[5, 6]] * 2, [[7, 8]] * 2)
    assert len(turns.take()) == 2
