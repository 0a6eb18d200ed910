"""The weights of a version as messages, from a trainer that shares no memory with the controller.

In parts, because a connection takes four times as long for one large message, and other processes' messages come
between them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

PART_BYTES = 4 << 20
"""Of a part, at most."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PublishedWeights:
    """One part of the weights of a version."""

    version: int
    num_bytes: int
    """Of all parts."""
    offset: int
    """Where this part begins."""
    part: bytes


def parts_of(version: int, weights: bytes | bytearray) -> Iterator[PublishedWeights]:
    """The messages of weights that `WeightLayout.pack` has laid out; at least one."""
    view = memoryview(weights)
    for offset in range(0, max(len(weights), 1), PART_BYTES):
        part = bytes(view[offset : offset + PART_BYTES])
        yield PublishedWeights(version=version, num_bytes=len(weights), offset=offset, part=part)


class IncomingWeights:
    """Puts the parts of one version after another together.

    Example: of two parts the first returns None and the second the weights; the first of a new trainer starts again.
    """

    def __init__(self) -> None:
        self._weights = bytearray()

    def take(self, message: PublishedWeights) -> bytearray | None:
        """Adds the next part; returns all of them after the last one."""
        if message.offset == 0:
            self._weights = bytearray()
        assert message.offset == len(self._weights), "parts come in order"
        self._weights += message.part
        if len(self._weights) < message.num_bytes:
            return None
        weights, self._weights = self._weights, bytearray()
        return weights
