"""The decoder protocol: one forward pass over tokens of many rollouts, each with its own view of the key-value arena.

A token attends to a prefix span (a prompt that rollouts share) and to its rollout's own span up to itself; a token of a
draft tree attends to its ancestors there by a bit mask. Decode steps, draft tokens and prefill chunks are handled
alike: tokens with a position, a slot to write and slots to read.

    T tokens of a pass   W tokens whose logits are wanted   S slots   V vocabulary   K slots that move
"""

from abc import ABC, abstractmethod

from torch import Tensor

from treering.arrays import Int64Array
from treering.engine.batch.token_batch import TokenBatch


class Decoder(ABC):
    """Weights, a key-value arena of S slots, and a spare slot."""

    @property
    @abstractmethod
    def spare_slot(self) -> int:
        """A slot outside the arena; values written there are never used."""

    @abstractmethod
    def run(self, batch: TokenBatch) -> Tensor:
        """Writes keys and values of all tokens and returns logits [W, V] in the model's dtype.

        The result is valid until the next run.
        """

    @abstractmethod
    def move(self, sources: Int64Array, targets: Int64Array) -> None:
        """Copies the keys and values of slots `sources` to slots `targets`, both int64 [K], in every layer, in order.

        Targets are unique. A slot may be both source and target, if it is a source first.

        Example: if slots 3, 4, 5 hold c, d, e, moving [4, 5] to [3, 4] leaves d, e, e.
        """
