"""A picture as a vision-language model's processor gives it, and where its placeholder tokens stand in a sequence."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treering.errors import InputError

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Picture:
    """One picture, ready for a vision tower.

    Raises:
        InputError: values that are not float32 or have no entry, a grid that does not fit them or the number of tokens,
            or several frames, which are a video.

    Example:
        >>> patches = np.zeros((16, 12), np.float32)
        >>> picture = Picture(values=patches, grid=(1, 4, 4), num_tokens=4)
        >>> picture.merge, picture.num_positions, len(picture.digest)
        (2, 2, 16)
    """

    values: NDArray[np.float32]
    """What the model's processor gives as `pixel_values` for this picture alone: of Qwen-VL [patches, patch values], of
    Gemma 3 [crops, 3, height, width]."""
    grid: tuple[int, int, int] | None = None
    """Time, height and width in patches (`image_grid_thw`); None for a model without grids."""
    num_tokens: int
    """Placeholder tokens in the text."""
    digest: bytes = field(init=False)
    """Computed: 16 bytes of values, dtype, shape, grid and number of tokens. Equal digests are equal pictures."""

    def __post_init__(self) -> None:
        _check(self)
        values = np.ascontiguousarray(self.values)
        values.flags.writeable = False
        object.__setattr__(self, "values", values)
        header = f"{values.dtype.str} {values.shape} {self.grid} {self.num_tokens}"
        digest = blake2b(header.encode(), digest_size=DIGEST_BYTES)
        digest.update(values.data)
        object.__setattr__(self, "digest", digest.digest())

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        # Rebuilt by the constructor, so that copies are read-only too.
        return partial(Picture, values=self.values, grid=self.grid, num_tokens=self.num_tokens), ()

    @property
    def merge(self) -> int:
        """Patches along each side of a token's square; 1 without a grid."""
        return 1 if self.grid is None else isqrt(self.grid[1] * self.grid[2] // self.num_tokens)

    @property
    def num_positions(self) -> int:
        """How much further than its first token the token after it is, where height and width have own positions."""
        return self.num_tokens if self.grid is None else max(self.grid[1:]) // self.merge


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedPicture:
    """A picture of a sequence.

    Example: `PlacedPicture(start=3, picture=picture)` with 4 tokens stands at the tokens 3 to 6.
    """

    start: int
    """Index of its first placeholder in the sequence's tokens."""
    picture: Picture

    @property
    def stop(self) -> int:
        """One past its last placeholder."""
        return self.start + self.picture.num_tokens


def check_places(placed: Sequence[PlacedPicture], tokens: NDArray[np.integer[Any]]) -> None:
    """Checks that pictures stand one after another inside a sequence, each at equal tokens.

    Raises:
        InputError: names the picture.

    Example: a picture of 4 tokens that starts at 3 is refused in a sequence of 6 tokens.
    """
    stop = 0
    for number, one in enumerate(placed):
        where = f"picture {number} stands at tokens {one.start} to {one.stop - 1}"
        if not 0 <= one.start < one.stop <= tokens.size:
            raise InputError(f"{where} of a sequence of {tokens.size}: it must lie inside; was the sequence cut?")
        if one.start < stop:
            raise InputError(f"{where}, before the end of the one before it at {stop}: order them, without overlap")
        stop = one.stop
        run = tokens[one.start : stop]
        if (run != run[0]).any():
            raise InputError(
                f"{where}, which are not one placeholder {one.picture.num_tokens} times: {run[:8].tolist()} ...; is "
                "num_tokens of another size of the picture?"
            )


def _check(picture: Picture) -> None:
    values, grid, num_tokens = picture.values, picture.grid, picture.num_tokens
    if not isinstance(values, np.ndarray) or values.dtype != np.float32 or values.ndim < 2 or values.size == 0:
        found = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
        raise InputError(f"values of a picture are float32 as the processor gives them, with entries, got {found}")
    if num_tokens < 1:
        raise InputError(f"a picture has at least one placeholder token, got num_tokens={num_tokens}")
    if grid is None:
        return
    time, height, width = grid
    if time != 1:
        raise InputError(f"a picture has one frame, got grid {grid}: video is not supported, take frames as pictures")
    if height * width != len(values):
        raise InputError(f"grid {grid} has {height * width} patches, and the picture has {len(values)}")
    merge = picture.merge
    if merge < 1 or merge * merge * num_tokens != height * width or height % merge or width % merge:
        raise InputError(f"num_tokens={num_tokens} does not fit grid {grid}: each token is a square of its patches")
