"""Pictures in a forest: each placeholder is a negative token that names its picture, so prefixes merge by pixels.

Token -(1 + n) is a placeholder of `forest.pictures[n]`. Nothing that does not know pictures can embed one by mistake,
and since all tokens of a picture are equal, no branch begins inside one.

    N tokens   P distinct pictures
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treering.arrays import Int32Array, Int64Array
from treering.data.picture import Picture, PlacedPicture, check_places

if TYPE_CHECKING:
    from treering.tree.forest import Forest


class PictureTable:
    """Distinct pictures in the order of their first appearance.

    Example:
        >>> black, white = (Picture(values=np.full((1, 3), x, np.float32), num_tokens=2) for x in (0.0, 1.0))
        >>> table = PictureTable()
        >>> table.tokens([9, 9, 5], [PlacedPicture(start=0, picture=white)]).tolist()
        [-1, -1, 5]
        >>> two = [PlacedPicture(start=0, picture=black), PlacedPicture(start=2, picture=white)]
        >>> table.tokens([9, 9, 9, 9], two).tolist()
        [-2, -2, -1, -1]
    """

    def __init__(self) -> None:
        """Without a picture."""
        self._number: dict[bytes, int] = {}
        self._pictures: list[Picture] = []

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """All that were seen."""
        return tuple(self._pictures)

    def add(self, picture: Picture) -> int:
        """Number of a picture, a new one if none has its digest."""
        number = self._number.setdefault(picture.digest, len(self._pictures))
        if number == len(self._pictures):
            self._pictures.append(picture)
        return number

    def tokens(self, tokens: Sequence[int] | NDArray[np.int32], placed: Sequence[PlacedPicture]) -> Int32Array:
        """A sequence with the tokens of its pictures, int32.

        Raises:
            InputError: see `check_places`.
        """
        ids = np.array(tokens, np.int32)
        check_places(placed, ids)
        for one in placed:
            ids[one.start : one.stop] = -1 - self.add(one.picture)
        return ids


class PictureTokens(NamedTuple):
    """The placeholder tokens of a forest in packed order.

    Example: see `picture_tokens`.
    """

    at: Int64Array
    """Packed index."""
    number: Int64Array
    """Index of the token's picture in `forest.pictures`."""
    offset: Int64Array
    """Number of the token within its picture."""


def picture_tokens(forest: "Forest") -> PictureTokens:
    """Where the pictures of a forest or of a fragment stand, which begins with whole pictures.

    Example:
        >>> from treering.tree.forest import Forest
        >>> picture = PlacedPicture(start=0, picture=Picture(values=np.ones((1, 3), np.float32), num_tokens=2))
        >>> forest = Forest.from_sequences([[9, 9, 5], [9, 9, 6]], pictures=[[picture], [picture]])
        >>> forest.tokens.tolist(), [array.tolist() for array in picture_tokens(forest)]
        ([-1, -1, 5, 6], [[0, 1], [0, 0], [0, 1]])
    """
    at = np.flatnonzero(forest.tokens < 0)
    number = -1 - forest.tokens[at].astype(np.int64)
    if at.size == 0:
        return PictureTokens(at, number, number)
    above = forest.parent[at]
    is_first = (above != at - 1) | (above < 0) | (forest.tokens[above] != forest.tokens[at])
    # Of one picture several times in a row, each takes its number of tokens.
    sizes = np.array([picture.num_tokens for picture in forest.pictures], np.int64)
    offset = (at - np.maximum.accumulate(np.where(is_first, at, 0))) % sizes[number]
    return PictureTokens(at, number, offset)


def join_pictures(forests: Sequence["Forest"]) -> tuple[Int32Array, tuple[Picture, ...]]:
    """The tokens of several forests one after another, and one table of their pictures.

    Example: of two forests with the same picture both are -1 there.
    """
    table = PictureTable()
    tokens = [np.empty(0, np.int32)]
    for forest in forests:
        numbers = np.array([table.add(picture) for picture in forest.pictures], np.int32)
        own = forest.tokens
        # A forest of text has no number to look up.
        tokens.append(
            np.where(own < 0, -1 - numbers[np.minimum(-1 - own, numbers.size - 1)], own) if numbers.size else own
        )
    return np.concatenate(tokens).astype(np.int32, copy=False), table.pictures
