"""Decodes a picture with Pillow, within its limits, or refuses it: what the processor sees is what was meant."""

import base64
import warnings
from io import BytesIO
from typing import TYPE_CHECKING

from treering.data.pictures.source import PictureSource
from treering.extras import require

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Others are not opened: some start programs or fetch further files."""
_WIDE = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
"""Modes of more than 8 bits, of which Pillow keeps what lies below 256 and makes the rest white."""
MAX_SIDE = 160
"""Pixels of a small copy."""


def decoded(source: PictureSource) -> "Image":
    """The picture upright, in the mode of its file, as datasets and transformers hand it to a processor.

    Raises:
        InputError: broken or cut bytes, another format, several frames, more than 8 bits of grey, or more pixels than
            `PIL.Image.MAX_IMAGE_PIXELS`; begins with the place of the record.
        MissingExtraError: Pillow is missing.

    Example: a JPEG of 640x480 whose EXIF says that it lies on its side is 480x640.
    """
    require("a picture", "PIL")
    from PIL import Image, ImageOps, UnidentifiedImageError

    content = source.read()
    try:
        with warnings.catch_warnings():
            # Its limit, not twice of it.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(BytesIO(content), formats=FORMATS)
            _check(image, source)
            image.load()
            return ImageOps.exif_transpose(image)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise source.refusal(f"a picture is within Pillow's limit ({error}); make it smaller") from error
    except UnidentifiedImageError as error:
        raise source.refusal(
            f"a picture is one of {', '.join(FORMATS)}, and these {len(content):,} bytes are not; convert it"
        ) from error
    except (OSError, SyntaxError, ValueError, EOFError, MemoryError) as error:
        # Pillow raises these for broken files.
        raise source.refusal(f"a picture cannot be decoded ({error}); fetch it again") from error


def _check(image: "Image", source: PictureSource) -> None:
    # The further frames of a JPEG are previews.
    if getattr(image, "is_animated", False) and image.format != "MPO":
        raise source.refusal("a picture has one frame, and this one is animated or has pages; give the frame to train")
    if image.mode in _WIDE:
        raise source.refusal(
            f"a picture has 8 bits a channel, and this one is of mode {image.mode}, which would be cut at 255; scale "
            "it to 8 bits"
        )


def thumbnail_uri(source: PictureSource) -> str:
    """A data URI of the picture, at most `MAX_SIDE` pixels wide and high, a JPEG of some kilobytes.

    Raises:
        InputError: as `decoded`.

    Example: `<img src="{thumbnail_uri(source)}">` loads nothing.
    """
    small = decoded(source).convert("RGB")
    small.thumbnail((MAX_SIDE, MAX_SIDE))
    stream = BytesIO()
    small.save(stream, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"
