"""The processor sees odd files as a viewer shows them, or they are refused with the location of their record."""

import warnings

import numpy as np
import pytest
from PIL import Image

from tests.data.images.vlm_folder import as_bytes, image
from treering.data.image import ImageSource, decoded
from treering.data.rendering.image_processor import ImageProcessor
from treering.errors import InputError

WHERE = "set.jsonl:7: messages[0]"
PLAIN = image(0)


def source(content):
    return ImageSource(content=content, where=WHERE)


def animated(kind):
    return as_bytes(PLAIN, kind, save_all=True, append_images=[image(1)])


REFUSED = {
    "cut": (as_bytes(PLAIN)[:-200], "cannot be decoded"),
    "cut_jpeg": (as_bytes(PLAIN, "JPEG")[:-300], "cannot be decoded"),
    "text": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is one of PNG, JPEG"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is one of PNG, JPEG"),
    "portable": (as_bytes(PLAIN, "PPM"), "is one of PNG, JPEG"),
    "gif": (animated("GIF"), "is animated or has pages"),
    "webp": (animated("WEBP"), "is animated or has pages"),
    "pages": (animated("TIFF"), "is animated or has pages"),
    "grey_16": (as_bytes(Image.fromarray(np.full((56, 84), 4000, np.uint16))), "of mode I;16"),
    "float": (as_bytes(PLAIN.convert("F"), "TIFF"), "of mode F"),
    "empty": (b"", "is empty"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_would_be_seen_otherwise_is_refused_with_its_location(name):
    content, rule = REFUSED[name]
    with pytest.raises(InputError, match=rule) as caught:
        decoded(source(content))
    assert str(caught.value).startswith(WHERE)


@pytest.mark.parametrize("factor", [0.6, 0.4])
def test_more_pixels_than_pillows_own_limit_are_refused(monkeypatch, factor):
    # Pillow warns above the limit and refuses above twice the limit.
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", int(PLAIN.width * PLAIN.height * factor))
    with warnings.catch_warnings():
        # Tests turn warnings into errors; users see warnings.
        warnings.simplefilter("ignore")
        with pytest.raises(InputError, match=f"{WHERE[:11]}.*Pillow's limit"):
            decoded(source(as_bytes(PLAIN)))


def seen(folder, content):
    return ImageProcessor(folder).image(source(content))


def test_a_image_that_lies_on_its_side_is_seen_upright(qwen_dir):
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = seen(qwen_dir, as_bytes(PLAIN.rotate(90, expand=True), exif=exif))
    assert turned.size == PLAIN.size
    assert turned.digest == seen(qwen_dir, as_bytes(PLAIN)).digest


def test_modes_are_seen_as_the_processor_makes_rgb_of_them(qwen_dir):
    clear = PLAIN.convert("RGBA")
    clear.putalpha(Image.fromarray(np.where(np.arange(84) < 42, 0, 255).astype(np.uint8)[None].repeat(56, 0)))
    on_white = Image.new("RGB", PLAIN.size, "white")
    on_white.paste(PLAIN, mask=clear.getchannel("A"))
    grey, cmyk = PLAIN.convert("L"), PLAIN.convert("CMYK")
    for given, kind, shown in (
        (clear, "PNG", on_white),
        (grey, "PNG", grey.convert("RGB")),
        (PLAIN.quantize(16), "PNG", PLAIN.quantize(16).convert("RGB")),
        (cmyk, "TIFF", cmyk.convert("RGB")),
    ):
        assert seen(qwen_dir, as_bytes(given, kind)).digest == seen(qwen_dir, as_bytes(shown)).digest


def test_what_the_processor_refuses_is_refused_with_its_location(qwen_dir):
    with pytest.raises(InputError, match=rf"{WHERE[:11]}.*processor refuses"):
        seen(qwen_dir, as_bytes(Image.new("RGB", (600, 2))))
