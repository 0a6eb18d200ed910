r"""Chained sums: numbers drawn the same on every machine, written in sixteen characters, with correct solutions.

A small model can learn the task, and a program can check the answers.

    2+3+4:2+3=5;5+4=9.\n    the header of every prompt: one question with its response
    17+5+30:                the question
    17+5=22;22+30=52.       the correct response
"""

import re
from abc import abstractmethod
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import ClassVar, Self

import numpy as np

from treering.engine.protocol import Rollout
from treering.errors import ConfigError, InputError
from treering.rl.tasks.task import Prompt, Task
from treering.train.loop.batches import TrainingTask
from treering.types import TokenIds

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""Decoded text of an id without a symbol; a policy with a larger vocabulary may sample one."""


Terms = tuple[int, ...]
"""The numbers of one sum."""

_WORDS_PER_BLOCK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TermsSpec:
    """Sums to draw; equal specs give equal sums."""

    num_prompts: int = 64
    """Number of distinct sums."""
    seed: int = 0
    """Seed of the draws."""
    min_terms: int = 3
    """Fewest numbers of a sum; 2 or more."""
    max_terms: int = 5
    """Most numbers of a sum."""
    max_number: int = 99
    """Numbers are in [1, max_number]."""
    num_skipped: int = 0
    """Sums drawn first and skipped, so that two specs with one seed can be disjoint."""

    def __post_init__(self) -> None:
        least = {"num_prompts": 1, "seed": 0, "min_terms": 2, "max_terms": self.min_terms, "max_number": 1}
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if type(value) is not int or value < least.get(name, 0):
                raise ConfigError(f"{name} must be an integer >= {least.get(name, 0)}, got {value!r}; raise it")
        wanted, there = self.num_prompts + self.num_skipped, self.num_possible
        if wanted > there:
            raise ConfigError(
                f"there are {there} sums of {self.min_terms} to {self.max_terms} numbers up to {self.max_number}, got "
                f"{wanted} to draw; ask for fewer, or raise max_number or max_terms"
            )

    @property
    def num_possible(self) -> int:
        """Number of distinct sums that exist."""
        return sum(self.max_number**count for count in range(self.min_terms, self.max_terms + 1))


def draw_terms(spec: TermsSpec) -> list[Terms]:
    """Draw the distinct sums of a spec. The number of terms is drawn first, uniformly.

    A spec with more prompts starts with the sums of a spec with fewer.

    Example: `draw_terms(TermsSpec(num_prompts=2, num_skipped=3))` are the last two of
    `draw_terms(TermsSpec(num_prompts=5))`.
    """
    words = _Words(spec.seed)
    drawn: dict[Terms, None] = {}
    while len(drawn) < spec.num_skipped + spec.num_prompts:
        num_terms = spec.min_terms + words.below(spec.max_terms - spec.min_terms + 1)
        drawn.setdefault(tuple(1 + words.below(spec.max_number) for _ in range(num_terms)))
    return list(drawn)[spec.num_skipped :]


class _Words:
    """Raw words of a bit generator: NumPy keeps this stream fixed across versions, unlike those of distributions."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.Philox(key=seed)
        self._words: list[int] = []

    def below(self, bound: int) -> int:
        if not self._words:
            self._words = self._bits.random_raw(_WORDS_PER_BLOCK).tolist()[::-1]
        return self._words.pop() % bound


Parts = list[tuple[str, bool]]
"""Consecutive texts, each with True if the policy writes it."""


