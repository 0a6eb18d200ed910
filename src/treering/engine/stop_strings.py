"""Stop strings: which of a rollout's new tokens completes one.

Knows how tokens become text by the callable that it is given. Knows nothing of rows.
"""

from collections.abc import Callable, Sequence

import numpy as np

from treering.engine.rollout import Rollout
from treering.types import TokenIds

Decode = Callable[[TokenIds], str]

# A character has at most 4 bytes, and a token at least one.
_TOKENS_PER_CHARACTER = 4


def first_stop(tokens: TokenIds, num_new: int, strings: Sequence[str], decode: Decode) -> int | None:
    """How many of the last `num_new` tokens stay, where one of them completes a stop string, else None.

    Args:
        tokens: int32 [R], what the turn has sampled; see `turn_start`.
        num_new: of these, the tokens that have not been looked at.
        strings: at least one.
        decode: tokens to text.

    Example: with one character a token, "ab;c" whose last 3 tokens are new stays 2 of them long for the string ";".
    """
    window = _TOKENS_PER_CHARACTER * max(len(string) for string in strings)
    for count in range(1, num_new + 1):
        end = tokens.size - num_new + count
        text = decode(tokens[max(0, end - window) : end])
        if any(string in text for string in strings):
            return count
    return None


def turn_start(so_far: Rollout | None) -> int:
    """Where the turn begins that a request goes on with, in tokens of its rollout.

    A turn that came to its own end is over, whatever stands behind it. One that was taken out in the middle goes on,
    so that a string half written before is seen.

    Example: tokens [7, 8] that an abort left start at 0; [7, 8, 9] where 9 was observed behind a stop start at 3.
    """
    if so_far is None:
        return 0
    if so_far.finish_reason == "stop":
        return so_far.num_tokens
    observed = np.flatnonzero(~so_far.loss_mask)
    return int(observed[-1]) + 1 if observed.size else 0
