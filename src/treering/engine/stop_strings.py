"""Find the new token that completes a stop string."""

from collections.abc import Callable, Sequence

import numpy as np

from treering.engine.protocol import Rollout
from treering.types import TokenIds

Decode = Callable[[TokenIds], str]

# A character has at most 4 bytes, and a token at least one.
_TOKENS_PER_CHARACTER = 4


def first_stop(
    tokens: TokenIds, num_new: int, strings: Sequence[str], decode: Decode, num_before: int = 0
) -> int | None:
    """Return how many of the last `num_new` tokens to keep if one completes a stop string, else None.

    Args:
        tokens: int32 [R], the tokens of the current turn (from `turn_start` on); or only the new ones and `reach_of`
            tokens before them.
        num_new: number of tokens at the end that are not checked yet.
        strings: at least one stop string.
        decode: turns tokens into text.
        num_before: number of these tokens that an aborted rollout began with. A turn ends with its first stop string,
            so tokens after one in them belong to another turn.

    A space before the first token of a turn counts, as it does after a prompt.

    Example: with one character per token, "ab;c" with 3 new tokens and the stop string ";" gives 2.
    """
    window = _window_of(strings)
    # Only strings that a new token can be part of count.
    if num_before > 0 and tokens.size - num_before - num_new < window:
        tokens = tokens[_last_turn(tokens[:num_before], strings, decode) :]
    for count in range(1, num_new + 1):
        end = tokens.size - num_new + count
        seen = tokens[max(0, end - window) : end]
        texts = _texts(seen, decode)
        if not any(string in text for string in strings for text in texts):
            continue
        # A string before `min_tokens` has not ended the turn.
        before = _texts(seen[:-1], decode)
        pairs = list(zip(texts, before, strict=True))
        if any(now.rfind(string) > then.rfind(string) for string in strings for now, then in pairs):
            return count
    return None


def _last_turn(tokens: TokenIds, strings: Sequence[str], decode: Decode) -> int:
    """Return where the last turn of an aborted rollout's tokens begins: after its last complete stop string.

    Example: 3 for "ab;c" and the string ";", and 0 for "abc".
    """
    first, num_left = 0, min(_window_of(strings), tokens.size)
    while num_left > 0:
        count = first_stop(tokens[first:], num_left, strings, decode)
        if count is None:
            break
        first, num_left = tokens.size - num_left + count, num_left - count
    return first


def _texts(tokens: TokenIds, decode: Decode) -> tuple[str, str]:
    """Return the text of the tokens, and their text after another token: SentencePiece drops a leading space.

    If the first token is a part of a character, only the former is right.
    """
    first, doubled = decode(tokens[:1]), decode(np.concatenate([tokens[:1], tokens]))
    return decode(tokens), doubled.removeprefix(first)


def reach_of(strings: Sequence[str]) -> int:
    """Return the most tokens that `first_stop` reads before the new ones: two strings, the first ending a turn."""
    return 2 * _window_of(strings)


def _window_of(strings: Sequence[str]) -> int:
    """Return the most tokens that a stop string can take, if none is empty.

    Example: 12 for "END".
    """
    return _TOKENS_PER_CHARACTER * max(len(string) for string in strings)


def turn_start(so_far: Rollout | None) -> int:
    """Return the index in the rollout of the first token of the turn that a request continues.

    A turn that stopped is over, so a new one begins after all tokens. An aborted turn continues, so that a stop string
    across the abort is found.

    Example: [7, 8] after an abort gives 0; [7, 8, 9], where 9 was observed after a stop, gives 3.
    """
    if so_far is None:
        return 0
    if so_far.finish_reason == "stop":
        return so_far.num_tokens
    observed = np.flatnonzero(~so_far.loss_mask)
    return int(observed[-1]) + 1 if observed.size else 0
