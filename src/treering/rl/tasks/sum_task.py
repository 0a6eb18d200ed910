"""Base class of the tasks about sums: draws questions and builds correct trajectories for a warm start."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Self

from treering.rl.tasks.characters import Characters
from treering.rl.tasks.task import Prompt, Task
from treering.rl.tasks.terms import Terms, TermsSpec, draw_terms
from treering.train.loop.batches import TrainingTask
from treering.types import TokenIds

Parts = list[tuple[str, bool]]
"""Consecutive texts, each with whether the policy writes it."""


class SumTask(Task):
    """Distinct sums as prompts; the prompt id is the sum, such as "17+5+30", and the answer its result."""

    characters: ClassVar[Characters]
    """The vocabulary."""
    stop_symbols: ClassVar[str]
    """Symbols that end a turn."""

    def __init__(
        self,
        num_prompts: int,
        seed: int = 0,
        *,
        min_terms: int = 3,
        max_terms: int = 5,
        max_number: int = 99,
        num_skipped: int = 0,
    ) -> None:
        """Draws the sums; see `TermsSpec` for the arguments and their ConfigError."""
        self._spec = TermsSpec(
            num_prompts=num_prompts,
            seed=seed,
            min_terms=min_terms,
            max_terms=max_terms,
            max_number=max_number,
            num_skipped=num_skipped,
        )
        self._terms = draw_terms(self._spec)
        self._prompts = tuple(self._prompt(terms) for terms in self._terms)

    @staticmethod
    @abstractmethod
    def prompt_text(terms: Terms) -> str:
        """The text of a prompt, header and question."""

    @staticmethod
    @abstractmethod
    def solution_parts(terms: Terms) -> Parts:
        """The correct trajectory after that prompt."""

    @property
    def prompts(self) -> Sequence[Prompt]:
        """In the order of drawing."""
        return self._prompts

    @property
    def vocab_size(self) -> int:
        """Number of symbols."""
        return len(self.characters.symbols)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The ids of `stop_symbols`."""
        return tuple(self.encode(self.stop_symbols).tolist())

    def held_out(self, num_prompts: int) -> Self:
        """A task with other prompts of the same kind, disjoint from this task's.

        Example: `ChainedSums(64).held_out(16)` has the 65th to 80th prompt of `ChainedSums(80)`.
        """
        num_skipped = self._spec.num_skipped + self._spec.num_prompts
        spec = replace(self._spec, num_prompts=num_prompts, num_skipped=num_skipped)
        return type(self)(**{name: getattr(spec, name) for name in spec.__slots__})

    def solutions(self) -> list[TrainingTask]:
        """The correct trajectory of each prompt, trained where the policy writes: for a supervised warm start."""
        return [
            self.characters.solution(prompt, self.solution_parts(terms))
            for prompt, terms in zip(self._prompts, self._terms, strict=True)
        ]

    @classmethod
    def encode(cls, text: str) -> TokenIds:
        """Token ids int32 [T]; raises InputError for a character outside the vocabulary."""
        return cls.characters.encode(text)

    @classmethod
    def decode(cls, tokens: TokenIds) -> str:
        """The text of token ids."""
        return cls.characters.decode(tokens)

    def _prompt(self, terms: Terms) -> Prompt:
        tokens = self.encode(self.prompt_text(terms))
        return Prompt(prompt_id=sum_text(terms), tokens=tokens, answer=str(sum(terms)))


def sum_text(terms: Terms) -> str:
    """The text of the sum.

    Example: (17, 5, 30) is "17+5+30".
    """
    return "+".join(map(str, terms))
