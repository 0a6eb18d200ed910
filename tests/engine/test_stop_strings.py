"""Stop strings are matched against the text as decoded after its prompt."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from treering.engine.stop_strings import first_stop

WORDS = ["▁END", "▁a", "END", "b", "<0xC3>", "<0xA4>"]


@pytest.fixture(scope="module")
def decode():
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="b"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    assert tokenizer.decode([0]) == "END"
    return lambda tokens: tokenizer.decode(tokens.tolist())


def ids(*words: str) -> np.ndarray:
    return np.array([WORDS.index(word) for word in words], np.int32)


@pytest.mark.parametrize(
    ("tokens", "num_new", "stop", "kept"),
    [
        (("▁END",), 1, " END", 1),
        (("▁END",), 1, "END", 1),
        (("END",), 1, " END", None),
        (("▁a", "▁END", "b"), 3, " END", 2),
        (("▁a", "END"), 2, " END", None),
        (("<0xC3>", "<0xA4>", "▁END"), 3, "ä END", 3),
        (("▁a",), 1, " END", None),
    ],
)
def test_a_space_before_the_first_word_of_a_turn_counts(decode, tokens, num_new, stop, kept) -> None:
    assert first_stop(ids(*tokens), num_new, [stop], decode) == kept


def test_a_string_may_begin_in_tokens_that_were_looked_at_before(decode) -> None:
    assert first_stop(ids("b", "END", "b"), 1, ["ENDb"], decode) == 1
    assert first_stop(ids("b", "<0xC3>", "<0xA4>"), 1, ["bä"], decode) == 1
