"""A chat with images has exactly the ids and pixel values that the model's own processor computes."""

import json
import shutil
from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from transformers import (
    AutoImageProcessor,
    Gemma3Processor,
    InternVLProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
)

from tests.data.images.vlm_folder import NAMED, TOKENS_PER_CROP, as_bytes, image, template
from treering.data import Message, Renderer, Trajectory
from treering.data.image import ImageSource, MessageImage
from treering.errors import ConfigError, InputError

CONTENTS = [as_bytes(image(0)), as_bytes(image(1, (56, 112)), "JPEG"), as_bytes(image(0)), as_bytes(image(2))]


def asked(text: str, *positions: tuple[int, bytes], role: str = "user") -> Message:
    images = tuple(MessageImage(at=at, source=ImageSource(content=content)) for at, content in positions)
    return Message(role=role, content=text, images=images)


CHAT = (
    asked("the agent\nand", (0, CONTENTS[0]), (9, CONTENTS[1])),
    Message(role="assistant", content="calls a tool"),
    asked("", (0, CONTENTS[2]), (0, CONTENTS[3]), role="tool"),
    Message(role="assistant", content="answers"),
)


class WithoutVideo:
    """Mixin without the check of the video processor, which needs torchvision."""

    def check_argument_for_proper_class(self, name, argument):
        return None if name == "video_processor" else super().check_argument_for_proper_class(name, argument)


class Qwen(WithoutVideo, Qwen2_5_VLProcessor):
    pass


class InternVL(WithoutVideo, InternVLProcessor):
    pass


def stock(folder, family):
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    images = AutoImageProcessor.from_pretrained(str(folder), backend="pil")
    for name, token in NAMED.get(family, {}).items():
        setattr(tokenizer, f"{name}_token", token)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    if family == "qwen":
        return Qwen(images, tokenizer, None, chat_template=template(family))
    if family == "gemma":
        return Gemma3Processor(images, tokenizer, template(family), image_seq_length=TOKENS_PER_CROP)
    return InternVL(images, tokenizer, None, TOKENS_PER_CROP, template(family))


def as_parts(message: Message) -> dict:
    first, *rest = message.stretches
    parts = [
        {"type": "text", "text": first},
        *(p for text in rest for p in ({"type": "image"}, {"type": "text", "text": text})),
    ]
    return {"role": message.role, "content": parts}


@pytest.mark.parametrize("family", ["qwen", "gemma", "internvl"])
def test_ids_and_values_are_those_of_the_processor(request, family):
    folder = request.getfixturevalue(f"{family}_dir")
    rendered = Renderer(tokenizer=folder).render([Trajectory(task_id=1, messages=CHAT)])
    assert len(rendered) == 1
    one, processor = rendered[0], stock(folder, family)
    text = processor.apply_chat_template([as_parts(message) for message in CHAT], tokenize=False)
    images = [Image.open(BytesIO(content)) for content in CONTENTS]
    expected = processor(images=images, text=text, return_tensors="np", add_special_tokens=False)
    assert np.array_equal(one.tokens, expected["input_ids"][0])
    values = np.concatenate([placed.image.values for placed in one.images])
    assert values.dtype == np.float32
    assert values.tobytes() == np.asarray(expected["pixel_values"], np.float32).tobytes()
    if family == "qwen":
        assert [placed.image.grid for placed in one.images] == [tuple(grid) for grid in expected["image_grid_thw"]]
    digests = [placed.image.digest for placed in one.images]
    assert digests[0] == digests[2]
    assert len(set(digests)) == 3
    assert one.turn_ends.tolist() == (np.flatnonzero(one.loss_mask[:-1] > one.loss_mask[1:]) + 1).tolist()
    trained = processor.tokenizer.decode(one.tokens[one.loss_mask])
    assert trained == "".join(
        f"{said}{'<end_of_turn>' if family == 'gemma' else '<|im_end|>'}" for said in ("calls a tool", "answers")
    )


def test_a_text_that_holds_the_placeholder_is_refused_with_an_image(qwen_dir):
    talk = (asked("the <|image_pad|>", (0, CONTENTS[0])), Message(role="assistant", content="agent"))
    with pytest.raises(InputError, match=r"has 1 images and 2 of them"):
        Renderer(tokenizer=qwen_dir).render([Trajectory(task_id=1, messages=talk)])
    talk = (asked("the", (0, CONTENTS[0])), Message(role="assistant", content="<|image_pad|>"))
    with pytest.raises(InputError, match=r"has 1 images and 2 of them"):
        Renderer(tokenizer=qwen_dir).render([Trajectory(task_id=1, messages=talk)])


def with_template(folder, target, text):
    shutil.copytree(folder, target, dirs_exist_ok=True)
    config = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": text}))
    return target


def test_a_template_that_drops_earlier_images_is_refused(qwen_dir, tmp_path):
    """The template keeps only the images of the last message, so the first placeholder belongs to another image."""
    kept = template("qwen").replace("part.type == 'image'", "part.type == 'image' and loop.index and m == messages[-1]")
    kept = kept.replace("{{ part.text }}", "{{ part.text or '' }}")
    folder = with_template(qwen_dir, tmp_path, kept)
    talk = (asked("the", (0, CONTENTS[0])), Message(role="assistant", content="agent"), asked("tool", (0, CONTENTS[1])))
    with pytest.raises(InputError, match=r"messages\[2\] has 2 images and 1 of them"):
        Renderer(tokenizer=folder).render([Trajectory(task_id=1, messages=talk)])


def test_the_plain_form_and_prompts_of_the_engine_have_no_images(qwen_dir):
    with pytest.raises(InputError, match="the plain form has none"):
        Renderer(tokenizer=qwen_dir, template="plain").render([Trajectory(task_id=1, messages=CHAT)])
    with pytest.raises(InputError, match="a prompt that is sampled from is text"):
        Renderer(tokenizer=qwen_dir).prompt(CHAT[:1])
    with pytest.raises(InputError, match="a prompt that is sampled from is text"):
        Renderer(tokenizer=qwen_dir).continuation(CHAT, 2)


def with_processor(folder, target, **settings):
    shutil.copytree(folder, target, dirs_exist_ok=True)
    file = target / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return target


def test_processors_that_are_missing_foreign_or_crop_are_refused(qwen_dir, gemma_dir, tokenizer_dir, tmp_path):
    one = [Trajectory(task_id=1, messages=CHAT)]
    with pytest.raises(ConfigError, match=r"has no preprocessor_config\.json and no processor_config\.json"):
        Renderer(tokenizer=tokenizer_dir).render(one)
    with pytest.raises(ConfigError, match="names IdeficsProcessor"):
        Renderer(tokenizer=with_processor(qwen_dir, tmp_path / "a", processor_class="IdeficsProcessor")).render(one)
    with pytest.raises(ConfigError, match="asks for do_pan_and_scan"):
        Renderer(tokenizer=with_processor(gemma_dir, tmp_path / "b", do_pan_and_scan=True)).render(one)
