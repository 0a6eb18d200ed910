"""The image half of a model's processor: pixel values, their grid, and the placeholder tokens in a rendered chat.

It uses the Pillow version of the image processor in the model's folder, which does not need torchvision and computes
the same values on every machine. The tokenizer's chat template renders the text.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from treering.data.image import ImageData, ImageSource, PlacedImage, StoredImage, decoded
from treering.data.rendering.encoder import EncodedScript, Script, Span
from treering.data.rendering.template import RenderedChat, named_tokens, read_settings
from treering.data.trajectory import Message
from treering.errors import ConfigError, InputError
from treering.extras import require
from treering.types import TokenIds

_Named: TypeAlias = Mapping[str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholder:
    """The text of an image.

    Example: Gemma 3's template writes `<start_of_image>`, which its processor expands to two line breaks, that token,
    256 times `<image_soft_token>`, `<end_of_image>`, and two line breaks.
    """

    written: str
    """Text that the chat template writes for an image."""
    expanded: str
    """Expansion of that text, with one `token` in place of all tokens of the image."""
    token: str
    """Token whose embeddings the image replaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorFamily:
    """A family of processors."""

    placeholder: Callable[[_Named], Placeholder]
    """Makes the placeholder from the tokenizer's named special tokens."""
    tokens_per_crop: int | None = None
    """Tokens per crop if the settings lack `image_seq_length`; None for a processor with grids."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options that the processor passes to its image processor."""


def _qwen(named: _Named) -> Placeholder:
    token = named.get("image_token") or "<|image_pad|>"
    return Placeholder(written=token, expanded=token, token=token)


def _gemma(named: _Named) -> Placeholder:
    begin = named.get("boi_token") or "<start_of_image>"
    token = named.get("image_token") or "<image_soft_token>"
    end = named.get("eoi_token") or "<end_of_image>"
    return Placeholder(written=begin, expanded=f"\n\n{begin}{token}{end}\n\n", token=token)


def _internvl(named: _Named) -> Placeholder:
    token = named.get("context_image_token") or "<IMG_CONTEXT>"
    begin, end = named.get("start_image_token") or "<img>", named.get("end_image_token") or "</img>"
    return Placeholder(written=token, expanded=f"{begin}{token}{end}", token=token)


PROCESSORS: Mapping[str, ProcessorFamily] = MappingProxyType(
    {
        "Qwen2_5_VLProcessor": ProcessorFamily(placeholder=_qwen),
        "Qwen3VLProcessor": ProcessorFamily(placeholder=_qwen),
        "Gemma3Processor": ProcessorFamily(
            placeholder=_gemma, tokens_per_crop=256, options=MappingProxyType({"do_convert_rgb": True})
        ),
        "InternVLProcessor": ProcessorFamily(
            placeholder=_internvl, tokens_per_crop=256, options=MappingProxyType({"crop_to_patches": True})
        ),
    }
)
"""Families by the name of the processor's class."""

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
MAX_HELD_BYTES = 1 << 28
"""Size of the cache of pixel values; an image that is larger is processed on each use."""


_MEDIA_KEYS = ("vision_config", "audio_config", "vision_tower", "mm_vision_tower")


def takes_images(folder: Path) -> bool:
    """Return whether a folder's model takes images, videos or sound."""
    has_processor = any((folder / name).is_file() for name in PROCESSOR_FILES)
    return has_processor or bool(read_settings(folder / "config.json").keys() & set(_MEDIA_KEYS))


