"""A dataset stores the bytes of each image once, decodes them on demand, and equals its cache."""

import json
import pickle
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer

import treering.data.cache.open as opening
from tests.data.images.vlm_folder import as_bytes, as_uri, image
from treering.data import Renderer, read_trajectories
from treering.data.cache.dataset import CONTENTS
from treering.data.cache.open import open_dataset
from treering.data.rendering import image_processor
from treering.errors import InputError

RED, BLUE = as_bytes(image(0)), as_bytes(image(1, (56, 56)))
SAID = {"role": "assistant", "content": "the tool answers"}


def line(task, *images, text="the agent"):
    parts = [{"type": "image", "image": image} for image in images]
    return {"task_id": task, "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}, SAID]}


@pytest.fixture
def file(tmp_path):
    (tmp_path / "blue.png").write_bytes(BLUE)
    lines = [
        line("a", as_uri(RED)),
        line("b", "blue.png", as_uri(RED)),
        line("a", as_uri(RED), text="the tool"),
        line("c"),
    ]
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return tmp_path / "set.jsonl"


def facts(rows):
    return [
        (
            one.tokens.tolist(),
            one.loss_mask.tolist(),
            [(p.start, p.image.digest, p.image.size) for p in one.images],
        )
        for one in rows
    ]


def test_a_dataset_has_the_images_of_its_trajectories_cold_and_warm(qwen_dir, file, monkeypatch):
    renderer = Renderer(tokenizer=qwen_dir)
    expected = renderer.render(read_trajectories(file))
    for folder in (None, file.parent / "cache", file.parent / "cache"):
        dataset = open_dataset(file, Renderer(tokenizer=qwen_dir), folder=folder)
        rows = [dataset.row(i) for i in range(4)]
        assert facts(rows) == facts(expected)
        assert len(dataset.images) == 2
        for row, one in zip(rows, expected, strict=True):
            for placed, wanted in zip(row.images, one.images, strict=True):
                assert placed.image.values.tobytes() == wanted.image.values.tobytes()
        if folder is not None:
            # From now on nothing is built.
            monkeypatch.setattr(opening, "build", None)
    contents = next((file.parent / "cache").glob(f"*/{CONTENTS}.npy"))
    assert np.load(contents).tobytes() == RED + BLUE


def test_a_local_image_that_has_changed_is_read_again(qwen_dir, file):
    cache = file.parent / "cache"
    before = open_dataset(file, Renderer(tokenizer=qwen_dir), folder=cache).row(1).images[0].image.digest
    (file.parent / "blue.png").write_bytes(as_bytes(image(2, (56, 56))))
    after = open_dataset(file, Renderer(tokenizer=qwen_dir), folder=cache).row(1).images[0].image.digest
    assert after != before
    (file.parent / "blue.png").unlink()
    with pytest.raises(InputError, match=r"set.jsonl:2: .*blue.png: an image cannot be read"):
        open_dataset(file, Renderer(tokenizer=qwen_dir), folder=cache)


def test_few_values_are_held_and_a_changed_file_is_refused(qwen_dir, file, monkeypatch):
    renderer = Renderer(tokenizer=qwen_dir)
    one = renderer.render(read_trajectories(file))[1]
    blue, red = (placed.image for placed in one.images)
    num_held, num_red, num_blue = red.values.nbytes, red.values.nbytes, blue.values.nbytes
    monkeypatch.setattr(image_processor, "MAX_HELD_BYTES", num_held)
    renderer.processor._held.clear()
    assert num_red + num_blue > num_held
    assert red.values is red.values
    assert blue.values is blue.values
    assert list(renderer.processor._held) == [blue.digest]
    (file.parent / "blue.png").write_bytes(RED)
    assert red.values is not None
    with pytest.raises(InputError, match=r"set.jsonl:2: .*has changed"):
        blue.values  # noqa: B018


def test_a_image_travels_as_its_source(qwen_dir, file):
    one = Renderer(tokenizer=qwen_dir).render(read_trajectories(file))[0]
    sent = pickle.dumps(one)
    # Its own bytes and some tokens, not the values.
    assert len(sent) < len(RED) + 4_000 < one.images[0].image.values.nbytes
    assert pickle.loads(sent).images[0].image.values.tobytes() == one.images[0].image.values.tobytes()


def test_text_loads_nothing_of_images(tokenizer_dir, tmp_path):
    (tmp_path / "set.jsonl").write_text(
        json.dumps({**line("a"), "messages": [{"role": "user", "content": "the"}, SAID]})
    )
    code = (
        "import sys, pathlib\nfrom treering.data import Renderer\nfrom treering.data.cache.open import open_dataset\n"
        f"renderer = Renderer(tokenizer=pathlib.Path({str(tokenizer_dir)!r}))\n"
        f"dataset = open_dataset({str(tmp_path / 'set.jsonl')!r}, renderer, folder=None)\n"
        "assert dataset.row(0).tokens.size\nprint(sorted({'PIL', 'transformers', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "[]"


_BARE = {
    "qwen": ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    "gemma": ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    "internvl": ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
}


@pytest.mark.filterwarnings("ignore::treering.errors.DataWarning")
@pytest.mark.parametrize("family", _BARE)
def test_a_text_with_a_placeholder_and_no_image_is_refused_with_file_and_line(family, request, tmp_path):
    folder = request.getfixturevalue(f"{family}_dir")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for token in _BARE[family]:
        said = {"role": "assistant", "content": "the tool"}
        bad = [
            {"messages": [{"role": "user", "content": f"the {token}"}, said]},
            {"messages": [{"role": "user", "content": "the"}, {**said, "content": token}]},
            {"prompt": f"the {token}", "completion": "tool"},
            {"tokens": [100, tokenizer.token_to_id(token), 101]},
        ]
        for number, row in enumerate(bad):
            good = {"tokens": [100, 101]} if "tokens" in row else {**row, "prompt": "a"} if "prompt" in row else None
            rows = [good or {"messages": [{"role": "user", "content": "<image>"}, said]}, row]
            path = tmp_path / f"{number}.jsonl"
            path.write_text("".join(json.dumps({"task_id": 1, **one}) + "\n" for one in rows))
            refused = f"{path}:2: {token} stands for an image, video or sound"
            with pytest.raises(InputError, match=re.escape(refused)):
                open_dataset(path, Renderer(tokenizer=folder), folder=None)


@pytest.mark.filterwarnings("ignore::treering.errors.DataWarning")
def test_a_model_of_text_reads_placeholders_as_other_tokens(qwen_dir, tmp_path):
    folder = tmp_path / "text"
    shutil.copytree(qwen_dir, folder, ignore=shutil.ignore_patterns("*processor*"))
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps({"task_id": 1, "prompt": "a <|image_pad|>", "completion": "b"}) + "\n")
    token = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<|image_pad|>")
    assert token in open_dataset(path, Renderer(tokenizer=folder), folder=None).tokens(0)


def test_a_video_with_an_image_is_refused(qwen_dir, tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps(line("a", as_uri(RED), text="<|video_pad|>")) + "\n")
    with pytest.raises(InputError, match=r"set.jsonl:1: <\|video_pad\|> stands for an image, video or sound"):
        open_dataset(path, Renderer(tokenizer=qwen_dir), folder=None)
