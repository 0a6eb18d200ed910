"""Folders of vision-language models without weights: a small tokenizer, a chat template with images, a processor."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.conftest import CORPUS, build_tokenizer

# Older releases of transformers have no processors that need only Pillow.
pytest.importorskip("transformers.image_processing_backends")

_MARKS = {
    "qwen": ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
    "internvl": ["<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"],
    "gemma": ["<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"],
}
_IMAGE = {
    "qwen": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma": "<start_of_image>",
    "internvl": "<IMG_CONTEXT>\\n",
}
_CHATML = ("<|im_start|>", "<|im_end|>")
_TURN = {"qwen": _CHATML, "internvl": _CHATML, "gemma": ("<start_of_turn>", "<end_of_turn>")}
NAMED = {
    "gemma": {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"},
    "internvl": {
        **{"start_image": "<img>", "end_image": "</img>", "context_image": "<IMG_CONTEXT>"},
        "video": "<video>",
    },
}
_PROCESSORS = {
    "qwen": {
        "processor_class": "Qwen2_5_VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 28 * 28,
        "max_pixels": 28 * 28 * 64,
    },
    "gemma": {
        "processor_class": "Gemma3Processor",
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 28, "width": 28},
        "do_pan_and_scan": None,
        "do_convert_rgb": None,
    },
    "internvl": {
        "processor_class": "InternVLProcessor",
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": 28, "width": 28},
        "crop_to_patches": False,
        "max_patches": 4,
    },
}
TOKENS_PER_CROP = 4


def template(family: str) -> str:
    start, end = _TURN[family]
    image = _IMAGE[family]
    return (
        "{% for m in messages %}{{ '" + start + "' + m.role + '\\n' }}"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        "{% if part.type == 'image' %}{{ '" + image + "' }}{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endif %}{{ '" + end + "\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '" + start + "assistant\\n' }}{% endif %}"
    )


def make_folder(folder: Path, family: str) -> Path:
    build_tokenizer(_MARKS[family], [*CORPUS, "\n\n\n"], use_regex=True).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template(family)}
    named = {f"{name}_token": token for name, token in NAMED.get(family, {}).items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | named))
    (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSORS[family]))
    if family in NAMED:
        (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": TOKENS_PER_CROP}))
    return folder


def image(seed: int, size: tuple[int, int] = (84, 56)) -> Image.Image:
    """Return noise of a size, given as width and height."""
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def as_bytes(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def as_uri(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"
