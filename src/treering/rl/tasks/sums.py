r"""Chained sums.

A small model can learn the task, and a program can check it.

    2+3+4:2+3=5;5+4=9.\n    the header of every prompt: one question with its response
    17+5+30:                the question
    17+5=22;22+30=52.       the correct response
"""

import re
from itertools import accumulate
from typing import ClassVar

from treering.engine.rollout import Rollout
from treering.rl.tasks.characters import Characters
from treering.rl.tasks.sum_task import Parts, SumTask, sum_text
from treering.rl.tasks.task import Prompt
from treering.rl.tasks.terms import Terms

_FINAL = re.compile(r"[^.]*=([0-9]{1,18})\.")


class ChainedSums(SumTask):
    """Sums of 3 to 5 numbers, answered with the chain of partial sums; reward 1.0 for a correct total, else 0.0.

    Example: the sum 17+5+30 is a prompt of 27 tokens, including the header; its correct response has 17.
    """

    characters: ClassVar[Characters] = Characters("0123456789+=;:.\n")
    stop_symbols: ClassVar[str] = "."

    def reward(self, prompt: Prompt, rollout: Rollout) -> float:
        """1.0 if the number between the last "=" and the final "." is the sum, else 0.0.

        Example: for 17+5+30, "17+5=23;22+30=52." and "=052." get 1.0; "17+5=22;22+30=52" and "52." get 0.0.
        """
        final = _FINAL.fullmatch(self.decode(rollout.tokens))
        return float(final is not None and int(final[1]) == int(prompt.answer or -1))

    @staticmethod
    def prompt_text(terms: Terms) -> str:
        """The header, the question and a colon."""
        return f"{_HEADER}{sum_text(terms)}:"

    @staticmethod
    def solution_parts(terms: Terms) -> Parts:
        """The chain of partial sums, all written by the policy."""
        return [(_chain(terms), True)]


def _chain(terms: Terms) -> str:
    sums = list(accumulate(terms))
    steps = zip(sums, terms[1:], sums[1:], strict=False)
    return ";".join(f"{before}+{term}={after}" for before, term, after in steps) + "."


_HEADER = f"{sum_text((2, 3, 4))}:{_chain((2, 3, 4))}\n"
