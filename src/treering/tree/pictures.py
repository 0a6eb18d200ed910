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


def picture_spans(forest: "Forest") -> list[tuple[int, int]]:
    """The packed range of every picture's tokens, ascending; the same picture may stand at several.

    Example: a picture of 2 tokens between the tokens 5 and 6 of a chain has the range (1, 3).
    """
    if not forest.pictures:
        return []
    where = picture_tokens(forest)
    is_first = where.offset == 0
    sizes = [forest.pictures[number].num_tokens for number in where.number[is_first]]
    return [(start, start + size) for start, size in zip(where.at[is_first].tolist(), sizes, strict=True)]


def rotary_positions(forest: "Forest") -> NDArray[np.int32] | Int64Array:
    """The positions that a model rotates by: those that each branch has alone.

    Pictures with grids have three of them (time, height, width), int64 [3, N]: a picture's tokens count rows and
    columns from where it starts, and the token after it goes on after the longer side. Without grids: depths [N].

    Args:
        forest: whole trees, because a position depends on all pictures above.

    Example: a token, a picture of 2 x 3 tokens and a token have the heights 0, 1 1 1 2 2 2, 4 and the widths 0, 1 2 3
    1 2 3, 4.
    """
    if all(picture.grid is None for picture in forest.pictures):
        return forest.position
    where = picture_tokens(forest)
    sizes, spans, widths = np.array(
        [(one.num_tokens, one.num_positions, _width(one)) for one in forest.pictures], np.int64
    ).T
    saved = np.zeros(forest.num_tokens, np.int64)
    is_last = where.offset == sizes[where.number] - 1
    saved[where.at[is_last]] = (sizes - spans)[where.number[is_last]]
    text = forest.position - (_sum_along_paths(forest, saved) - saved)
    positions = np.tile(text, (3, 1))
    row, column = np.divmod(where.offset, widths[where.number])
    positions[:, where.at] = text[where.at - where.offset] + np.stack([np.zeros_like(row), row, column])
    return positions


def _width(picture: Picture) -> int:
    """Tokens in a row of a picture."""
    return picture.num_tokens if picture.grid is None else picture.grid[2] // picture.merge


def _sum_along_paths(forest: "Forest", values: Int64Array) -> Int64Array:
    """The sum of the values from the root to each token, itself included."""
    sums = np.cumsum(values)
    starts = forest.segment_start.tolist()
    for start, stop in zip(starts, [*starts[1:], forest.num_tokens], strict=True):
        above = int(forest.parent[start])
        # What the packed order has summed before the segment is replaced by what its path has.
        before = int(sums[start] - values[start])
        sums[start:stop] += (int(sums[above]) if above >= 0 else 0) - before
    return sums


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
            np.where(own < 0, -1 - numbers[np.clip(-1 - own, 0, numbers.size - 1)], own) if numbers.size else own
        )
    return np.concatenate(tokens).astype(np.int32, copy=False), table.pictures