class ImageProcessor:
    """Processor of encoded images, equal to the model's own.

    Example: with Qwen2.5-VL's processor, a PNG of 640x480 is an image of 34 x 46 patches and 391 tokens.
    """

    def __init__(self, folder: Path) -> None:
        """Store the folder of the model, or of its tokenizer and processor, which is opened on first use."""
        self.folder = folder
        """Folder of the model."""
        self._held: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()
        self._known: dict[bytes, dict[str, Any]] = {}

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return ImageProcessor, (self.folder,)

    @cached_property
    def placeholder(self) -> Placeholder:
        """The text of an image for this model."""
        return self._family.placeholder(named_tokens(self.folder))

    def image(self, source: ImageSource) -> StoredImage:
        """Decode and process an image, equal bytes once, and return its metadata.

        Raises:
            InputError: see `decoded`; or the model's processor refuses the image, such as a very wide one.
            ConfigError: see `placeholder`.
            MissingExtraError: Pillow or transformers is missing.
        """
        key = blake2b(source.read(), digest_size=16).digest()
        if key not in self._known:
            made, size = self._made(source)
            self._known[key] = {"size": size, "grid": made.grid, "num_tokens": made.num_tokens, "digest": made.digest}
        return StoredImage(source=source, open_image=self.values, **self._known[key])

    def values(self, image: StoredImage) -> NDArray[np.float32]:
        """Return the values of an image from the cache, or process it again."""
        held = self._held.get(image.digest)
        if held is not None:
            self._held.move_to_end(image.digest)
            return held
        made, _ = self._made(image.source)
        if made.digest != image.digest:
            raise image.source.refusal(
                "an image stays the same while it is trained on, and this one, or the model's processor, has changed; "
                "start again"
            )
        self._hold(made.digest, made.values)
        return made.values

    def _hold(self, digest: bytes, values: NDArray[np.float32]) -> None:
        if values.nbytes > MAX_HELD_BYTES:
            return
        self._held[digest] = values
        self._held.move_to_end(digest)
        while sum(one.nbytes for one in self._held.values()) > MAX_HELD_BYTES:
            self._held.popitem(last=False)

    def _made(self, source: ImageSource) -> tuple[ImageData, tuple[int, int]]:
        family, processor = self._family, self._image_processor
        image = decoded(source)
        try:
            found = processor(images=[image], return_tensors="np", **family.options)
        except ValueError as error:
            raise source.refusal(f"the model's processor refuses an image ({error}); change its shape") from error
        values = np.asarray(found["pixel_values"], np.float32)
        if family.tokens_per_crop is not None:
            per_crop = int(self._settings.get("image_seq_length") or family.tokens_per_crop)
            return ImageData(values=values, num_tokens=len(values) * per_crop), image.size
        time, height, width = (int(count) for count in found["image_grid_thw"][0])
        num_tokens = time * height * width // processor.merge_size**2
        return ImageData(values=values, grid=(time, height, width), num_tokens=num_tokens), image.size

    @cached_property
    def _settings(self) -> Mapping[str, Any]:
        settings = [read_settings(self.folder / name) for name in PROCESSOR_FILES]
        if not any(settings):
            raise ConfigError(
                f"images need the processor of the model, and {self.folder} has no "
                f"{' and no '.join(PROCESSOR_FILES)}; give the folder of the model, with these files"
            )
        return {**settings[0], **settings[1]}

    @cached_property
    def _family(self) -> ProcessorFamily:
        name = str(self._settings.get("processor_class"))
        if name not in PROCESSORS:
            raise ConfigError(
                f"images are read for the processors {', '.join(PROCESSORS)}, and {self.folder} names {name}; "
                "use a model of these families"
            )
        return PROCESSORS[name]

    @cached_property
    def _image_processor(self) -> Any:
        self._settings  # noqa: B018 - raises if the files are missing
        require("images", "PIL")
        require("the processor of a model", "transformers")
        from transformers import AutoImageProcessor

        try:
            processor = AutoImageProcessor.from_pretrained(
                str(self.folder), backend="pil", local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"images need the processor of the model, and that of {self.folder} cannot be opened ({error}); "
                "fetch its files again"
            ) from error
        if getattr(processor, "backend", None) != "pil":
            raise ConfigError(
                f"images are processed by Pillow, and {type(processor).__name__} of this transformers is not; "
                "install a newer one"
            )
        if getattr(processor, "do_pan_and_scan", None):
            raise ConfigError(
                f"an image is one run of tokens, and {self.folder} asks for do_pan_and_scan, which gives crops runs "
                "of their own; set it to false"
            )
        return processor


def check_images(chat: RenderedChat, written: str) -> None:
    """Check that a chat's text has one placeholder per image, in all and before each trained turn.

    Each text has the placeholders of all earlier messages, so the first placeholder belongs to the first image, and so
    on.

    Raises:
        InputError: the template drops or repeats images, or a text contains the placeholder.
    """
    for index, message in enumerate(chat.messages):
        if message.is_trained and index:
            _check_count(chat.opened(index), chat.messages[:index], written)
    _check_count(chat.whole, chat.messages, written)


def num_images(messages: Sequence[Message]) -> int:
    """Return the number of images in all messages."""
    return sum(len(message.images) for message in messages)


def expanded_script(script: Script, placeholder: Placeholder | None) -> Script:
    """Return the script with each placeholder expanded and spans moved; unchanged without placeholders.

    Example: if `<img>` expands to `<img>*`, a span after one placeholder moves by one character.
    """
    if placeholder is None or placeholder.written == placeholder.expanded:
        return script
    ends = [found.end() for found in re.finditer(re.escape(placeholder.written), script.text)]
    growth = len(placeholder.expanded) - len(placeholder.written)

    def moved(at: int) -> int:
        return at + growth * sum(end <= at for end in ends)

    return replace(
        script,
        text=script.text.replace(placeholder.written, placeholder.expanded),
        spans=tuple(Span(moved(start), moved(stop)) for start, stop in script.spans),
        cuts=tuple(map(moved, script.cuts)),
    )


def with_image_tokens(encoded: EncodedScript, images: Sequence[ImageData], token: int) -> EncodedScript:
    """Return the sequence with each placeholder, the id `token`, repeated for every token of its image.

    A sequence may have only the first images of a chat.

    Raises:
        InputError: there are more placeholders than images, or a placeholder would be trained.

    Example: `[1, 9, 2]` with the placeholder 9 and an image of 3 tokens becomes `[1, 9, 9, 9, 2]`.
    """
    at = np.flatnonzero(encoded.tokens == token)
    if at.size > len(images) or encoded.loss_mask[at].any():
        raise InputError("a text holds the token of images itself, which only an image may; remove it from the text")
    shown = images[: at.size]
    times = np.ones(encoded.tokens.size, np.int64)
    times[at] = [image.num_tokens for image in shown]
    begins = np.concatenate([[0], np.cumsum(times)])
    tokens: TokenIds = np.repeat(encoded.tokens, times)
    return EncodedScript(
        tokens=tokens,
        loss_mask=np.repeat(encoded.loss_mask, times),
        turn_ends=begins[encoded.turn_ends].astype(np.int32),
        images=tuple(PlacedImage(start=int(begins[i]), image=image) for i, image in zip(at, shown, strict=True)),
    )


def _check_count(text: str, messages: Sequence[Message], written: str) -> None:
    found, wanted = text.count(written), num_images(messages)
    if found != wanted:
        raise InputError(
            f"the chat template writes {written} once for each image, and the chat up to "
            f"messages[{len(messages) - 1}] has {wanted} images and {found} of them; use a template that keeps all "
            "images, and no text that holds this token"
        )
