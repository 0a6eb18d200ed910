"""How the processors of the model families write a picture into the text, and what else differs between them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

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
