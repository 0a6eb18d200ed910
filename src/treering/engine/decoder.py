"""One forward pass of a decoder over loose tokens of many rollouts, each with its own view of the key-value arena.

A token sees a prefix span (a prompt that rollouts share) and a part of its rollout's own span, up to itself. Decode
steps, drafted tokens and prefill chunks are all the same thing here: tokens with a position, a slot to write and two
spans to read. Knows arithmetic; knows nothing of requests, sampling or schedules.

    T tokens of a pass   W tokens whose logits are wanted   S slots   V vocabulary
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenBatch:
    """The tokens of one pass; int64 [T] each but `wanted`.

    Every layer writes the keys and values of all tokens before any token reads.

    Example: a rollout's 3rd token behind a prompt of 5, its prompt at slots 0-4 and its own span from slot 40: position
    7, slot 42, prefix_start 0, num_prefix 5, own_start 40, num_own 3.
    """

    tokens: Int64Array
    """Token ids."""
    positions: Int64Array
    """Absolute positions, for RoPE."""
    slots: Int64Array
    """Where the token's key and value go."""
    prefix_start: Int64Array
    """First slot of the shared prefix that it sees."""
    num_prefix: Int64Array
    """Slots of the prefix, all of them visible; 0 is none."""
    own_start: Int64Array
    """First slot of its own span."""
    num_own: Int64Array
    """Visible slots of its own span, its own one included: slots = own_start + num_own - 1."""
    wanted: Int64Array
    """[W] indices of the tokens whose logits are wanted, ascending."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.tokens.size)


class Decoder(ABC):
    """Weights and an arena of S slots."""

    @abstractmethod
    def run(self, batch: TokenBatch) -> Tensor:
        """Writes keys and values of all tokens and returns logits [W, V] in the model's dtype.

        The result is valid until the next run.
        """
