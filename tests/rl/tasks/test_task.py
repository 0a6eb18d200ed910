import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rl.rollouts import prompt_of
from treering.errors import InputError
from treering.rl.tasks.task import Prompt, prompt_id_of

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=4)


@given(TOKENS, TOKENS)
def test_prompts_share_a_name_only_if_they_share_their_tokens(one: list[int], other: list[int]) -> None:
    names = [prompt_id_of(np.array(tokens, np.int32)) for tokens in (one, other)]
    assert (names[0] == names[1]) == (one == other)


def test_a_name_is_the_same_on_every_machine_and_in_every_byte_order() -> None:
    expected = "cecde70f3459d76616aee226a9d7bac6"
    tokens = [5, 6, 151_643]
    names = {prompt_id_of(np.array(tokens, dtype)) for dtype in ("<i4", ">i4", np.int64)}
    assert names == {expected}


def test_a_prompt_without_tokens_or_name_is_refused() -> None:
    for tokens in ([], [[1, 2]]):
        with pytest.raises(InputError, match="at least one token, got shape"):
            Prompt(prompt_id="p", tokens=np.array(tokens, np.int32))
    with pytest.raises(InputError, match="name the prompt"):
        prompt_of(prompt_id="")
    assert prompt_of(prompt_id=0).prompt_id == 0
    # A numpy number would have another name in JSON, and another draw, than the integer that it equals.
    for name in (np.int64(3), 1.5, None):
        with pytest.raises(InputError, match="text or an integer"):
            prompt_of(prompt_id=name)
    with pytest.raises(InputError, match=r"integer array.*float64"):
        Prompt(prompt_id="p", tokens=np.array([1.0]))
