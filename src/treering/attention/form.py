"""How a layer's attention transforms scores: scale, sliding window, softcap.

A window counts positions on a token's own path, never packed indices.
"""

import math
from dataclasses import dataclass

from treering.errors import ConfigError
from treering.types import is_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How scores become weights: softmax over visible keys of `softcap * tanh(scale * q k / softcap)`.

    Attributes:
        scale: factor on the scores, usually D ** -0.5.
        window: a query sees the keys less than this many positions before it, itself included; None sees all its path.
        softcap: bound on the scores (Gemma 2), None for none.

    Example: with a window of 2 the last token of the path 5, 6, 7 sees 6 and 7.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.window is not None and not is_count(self.window, least=1):
            raise ConfigError(f"a sliding window is an integer of at least 1, or None, got {self.window!r}")
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            raise ConfigError(f"a softcap is a positive number, or None, got {self.softcap!r}")