class SumTask(Task):
    """Distinct sums as prompts; the prompt id is the sum, such as "17+5+30", and the answer is its result."""

    symbols: ClassVar[str]
    """Vocabulary: distinct characters; the i-th is token i."""
    stop_symbols: ClassVar[str]
    """Symbols that end a turn."""

    def __init__(self, num_prompts: int, seed: int = 0, **bounds: int) -> None:
        """Draw the sums; `bounds` are the other fields of `TermsSpec`."""
        self._spec = TermsSpec(num_prompts=num_prompts, seed=seed, **bounds)
        self._terms = draw_terms(self._spec)
        self._prompts = tuple(self._prompt(terms) for terms in self._terms)

    @staticmethod
    @abstractmethod
    def prompt_text(terms: Terms) -> str:
        """Return the text of a prompt: header and question."""

    @staticmethod
    @abstractmethod
    def solution_parts(terms: Terms) -> Parts:
        """Return the correct trajectory after that prompt."""

    @property
    def vocab_size(self) -> int:
        """Number of symbols."""
        return len(self.symbols)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids of `stop_symbols`."""
        return tuple(self.encode(self.stop_symbols).tolist())

    @property
    def num_others(self) -> int:
        """Number of further prompts of the same kind that `held_out` can draw."""
        return self._spec.num_possible - self._spec.num_skipped - self._spec.num_prompts

    def held_out(self, num_prompts: int) -> Self:
        """Return a task with other prompts of the same kind, disjoint from this task's.

        Example: `ChainedSums(64).held_out(16)` has the 65th to 80th prompt of `ChainedSums(80)`.
        """
        num_skipped = self._spec.num_skipped + self._spec.num_prompts
        spec = replace(self._spec, num_prompts=num_prompts, num_skipped=num_skipped)
        return type(self)(**{name: getattr(spec, name) for name in spec.__slots__})

    def solutions(self) -> list[TrainingTask]:
        """Return each prompt's correct trajectory for a supervised warm start, trained where the policy writes."""
        found = []
        for prompt, terms in zip(self._prompts, self._terms, strict=True):
            parts = [(self.encode(text), is_trained) for text, is_trained in self.solution_parts(terms)]
            masks = [np.full(tokens.size, is_trained) for tokens, is_trained in parts]
            found.append(
                TrainingTask(
                    task_id=prompt.prompt_id,
                    sequences=(np.concatenate([prompt.tokens, *(tokens for tokens, _ in parts)]),),
                    loss_masks=(np.concatenate([np.zeros(prompt.tokens.size, bool), *masks]),),
                )
            )
        return found

    @classmethod
    def encode(cls, text: str) -> TokenIds:
        """Return token ids int32 [T]; raise InputError for a character outside the vocabulary."""
        unknown = [symbol for symbol in text if symbol not in cls.symbols]
        if unknown:
            raise InputError(f"text must use the symbols {cls.symbols!r}, got {unknown[0]!r}; remove it")
        return np.array([cls.symbols.index(symbol) for symbol in text], np.int32)

    @classmethod
    def decode(cls, tokens: TokenIds) -> str:
        """Return the text of token ids; an id without a symbol becomes `UNKNOWN`."""
        return "".join(cls.symbols[i] if 0 <= i < len(cls.symbols) else UNKNOWN for i in tokens.tolist())

    def _prompt(self, terms: Terms) -> Prompt:
        tokens = self.encode(self.prompt_text(terms))
        return Prompt(prompt_id=sum_text(terms), tokens=tokens, answer=str(sum(terms)))


def sum_text(terms: Terms) -> str:
    """Return the text of the sum."""
    return "+".join(map(str, terms))


_FINAL = re.compile(r"[^.]*=([0-9]{1,18})\.")


class ChainedSums(SumTask):
    """Sums of 3 to 5 numbers, answered with the chain of partial sums; reward 1.0 for a correct total, else 0.0.

    Example: the sum 17+5+30 has a prompt of 27 tokens, including the header, and a correct response of 17.
    """

    symbols: ClassVar[str] = "0123456789+=;:.\n"
    stop_symbols: ClassVar[str] = "."

    def reward(self, prompt: Prompt, rollout: Rollout) -> float:
        """Return 1.0 if the number between the last "=" and the final "." is the sum, else 0.0.

        Example: for 17+5+30, "17+5=23;22+30=52." and "=052." get 1.0; "17+5=22;22+30=52" and "52." get 0.0.
        """
        final = _FINAL.fullmatch(self.decode(rollout.tokens))
        return float(final is not None and int(final[1]) == int(prompt.answer or -1))

    @staticmethod
    def prompt_text(terms: Terms) -> str:
        """Return the header, the question and a colon."""
        return f"{_HEADER}{sum_text(terms)}:"

    @staticmethod
    def solution_parts(terms: Terms) -> Parts:
        """Return the chain of partial sums, all written by the policy."""
        return [(_chain(terms), True)]


def _chain(terms: Terms) -> str:
    sums = list(accumulate(terms))
    steps = zip(sums, terms[1:], sums[1:], strict=False)
    return ";".join(f"{before}+{term}={after}" for before, term, after in steps) + "."


_HEADER = f"{sum_text((2, 3, 4))}:{_chain((2, 3, 4))}\n"
