"""Draws the numbers of the sums, the same on every machine."""

from dataclasses import dataclass, fields

import numpy as np

from treering.errors import ConfigError

Terms = tuple[int, ...]
"""The numbers of one sum."""

_WORDS_PER_BLOCK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TermsSpec:
    """Which sums to draw; equal specs give equal sums.

    Example: the defaults give 64 sums of 3 to 5 numbers from 1 to 99.
    """

    num_prompts: int = 64
    """Distinct sums."""
    seed: int = 0
    """Seed of the draws."""
    min_terms: int = 3
    """Numbers of a sum, at least; 2 or more."""
    max_terms: int = 5
    """Numbers of a sum, at most."""
    max_number: int = 99
    """Numbers lie in [1, max_number]."""
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
    """The distinct sums of a spec. The number of terms is drawn first, uniformly.

    A spec with more prompts starts with those of a spec with fewer.

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
    """Raw words of a bit generator: NumPy guarantees its stream for ever, unlike that of distributions."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.Philox(key=seed)
        self._words: list[int] = []

    def below(self, bound: int) -> int:
        if not self._words:
            self._words = self._bits.random_raw(_WORDS_PER_BLOCK).tolist()[::-1]
        return self._words.pop() % bound
