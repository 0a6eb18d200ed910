"""Sums with a calculator: what is asked and what is rewarded, for both kinds of environment; imports Python alone."""

import random
import re
from collections.abc import Sequence

SUMS = tuple(
    (a, b)
    for draws in (random.Random(0),)
    for a, b in ((draws.randint(1000, 9999), draws.randint(1000, 9999)) for _ in range(48))
)
_CALL = re.compile(r"CALC: *(\d+) *\+ *(\d+)")
_EXAMPLE = (
    {"role": "system", "content": "To add numbers, write CALC and the sum. You are told the result. Then answer."},
    {"role": "user", "content": "What is 12 + 7?"},
    {"role": "assistant", "content": "CALC: 12 + 7"},
    {"role": "user", "content": "Result: 19"},
    {"role": "assistant", "content": "19"},
)


def question(a: int, b: int) -> list[dict[str, str]]:
    """Messages before the first turn."""
    return [*map(dict, _EXAMPLE), {"role": "user", "content": f"What is {a} + {b}?"}]


def observation(text: str) -> dict[str, str] | None:
    """The calculator's message after a turn; None for a turn without a call.

    Example: "CALC: 12 + 7" gives "Result: 19".
    """
    call = _CALL.fullmatch(text.strip())
    return None if call is None else {"role": "user", "content": f"Result: {int(call[1]) + int(call[2])}"}


def reward(a: int, b: int, texts: Sequence[str]) -> float:
    """0.2 for a call that runs, 1.0 for the right one and an answer that is its result alone."""
    seen = observation(texts[0]) if texts else None
    if seen is None:
        return 0.0
    is_right = seen["content"] == f"Result: {a + b}" and texts[-1].strip().rstrip(".") == str(a + b)
    return 1.0 if is_right else 0.2
