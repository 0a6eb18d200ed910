"""Images: their source, their decoding, and the pixel values of a vision-language model's processor."""

import base64
import binascii
import os
import stat
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from io import BytesIO
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from treering.errors import InputError
from treering.extras import require

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage


DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageData:
    """An image that is ready for a vision tower.

    Raises:
        InputError: values are empty or not float32, the grid does not fit the values or the number of tokens, or there
            are several frames, which are a video.

    Example:
        >>> patches = np.zeros((16, 12), np.float32)
        >>> image = ImageData(values=patches, grid=(1, 4, 4), num_tokens=4)
        >>> image.merge, image.num_positions, len(image.digest)
        (2, 2, 16)
    """

    values: NDArray[np.float32]
    """`pixel_values` of the model's processor for this image: [patches, patch values] for Qwen-VL,
    [crops, 3, height, width] for Gemma 3."""
    grid: tuple[int, int, int] | None = None
    """Time, height and width in patches (`image_grid_thw`); None for a model without grids."""
    num_tokens: int
    """Number of placeholder tokens in the text."""
    digest: bytes = field(init=False)
    """Hash of values, dtype, shape, grid and number of tokens, 16 bytes. Equal digests are equal images."""

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
        # The constructor makes copies read-only too.
        return partial(ImageData, values=self.values, grid=self.grid, num_tokens=self.num_tokens), ()

    @property
    def merge(self) -> int:
        """Patches along each side of the square that becomes one token; 1 without a grid."""
        return 1 if self.grid is None else isqrt(self.grid[1] * self.grid[2] // self.num_tokens)

    @property
    def num_positions(self) -> int:
        """Distance in positions from the first token to the next text, if height and width have their own positions."""
        return self.num_tokens if self.grid is None else max(self.grid[1:]) // self.merge


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedImage:
    """An image in a sequence."""

    start: int
    """Index of the first placeholder in the tokens of the sequence."""
    image: ImageData

    @property
    def stop(self) -> int:
        """Index after the last placeholder."""
        return self.start + self.image.num_tokens


def check_image_positions(placed: Sequence[PlacedImage], tokens: NDArray[np.integer[Any]]) -> None:
    """Check that images are in order inside a sequence, without overlap, each at equal tokens.

    Raises:
        InputError: an image is misplaced; the message names it.

    Example: an image of 4 tokens that starts at 3 is refused in a sequence of 6 tokens.
    """
    stop = 0
    for number, one in enumerate(placed):
        where = f"image {number} stands at tokens {one.start} to {one.stop - 1}"
        if not 0 <= one.start < one.stop <= tokens.size:
            raise InputError(f"{where} of a sequence of {tokens.size}: it must lie inside; was the sequence cut?")
        if one.start < stop:
            raise InputError(f"{where}, before the end of the one before it at {stop}: order them, without overlap")
        stop = one.stop
        run = tokens[one.start : stop]
        if (run != run[0]).any():
            raise InputError(
                f"{where}, which are not one placeholder {one.image.num_tokens} times: {run[:8].tolist()} ...; is "
                "num_tokens of another size of the image?"
            )


def _check(image: ImageData) -> None:
    values, grid, num_tokens = image.values, image.grid, image.num_tokens
    if not isinstance(values, np.ndarray) or values.dtype != np.float32 or values.ndim < 2 or values.size == 0:
        found = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
        raise InputError(f"values of an image are float32 as the processor gives them, with entries, got {found}")
    if num_tokens < 1:
        raise InputError(f"an image has at least one placeholder token, got num_tokens={num_tokens}")
    if grid is None:
        return
    time, height, width = grid
    if time != 1:
        raise InputError(f"an image has one frame, got grid {grid}: video is not supported, take frames as images")
    if height * width != len(values):
        raise InputError(
            f"grid {grid} has {height * width} patches, and the image {len(values)}; pass on what the processor returns"
        )
    merge = image.merge
    if merge < 1 or merge * merge * num_tokens != height * width or height % merge or width % merge:
        raise InputError(f"num_tokens={num_tokens} does not fit grid {grid}: each token is a square of its patches")


MAX_BYTES = 1 << 26
"""Most bytes of an encoded image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSource:
    """An encoded image: its bytes, or a file that is read on demand."""

    content: bytes | memoryview | None = None
    """Bytes of a PNG, JPEG or other image file; None with `file`."""
    folder: Path | None = None
    """Folder of the data file, which must contain `file`."""
    file: str | None = None
    """Path of the image as the record has it; None with `content`."""
    where: str = field(default="", compare=False)
    """Place of the record, such as FILE:LINE, for errors."""

    def read(self) -> bytes:
        """Return the encoded bytes.

        Raises:
            InputError: there are no bytes or more than `MAX_BYTES`, or the file is missing, not regular or outside the
                folder.
        """
        content = self._read_file() if self.content is None else bytes(self.content)
        if not content:
            raise self.refusal("an image is empty; remove its record or repair it")
        if len(content) > MAX_BYTES:
            raise self.refusal(f"an image has at most {MAX_BYTES:,} bytes, got {len(content):,}; make it smaller")
        return content

    def refusal(self, rule: str) -> InputError:
        """Return an error that begins with the location of the image."""
        name = "" if self.file is None else f"{self.file}: "
        return InputError(f"{self.where}: {name}{rule}" if self.where else f"{name}{rule}")

    def _read_file(self) -> bytes:
        path = self._path()
        try:
            # Opening a pipe would wait for its writer.
            found = os.stat(path)
            if not stat.S_ISREG(found.st_mode):
                raise self.refusal("an image is a regular file, and this is a folder, pipe or device; correct it")
            with open(path, "rb") as stream:
                return stream.read(MAX_BYTES + 1)
        except OSError as error:
            raise self.refusal(f"an image cannot be read ({error.strerror or error}); check the path") from error

    def _path(self) -> Path:
        # Links are resolved, so that an untrusted data file cannot read files outside its folder.
        assert self.folder is not None, "a file has a folder"
        assert self.file is not None, "an image has bytes or a file"
        if "\0" in self.file:
            raise self.refusal("a path has no null character; correct it")
        folder = self.folder.resolve()
        try:
            path = (folder / self.file).resolve()
        except (OSError, RuntimeError) as error:
            raise self.refusal(f"an image cannot be read ({error}); check the path") from error
        if not path.is_relative_to(folder):
            raise self.refusal(
                f"images lie inside of the folder of the data file, {self.folder}, also once links are followed, and "
                "this one does not; copy it there"
            )
        return path


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageImage:
    """An image in a message.

    Example: in the parts "Here:", an image and "What is it?", the image is at 5 of the text "Here:What is it?".
    """

    at: int
    """Number of characters of the message's text before the image."""
    source: ImageSource
    """Source of the image's bytes."""


def named_source(name: str, folder: Path, where: str) -> ImageSource:
    """Return the image of a data URI, or of a local path relative to the folder of the data file.

    Raises:
        InputError: the name is empty, a network address, or a URI that is not base64.

    Example: `named_source("a.png", Path("set"), "set/a.jsonl:1").read()` reads set/a.png.
    """
    scheme = name.partition(":")[0].lower()
    if scheme == "data":
        head, comma, body = name.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise InputError(
                f"{where}: an image as a data URI is data:image/png;base64,..., got {name[:40]!r}; write its bytes in "
                "base64"
            )
        if not head[len("data:") :].lower().startswith(("image", ";")):
            raise InputError(f"{where}: an image's data URI begins with data:image, got {head[:40]!r}; correct it")
        return base64_source(body, where)
    if scheme == "file":
        parts = urlsplit(name)
        if parts.netloc not in ("", "localhost"):
            raise InputError(f"{where}: a file of this machine is read, got {name!r:.80}; name a local file")
        return ImageSource(folder=folder, file=unquote(parts.path), where=where)
    if "://" in name[:32]:
        raise InputError(
            f"{where}: images of the network are not fetched, got {name!r:.80}; download it next to the data file, "
            "and give its path"
        )
    if not name.strip():
        raise InputError(f"{where}: an image has a path, a data URI or bytes, got {name!r}; add it")
    return ImageSource(folder=folder, file=name, where=where)


def base64_source(text: str, where: str) -> ImageSource:
    """Return the image of a base64 text."""
    if len(text) > MAX_BYTES * 3 // 2:
        raise InputError(f"{where}: an image has at most {MAX_BYTES:,} bytes, and this text has more; make it smaller")
    try:
        content = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"{where}: an image in a text is base64, and this one is not ({error}); repair it") from error
    return ImageSource(content=content, where=where)


