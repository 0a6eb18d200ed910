"""A small Qwen2.5-VL from random weights and images of dots to count: writes all that the two configurations name.

python examples/images/dots.py                        # writes runs/dots_data
treering sft examples/images/start.toml
treering train examples/images/config.toml
"""

import base64
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

OUT = Path("runs/dots_data")
CELL = 28
"""Pixels along each side of the square that is one token."""
COLUMNS, ROWS = 3, 2
SHARE_RIGHT = 0.4
"""Share of right answers of the supervised start; the others are guesses, so that there is something left to learn."""
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
IMAGE = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "window_size": 112,
    "fullatt_block_indexes": [0],
}
PROCESSOR = {
    "processor_class": "Qwen2_5_VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": CELL * CELL,
    "max_pixels": 64 * CELL * CELL,
}


def draw(rng: np.random.Generator) -> tuple[bytes, int]:
    """A PNG of some dots, at most one in each cell, in random shades and places, and how many they are."""
    count = int(rng.integers(1, COLUMNS * ROWS + 1))
    image = Image.new("RGB", (COLUMNS * CELL, ROWS * CELL), tuple(rng.integers(0, 40, 3).tolist()))
    pen = ImageDraw.Draw(image)
    for cell in rng.permutation(COLUMNS * ROWS)[:count].tolist():
        radius = int(rng.integers(6, 10))
        row, column = divmod(cell, COLUMNS)
        x = column * CELL + int(rng.integers(radius + 1, CELL - radius - 1))
        y = row * CELL + int(rng.integers(radius + 1, CELL - radius - 1))
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), tuple(rng.integers(150, 256, 3).tolist()))
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue(), count


def question(image: bytes) -> dict[str, Any]:
    """The message that asks how many dots there are."""
    uri = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": "How many?"}]
    return {"role": "user", "content": parts}


def write_lines(file: Path, lines: Iterable[object]) -> None:
    """One JSON document a line."""
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def write_data(num_solved: int = 384, num_prompts: int = 64, seed: int = 0) -> None:
    """Writes answered images for the supervised start, others for reinforcement learning, and more to measure on."""
    rng = np.random.default_rng(seed)
    solved = [draw(rng) for _ in range(num_solved)]
    is_right = rng.random(num_solved) < SHARE_RIGHT
    guesses = rng.integers(1, COLUMNS * ROWS + 1, num_solved)
    # All of one task, so that they share what stands before the image.
    chats = [
        [question(image), {"role": "assistant", "content": str(count if right else guess)}]
        for (image, count), right, guess in zip(solved, is_right, guesses.tolist(), strict=True)
    ]
    write_lines(OUT / "solved.jsonl", ({"task_id": i // 32, "messages": chat} for i, chat in enumerate(chats)))
    for name in ("prompts", "held_out"):
        drawn = (draw(rng) for _ in range(num_prompts))
        write_lines(OUT / f"{name}.jsonl", ({"prompt": [question(p)], "answer": str(n)} for p, n in drawn))


def write_model(seed: int = 0) -> None:
    """Writes a model of random weights with a tokenizer of bytes and the processor of images."""
    folder = OUT / "model"
    folder.mkdir(parents=True, exist_ok=True)
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS + IMAGE])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": MARKS[0], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    start, image, end, video = (tokenizer.token_to_id(mark) for mark in IMAGE)
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "vocab_size": tokenizer.get_vocab_size()},
        vision_config=VISION,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    torch.manual_seed(seed)
    transformers.Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)


if __name__ == "__main__":
    write_model()
    write_data()
