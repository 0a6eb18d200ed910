"""Packed indices of a forest's images, and the positions that its tokens are rotated by.

N tokens   P distinct images
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treering.arrays import Int64Array
from treering.data.image import ImageData
from treering.tree.forest import Forest


class ImageTokens(NamedTuple):
    """Placeholder tokens of a forest in packed order.

    Example: see `image_tokens`.
    """

    at: Int64Array
    """Packed index."""
    number: Int64Array
    """Index of the token's image in `forest.images`."""
    offset: Int64Array
    """Index of the token within its image."""


def image_tokens(forest: Forest) -> ImageTokens:
    """Find the placeholder tokens of a forest, or of a fragment that does not begin inside an image.

    Example:
        >>> from treering.data.image import ImageData, PlacedImage
        >>> image = PlacedImage(start=0, image=ImageData(values=np.ones((1, 3), np.float32), num_tokens=2))
        >>> forest = Forest.from_sequences([[9, 9, 5], [9, 9, 6]], images=[[image], [image]])
        >>> forest.tokens.tolist(), [array.tolist() for array in image_tokens(forest)]
        ([-1, -1, 5, 6], [[0, 1], [0, 0], [0, 1]])
    """
    at = np.flatnonzero(forest.tokens < 0)
    number = -1 - forest.tokens[at].astype(np.int64)
    if at.size == 0:
        return ImageTokens(at, number, number)
    above = forest.parent[at]
    is_first = (above != at - 1) | (above < 0) | (forest.tokens[above] != forest.tokens[at])
    # An image that repeats in a row begins again after its number of tokens.
    sizes = np.array([image.num_tokens for image in forest.images], np.int64)
    offset = (at - np.maximum.accumulate(np.where(is_first, at, 0))) % sizes[number]
    return ImageTokens(at, number, offset)


def image_spans(forest: Forest) -> list[tuple[int, int]]:
    """Return the packed range of every image's tokens, ascending; an image may occur more than once.

    Example: an image of 2 tokens between the tokens 5 and 6 of a chain has the range (1, 3).
    """
    if not forest.images:
        return []
    where = image_tokens(forest)
    is_first = where.offset == 0
    sizes = [forest.images[number].num_tokens for number in where.number[is_first]]
    return [(start, start + size) for start, size in zip(where.at[is_first].tolist(), sizes, strict=True)]


def rotary_positions(forest: Forest) -> NDArray[np.int32] | Int64Array:
    """Return the positions that a model rotates by: those that each branch has when it is computed alone.

    Images with grids have three positions per token (time, height, width), int64 [3, N]. An image's tokens count rows
    and columns from where the image starts, and the next token continues after the longer side. Without grids: depths
    [N].

    Args:
        forest: whole trees, because a position depends on all images above.

    Example: a token, an image of 2 x 3 tokens and a token have the heights 0, 1 1 1 2 2 2, 4 and the widths 0, 1 2 3 1
    2 3, 4.
    """
    if all(image.grid is None for image in forest.images):
        return forest.position
    where = image_tokens(forest)
    sizes, spans, widths = np.array(
        [(one.num_tokens, one.num_positions, _width(one)) for one in forest.images], np.int64
    ).T
    saved = np.zeros(forest.num_tokens, np.int64)
    is_last = where.offset == sizes[where.number] - 1
    saved[where.at[is_last]] = (sizes - spans)[where.number[is_last]]
    text = forest.position - (_sum_along_paths(forest, saved) - saved)
    positions = np.tile(text, (3, 1))
    row, column = np.divmod(where.offset, widths[where.number])
    positions[:, where.at] = text[where.at - where.offset] + np.stack([np.zeros_like(row), row, column])
    return positions


def _width(image: ImageData) -> int:
    return image.num_tokens if image.grid is None else image.grid[2] // image.merge


def _sum_along_paths(forest: Forest, values: Int64Array) -> Int64Array:
    """Return the sum of the values from the root to each token, the token included."""
    sums = np.cumsum(values)
    starts = forest.segment_start.tolist()
    for start, stop in zip(starts, [*starts[1:], forest.num_tokens], strict=True):
        above = int(forest.parent[start])
        # Replace the sum over earlier tokens in packed order by the sum over the tokens above in the tree.
        before = int(sums[start] - values[start])
        sums[start:stop] += (int(sums[above]) if above >= 0 else 0) - before
    return sums
