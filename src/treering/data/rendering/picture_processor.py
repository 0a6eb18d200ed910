"""The picture half of a model's processor: pixel values, their grid, and the placeholder tokens in the text.

It is the image processor of the model's folder in its Pillow form, which needs no torchvision and gives the same values
on every machine. The text half is rendered by the tokenizer's chat template, as for text.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from treering.data.picture import Picture
from treering.data.pictures.decode import decoded
from treering.data.pictures.source import PictureSource
from treering.data.pictures.stored import StoredPicture
from treering.data.rendering.template_files import named_tokens, read_settings
from treering.errors import ConfigError
from treering.extras import require

_Named: TypeAlias = Mapping[str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholder:
    """How a picture stands in the text.

    Example: Gemma 3's template writes `<start_of_image>`, of which its processor makes two line breaks, that token,
    256 times `<image_soft_token>`, `<end_of_image>`, and two line breaks.
    """

    written: str
    """What the chat template writes for a picture."""
    expanded: str
    """What the processor makes of that, with one `token` in it, which stands for all of a picture."""
    token: str
    """The token whose embeddings the picture replaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureFamily:
    """What is particular to a processor."""

    placeholder: Callable[[_Named], Placeholder]
    """Made of the special tokens that the tokenizer names."""
    tokens_per_crop: int | None = None
    """Where the processor's settings name no `image_seq_length`; None for a processor of grids."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the processor tells its image processor."""


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


PROCESSORS: Mapping[str, PictureFamily] = MappingProxyType(
    {
        "Qwen2_5_VLProcessor": PictureFamily(placeholder=_qwen),
        "Qwen3VLProcessor": PictureFamily(placeholder=_qwen),
        "Gemma3Processor": PictureFamily(
            placeholder=_gemma, tokens_per_crop=256, options=MappingProxyType({"do_convert_rgb": True})
        ),
        "InternVLProcessor": PictureFamily(
            placeholder=_internvl, tokens_per_crop=256, options=MappingProxyType({"crop_to_patches": True})
        ),
    }
)
"""By the name of the processor's class."""

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
MAX_HELD_BYTES = 1 << 28
"""Of values that are held, those that were used last; a picture that is larger is made whenever it is needed."""


class _Facts(NamedTuple):
    """Of a picture, without its values."""

    size: tuple[int, int]
    grid: tuple[int, int, int] | None
    num_tokens: int
    digest: bytes


class PictureProcessor:
    """Makes pictures of encoded bytes as the model's own processor does.

    Example: under Qwen2.5-VL's processor a PNG of 640x480 is a picture of 34 x 46 patches and 391 tokens.
    """

    def __init__(self, folder: Path) -> None:
        """Opens nothing yet; `folder` is of the model, or of its tokenizer and processor."""
        self.folder = folder
        """Of the model."""
        self._held: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()
        self._known: dict[bytes, _Facts] = {}

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return PictureProcessor, (self.folder,)

    @cached_property
    def placeholder(self) -> Placeholder:
        """How a picture stands in the text of this model.

        Raises:
            ConfigError: the folder has no processor, or one of another family.
        """
        return self._family.placeholder(named_tokens(self.folder))

    def picture(self, source: PictureSource) -> StoredPicture:
        """What is known of a picture, which is decoded and processed for it, equal bytes once.

        Raises:
            InputError: see `decoded`; or the model's processor refuses it, as one that is 200 times as wide as high.
            ConfigError: see `placeholder`.
            MissingExtraError: Pillow or transformers is missing.
        """
        key = blake2b(source.read(), digest_size=16).digest()
        facts = self._known.get(key)
        if facts is None:
            made, size = self._made(source)
            facts = self._known[key] = _Facts(size, made.grid, made.num_tokens, made.digest)
        return StoredPicture(source=source, open_picture=self.values, **facts._asdict())

    def values(self, picture: StoredPicture) -> NDArray[np.float32]:
        """The values of a picture, made again unless they are held.

        Raises:
            InputError: other values than those that it was known by.
        """
        held = self._held.get(picture.digest)
        if held is not None:
            self._held.move_to_end(picture.digest)
            return held
        made, _ = self._made(picture.source)
        if made.digest != picture.digest:
            raise picture.source.refusal(
                "a picture stays the same while it is trained on, and this one, or the model's processor, has changed; "
                "start anew"
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

    def _made(self, source: PictureSource) -> tuple[Picture, tuple[int, int]]:
        family, processor = self._family, self._image_processor
        image = decoded(source)
        try:
            found = processor(images=[image], return_tensors="np", **family.options)
        except ValueError as error:
            raise source.refusal(f"the model's processor refuses a picture ({error}); change its shape") from error
        values = np.asarray(found["pixel_values"], np.float32)
        if family.tokens_per_crop is not None:
            per_crop = int(self._settings.get("image_seq_length") or family.tokens_per_crop)
            return Picture(values=values, num_tokens=len(values) * per_crop), image.size
        time, height, width = (int(count) for count in found["image_grid_thw"][0])
        num_tokens = time * height * width // processor.merge_size**2
        return Picture(values=values, grid=(time, height, width), num_tokens=num_tokens), image.size

    @cached_property
    def _settings(self) -> Mapping[str, Any]:
        settings = [read_settings(self.folder / name) for name in PROCESSOR_FILES]
        if not any(settings):
            raise ConfigError(
                f"pictures need the processor of the model, and {self.folder} has no "
                f"{' and no '.join(PROCESSOR_FILES)}; give the folder of the model, with these files"
            )
        return {**settings[0], **settings[1]}

    @cached_property
    def _family(self) -> PictureFamily:
        name = str(self._settings.get("processor_class"))
        if name not in PROCESSORS:
            raise ConfigError(
                f"pictures are read for the processors {', '.join(PROCESSORS)}, and {self.folder} names {name}; "
                "use a model of these families"
            )
        return PROCESSORS[name]

    @cached_property
    def _image_processor(self) -> Any:
        self._settings  # noqa: B018 - says what is missing
        require("pictures", "PIL")
        require("the processor of a model", "transformers")
        from transformers import AutoImageProcessor

        try:
            processor = AutoImageProcessor.from_pretrained(
                str(self.folder), backend="pil", local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"pictures need the processor of the model, and that of {self.folder} cannot be opened ({error}); "
                "fetch its files again"
            ) from error
        if getattr(processor, "backend", None) != "pil":
            raise ConfigError(
                f"pictures are processed by Pillow, and {type(processor).__name__} of this transformers is not; "
                "install a newer one"
            )
        if getattr(processor, "do_pan_and_scan", None):
            raise ConfigError(
                f"a picture is one run of tokens, and {self.folder} asks for do_pan_and_scan, which gives crops runs "
                "of their own; set it to false"
            )
        return processor
