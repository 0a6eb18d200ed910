"""One forward pass of a decoder over loose tokens of many rollouts, each with its own view of the key-value arena.

A token sees a prefix span (a prompt that rollouts share) and a part of its rollout's own span, up to itself; a token of
a drafted tree sees its ancestors there one by one. Decode steps, drafted tokens and prefill chunks are all the same
thing here: tokens with a position, a slot to write and slots to read. Knows arithmetic; knows nothing of requests,
sampling or schedules.

    T tokens of a pass   W tokens whose logits are wanted   S slots   V vocabulary   K slots that move
"""

from abc import ABC, abstractmethod

from torch import Tensor

from treering.arrays import Int64Array
from treering.engine.batch.token_batch import TokenBatch


class Decoder(ABC):
    """Weights, an arena of S slots, and one more that belongs to nobody."""

    @property
    @abstractmethod
    def spare_slot(self) -> int:
        """A slot outside of the arena: what a pass writes there is of no account."""

    @abstractmethod
    def run(self, batch: TokenBatch) -> Tensor:
        """Writes keys and values of all tokens and returns logits [W, V] in the model's dtype.

        The result is valid until the next run.
        """

    @abstractmethod
    def move(self, sources: Int64Array, targets: Int64Array) -> None:
        """Copies the keys and values of slots `sources` to slots `targets`, both int64 [K], in every layer, in order.

        No slot is a target twice, nor before it is a source, so that a slot may be both.

        Example: where slots 3, 4, 5 hold c, d, e, moving [4, 5] to [3, 4] leaves d, e, e.
        """
