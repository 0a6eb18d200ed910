"""Short runs of TRL's trainers on tiny vision models, with processors that need no torchvision."""

import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.image_models import IMAGE, VIDEO, VOCAB, build
from tests.integrations.trl import runs
from tests.integrations.words import EOS, PAD, word_tokenizer

pytest.importorskip("transformers.image_processing_backends")

from datasets import Dataset
from transformers import AddedToken, ProcessorMixin
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

BEGIN, END = VIDEO + 1, VIDEO + 2
_NAMES = {
    "qwen": {IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>", BEGIN: "<|vision_start|>", END: "<|vision_end|>"},
    "gemma3": {IMAGE: "<image_soft_token>", VIDEO: "<video>", BEGIN: "<start_of_image>", END: "<end_of_image>"},
    "internvl": {IMAGE: "<IMG_CONTEXT>", VIDEO: "<video>", BEGIN: "<img>", END: "</img>"},
}
_ROLES = {
    "qwen": {},
    "gemma3": {"boi": BEGIN, "image": IMAGE, "eoi": END},
    "internvl": {"start_image": BEGIN, "context_image": IMAGE, "end_image": END, "video": VIDEO},
}
_WRITTEN = {
    "qwen": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
    "internvl": "<IMG_CONTEXT>",
}


def _kind(family: str) -> str:
    return "qwen" if family.startswith("qwen") else family


def _tokenizer(kind: str) -> Any:
    names = _NAMES[kind]
    made = word_tokenizer(VOCAB, names)
    made.add_tokens([AddedToken(name, special=True, normalized=False) for name in names.values()], special_tokens=True)
    for role, token in _ROLES[kind].items():
        setattr(made, f"{role}_token", names[token])
        setattr(made, f"{role}_token_id", token)
    return made


def _template(kind: str) -> str:
    return (
        "{% for m in messages %}w2 {% for part in m.content %}{% if part.type == 'image' %}"
        + _WRITTEN[kind]
        + " {% else %}{{ part.text }} {% endif %}{% endfor %}{% if m.role == 'assistant' %}<eos> {% endif %}"
        "{% endfor %}{% if add_generation_prompt %}w2 {% endif %}"
    )


class _WithoutVideo:
    """Stand-in for the parts of the video processor that a processor reads; the real one needs torchvision."""

    model_input_names = ()

    def check_argument_for_proper_class(self, name: str, argument: Any) -> type:
        """Accept the stand-in."""
        return type(argument)


class _Qwen25(_WithoutVideo, Qwen2_5_VLProcessor):
    pass


class _Qwen3(_WithoutVideo, Qwen3VLProcessor):
    pass


class _InternVL(_WithoutVideo, InternVLProcessor):
    pass


@cache
def processor(family: str) -> ProcessorMixin:
    """Return image processors for the models of `tests.image_models`, as small as their vision towers."""
    kind = _kind(family)
    given = {"tokenizer": _tokenizer(kind), "chat_template": _template(kind)}
    if kind == "gemma3":
        images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16}, do_convert_rgb=True)
        return Gemma3Processor(image_processor=images, image_seq_length=16, **given)
    if kind == "internvl":
        images = GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, crop_to_patches=True, max_patches=2)
        return _InternVL(image_processor=images, image_seq_length=4, video_processor=_WithoutVideo(), **given)
    images = Qwen2VLImageProcessorPil(patch_size=2, temporal_patch_size=2, merge_size=2, min_pixels=16, max_pixels=96)
    make = _Qwen25 if family == "qwen2_5_vl" else _Qwen3
    return make(image_processor=images, video_processor=_WithoutVideo(), **given)


@cache
def saved(family: str) -> str:
    """Return the folder of a tiny model, made once a process."""
    model = build(family)
    for config in (model.config, model.config.get_text_config(), model.generation_config):
        config.pad_token_id, config.eos_token_id = PAD, EOS
    folder = mkdtemp(prefix="treering-trl-images-")
    model.save_pretrained(folder)
    return folder


def image(number: int) -> Image.Image:
    """Return noise; every second image is wider."""
    rng = np.random.default_rng(100 + number)
    return Image.fromarray(rng.integers(0, 256, (8, 8 + 4 * (number % 2), 3), dtype=np.uint8))


def words(rng: random.Random, count: int) -> str:
    return " ".join(f"w{rng.randrange(3, IMAGE)}" for _ in range(count))


# A question and its images. The last task has the first one's words and placeholders, and other pixels.
_TASKS = ((0, (0,)), (1, (1,)), (2, (2, 3)), (0, (4,)))


def _tasks() -> list[dict[str, Any]]:
    rng = random.Random(5)
    questions = [words(rng, 4) for _ in range(3)]
    return [
        {
            "prompt": [{"role": "system", "content": "w7 w8"}, {"role": "user", "content": questions[question]}],
            "images": [image(number) for number in numbers],
        }
        for question, numbers in _TASKS
    ]


def prompts() -> Dataset:
    return Dataset.from_list(_tasks() * 2)


def _rows(num: int, make: Callable[[int, dict[str, Any], Callable[[int], Any]], dict[str, Any]]) -> Dataset:
    """Return rows of the tasks in turn.

    `make` gets a row's number, its task, and a function that makes answers of n words.
    """
    rng, tasks = random.Random(6), _tasks()

    def answer(count: int) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": words(rng, count)}]

    return Dataset.from_list([make(i, tasks[i % 4], answer) for i in range(num)])


def conversations() -> Dataset:
    return _rows(16, lambda i, t, a: {"messages": [*t["prompt"], *a(2 + i % 3)], "images": t["images"]})


def mixed() -> Dataset:
    """Return conversations, every third of which has no image."""
    rows = conversations().to_list()
    return Dataset.from_list(
        [{**row, "images": [] if i % 3 == 0 else row["images"]} for i, row in enumerate(rows)], conversations().features
    )


def preferences() -> Dataset:
    return _rows(12, lambda i, t, a: {**t, "chosen": a(3), "rejected": a(1 + i % 3)})


def unpaired() -> Dataset:
    return _rows(12, lambda i, t, a: {**t, "completion": a(2 + i % 3), "label": bool(i % 2)})


def made_up(prompt_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
    """Return `runs.completions` without image placeholders."""
    return [[token if token < IMAGE else 3 + token % 7 for token in ids] for ids in runs.completions(prompt_ids)]


def _with_images(make: Any, data: Callable[[], Dataset], family: str, out: Path, **options: Any) -> Any:
    extra = {"train_dataset": data(), "processing_class": processor(family), **options.pop("trainer_options", {})}
    return make(saved(family), out, trainer_options=extra, **options)


def grpo(family: str, out: Path, **options: Any) -> Any:
    made = _with_images(runs.grpo, prompts, family, out, **options)
    made._generate_single_turn = lambda *given, **named: (made_up(*given, **named), None)
    return made


def rloo(family: str, out: Path, **options: Any) -> Any:
    made = _with_images(runs.rloo, prompts, family, out, **options)
    made._generate_single_turn = made_up
    return made


_sft = partial(runs.sft, max_length=None)
sft = partial(_with_images, _sft, conversations)
sft_mixed = partial(_with_images, _sft, mixed)
kto = partial(_with_images, partial(runs.kto, max_length=None), unpaired)
dpo = partial(_with_images, partial(runs.dpo, max_length=None), preferences)
