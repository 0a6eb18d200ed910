"""Sums with a calculator, which answers between the turns of a rollout.

The calculator writes the text after each "]", up to the space.

    2+3+4 [2+3]5 [5+4]9 9.     the header of every prompt, and a space
    17+5+30                    the question, and a space
    [17+5]22 [22+30]52 52.     a correct trajectory
"""

import re
from itertools import accumulate
from typing import ClassVar

from treering.engine.protocol import Rollout
from treering.rl.tasks.sums import Parts, SumTask, Terms, sum_text
from treering.rl.tasks.task import Prompt
from treering.types import TokenIds

_CALL = re.compile(r"(?:.* )?\[([0-9]{1,9})\+([0-9]{1,9})\]")
_FINAL = re.compile(r"(?:.* )?([0-9]{1,18})\.")
_MALFORMED = "? "


class Calculator(SumTask):
    """Sums of 3 to 5 numbers, added two at a time with a calculator; reward 1.0 for a correct result, else 0.0.

    Example: for 17+5+30, the answer to "[17+5]" is "22 ", to "[17+]" it is "? "; "52." ends the rollout.
    """

    symbols: ClassVar[str] = "0123456789+[].? "
    stop_symbols: ClassVar[str] = "]."

    def reward(self, prompt: Prompt, rollout: Rollout) -> float:
        """1.0 if the number before the final "." is the sum and follows a space, else 0.0.

        Example: for 17+5+30, "[17+5]22 52." gets 1.0; "[17+5]22 052" and "[17+5]52." get 0.0.
        """
        final = _FINAL.fullmatch(self.decode(rollout.tokens))
        return float(final is not None and int(final[1]) == int(prompt.answer or -1))

    def answer(self, rollout: Rollout) -> TokenIds | None:
        """The sum of a call's two numbers and a space; "? " for a malformed call; None if there is no call.

        Calls with numbers of more than nine digits are malformed.
        """
        text = self.decode(rollout.tokens)
        if not text.endswith("]"):
            return None
        call = _CALL.fullmatch(text)
        return self.encode(_MALFORMED if call is None else f"{int(call[1]) + int(call[2])} ")

    @staticmethod
    def prompt_text(terms: Terms) -> str:
        """The header, the question and a space."""
        return f"{_HEADER}{sum_text(terms)} "

    @staticmethod
    def solution_parts(terms: Terms) -> Parts:
        """Calls from left to right, each with its observation, then the sum as the final number."""
        return [*_calls(terms), (f"{sum(terms)}.", True)]


def _calls(terms: Terms) -> Parts:
    sums = list(accumulate(terms))
    steps = zip(sums, terms[1:], sums[1:], strict=False)
    return [part for before, term, after in steps for part in ((f"[{before}+{term}]", True), (f"{after} ", False))]


def _trajectory(terms: Terms) -> str:
    return "".join(text for text, _ in Calculator.solution_parts(terms))


_HEADER = f"{sum_text((2, 3, 4))} {_trajectory((2, 3, 4))} "
