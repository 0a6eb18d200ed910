"""A picture whose values are made when they are asked for, so that a set of pictures is never held decoded."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treering.data.picture import Picture
from treering.data.pictures.source import PictureSource

OpenPicture = Callable[["StoredPicture"], NDArray[np.float32]]
"""Makes the values of a picture again."""


class StoredPicture(Picture):
    """As `Picture`, of encoded bytes.

    Example: ten thousand of them cost the memory of their facts; those that a step trains are decoded by it.
    """

    __slots__ = ("_open", "size", "source")

    def __init__(
        self,
        *,
        source: PictureSource,
        open_picture: OpenPicture,
        size: tuple[int, int],
        grid: tuple[int, int, int] | None,
        num_tokens: int,
        digest: bytes,
    ) -> None:
        """Takes what is known of a picture that was decoded once.

        Args:
            source: its encoded bytes.
            open_picture: makes its values.
            size: width and height of the file in pixels, upright.
            grid: see `Picture`.
            num_tokens: see `Picture`.
            digest: of the values that it had.
        """
        facts = {"source": source, "_open": open_picture, "size": size}
        for name, value in {**facts, "grid": grid, "num_tokens": num_tokens, "digest": digest}.items():
            object.__setattr__(self, name, value)

    source: PictureSource
    size: tuple[int, int]
    _open: OpenPicture

    @property
    def values(self) -> NDArray[np.float32]:
        """Decoded and processed, or held from a moment ago; see `Picture.values`.

        Raises:
            InputError: the file is gone, or holds another picture than before.
        """
        return self._open(self)

    def __repr__(self) -> str:
        # Without its values, which would be decoded for it.
        return f"StoredPicture(size={self.size}, num_tokens={self.num_tokens}, digest={self.digest.hex()!r})"

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        # A view of mapped bytes cannot be sent.
        content = self.source.content
        make = partial(
            StoredPicture,
            source=self.source if content is None else replace(self.source, content=bytes(content)),
            open_picture=self._open,
            size=self.size,
            grid=self.grid,
            num_tokens=self.num_tokens,
            digest=self.digest,
        )
        return make, ()