OpenImage = Callable[["StoredImage"], NDArray[np.float32]]
"""Computes the pixel values of a stored image."""


class StoredImage(ImageData):
    """`ImageData` whose values are decoded on access."""

    __slots__ = ("_open", "size", "source")

    def __init__(
        self,
        *,
        source: ImageSource,
        open_image: OpenImage,
        size: tuple[int, int],
        grid: tuple[int, int, int] | None,
        num_tokens: int,
        digest: bytes,
    ) -> None:
        """Describe an image that was decoded before; `open_image` computes the values from the encoded `source`.

        `size` is width and height of the file in pixels, upright. The others are as in `ImageData`.
        """
        facts = {"source": source, "_open": open_image, "size": size}
        for name, value in {**facts, "grid": grid, "num_tokens": num_tokens, "digest": digest}.items():
            object.__setattr__(self, name, value)

    source: ImageSource
    size: tuple[int, int]
    _open: OpenImage

    @property
    def values(self) -> NDArray[np.float32]:
        """Decoded and processed values, perhaps from a cache; see `ImageData.values`."""
        return self._open(self)

    def __repr__(self) -> str:
        # The values would be decoded for it.
        return f"StoredImage(size={self.size}, num_tokens={self.num_tokens}, digest={self.digest.hex()!r})"

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        # A view of mapped bytes cannot be pickled.
        content = self.source.content
        make = partial(
            StoredImage,
            source=self.source if content is None else replace(self.source, content=bytes(content)),
            open_image=self._open,
            size=self.size,
            grid=self.grid,
            num_tokens=self.num_tokens,
            digest=self.digest,
        )
        return make, ()


FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are opened; some others start programs or fetch further files."""
_WIDE = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
"""Modes with more than 8 bits, which Pillow clips at 255."""
MAX_SIDE = 160
"""Largest side of a thumbnail in pixels."""


def decoded(source: ImageSource) -> "PilImage":
    """Decode an image, upright, in the mode of its file, as datasets and transformers pass it to a processor.

    Raises:
        InputError: bytes are damaged or of another format, or the image has several frames, more than 8 bits of grey,
            or more pixels than `PIL.Image.MAX_IMAGE_PIXELS`; the message begins with the location of the record.
        MissingExtraError: Pillow is missing.

    Example: a JPEG of 640x480 whose EXIF orientation is a quarter turn is decoded to 480x640.
    """
    require("an image", "PIL")
    from PIL import Image as PilImage
    from PIL import ImageOps, UnidentifiedImageError

    content = source.read()
    try:
        with warnings.catch_warnings():
            # Pillow raises only at twice its limit; below, it warns.
            warnings.simplefilter("error", PilImage.DecompressionBombWarning)
            image = PilImage.open(BytesIO(content), formats=FORMATS)
            _check_image(image, source)
            image.load()
            return ImageOps.exif_transpose(image)
    except (PilImage.DecompressionBombError, PilImage.DecompressionBombWarning) as error:
        raise source.refusal(f"an image is within Pillow's limit ({error}); make it smaller") from error
    except UnidentifiedImageError as error:
        raise source.refusal(
            f"an image is one of {', '.join(FORMATS)}, and these {len(content):,} bytes are not; convert it"
        ) from error
    except (OSError, SyntaxError, ValueError, EOFError, MemoryError) as error:
        # Pillow raises these for broken files.
        raise source.refusal(f"an image cannot be decoded ({error}); fetch it again") from error


def _check_image(image: "PilImage", source: ImageSource) -> None:
    # Further frames of a JPEG are previews.
    if getattr(image, "is_animated", False) and image.format != "MPO":
        raise source.refusal("an image has one frame, and this one is animated or has pages; give the frame to train")
    if image.mode in _WIDE:
        raise source.refusal(
            f"an image has 8 bits a channel, and this one is of mode {image.mode}, which would be cut at 255; scale "
            "it to 8 bits"
        )


def thumbnail_uri(source: ImageSource) -> str:
    """Return a data URI of the image as a JPEG of a few kilobytes, at most `MAX_SIDE` pixels wide and high."""
    small = decoded(source).convert("RGB")
    small.thumbnail((MAX_SIDE, MAX_SIDE))
    stream = BytesIO()
    small.save(stream, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"
