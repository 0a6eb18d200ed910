"""`treering inspect` on files with images: what it counts, what it shows, and the page it writes."""

import json
import shutil
from functools import partial

import numpy as np
import pytest

from tests.cli.inspect import runs
from tests.data.images.vlm_folder import as_bytes, as_uri, image, make_folder
from tests.image_models import build
from treering.data import Renderer, read_trajectories

SHAPE = ["--model-shape", "qwen3-0.6b"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("qwen"), "qwen")


@pytest.fixture
def file(tmp_path):
    """Two answers to a question on two images, and one to the same question with another second image."""
    first, second, third = (as_uri(as_bytes(image(seed))) for seed in range(3))
    rows = [(first, second, "the"), (first, second, "agent"), (first, third, "the")]
    with open(tmp_path / "set.jsonl", "w") as stream:
        for one, other, answer in rows:
            parts = [
                {"type": "image", "image": one},
                {"type": "text", "text": "the tool"},
                {"type": "image", "image": other},
            ]
            talk = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
            stream.write(json.dumps({"task_id": "a", "messages": talk}) + "\n")
    return tmp_path / "set.jsonl"


@pytest.fixture
def call(monkeypatch):
    return partial(runs.call, monkeypatch)


def report_of(call, capsys, *arguments):
    assert call(*map(str, arguments), "--json") == 0
    return json.loads(capsys.readouterr().out)["files"][0]


def test_images_their_tokens_and_the_tower_are_counted(call, capsys, file, folder, tmp_path):
    found = report_of(call, capsys, file, "--tokenizer", folder, *SHAPE)
    # An image of 84 x 56 has 6 squares of 28.
    images = found["images"]
    assert images["images"] == 6
    assert images["distinct"] == images["distinct_in_file"] == 3
    assert (images["tokens"], images["unique_tokens"]) == (36, 18)
    assert images["flop_bound"] is None
    # Equal ids of other images are not merged across sets either.
    assert found["whole_set"]["unique_tokens"] == found["unique_tokens"]
    # A line break follows each turn, which is not part of its sample.
    turns = found["turns"]
    assert turns["unique_tokens"] == found["unique_tokens"] - 3
    assert turns["flat_tokens"] == found["flat_tokens"] - 3
    # The first two rows share their prompts; the third leaves them at its second image.
    rows = Renderer(tokenizer=folder).render(read_trajectories(file))
    prompt, start = rows[0].num_prompt_tokens, rows[0].images[1].start
    computed = found["flat_tokens"] - 3 * prompt + 2 * prompt - start
    assert found["prompt_only_bound"] == pytest.approx(found["flat_tokens"] / computed)
    seeing = shutil.copytree(folder, tmp_path / "seeing")
    build("qwen2_5_vl").config.save_pretrained(seeing)
    found = report_of(call, capsys, file, "--tokenizer", seeing, "--model-shape", seeing)
    # The bound of the vision tower is 2: 6 images flat, 3 in trees. The bound of the text lies between.
    low, high = sorted([2.0, found["flop_bound"]])
    assert low < found["images"]["flop_bound"] < high
    assert call(str(file), "--tokenizer", str(folder), *SHAPE) == 0
    said = capsys.readouterr().out
    assert "6 images, 3 distinct, of which trees compute 3; they take 36 of its tokens, 18 with sharing" in said


def test_a_image_is_shown_as_one_marked_span(call, capsys, file, folder):
    assert call(str(file), "--tokenizer", str(folder), "--show", "3") == 0
    said = capsys.readouterr().out
    assert said.count("[image 1: 84x56, 6 tokens, digest ") == 3
    assert said.count("[image 2: 84x56, 6 tokens, digest ") == 3
    assert "image_pad" not in said
    assert call(str(file), "--tokenizer", str(folder), "--show", "3", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["trajectories"]
    digests = [[span["image"]["digest"] for span in row["spans"] if span["image"]] for row in rows]
    assert digests[0] == digests[1]
    assert digests[0][0] == digests[2][0]
    assert digests[0][1] != digests[2][1]
    # Sharing ends before the image that differs, although its ids are the same.
    shared = [[span["shared"] for span in row["spans"] if span["image"]] for row in rows]
    assert shared == [[True, True], [True, True], [True, False]]
    assert sum(span["num_tokens"] for span in rows[2]["spans"]) == rows[2]["num_tokens"]


def test_the_page_shows_small_copies_and_loads_nothing(call, capsys, file, folder, tmp_path):
    page = tmp_path / "page.html"
    assert call(str(file), "--tokenizer", str(folder), "--html", str(page)) == 0
    text = page.read_text()
    assert text.count('<img src="data:image/jpeg;base64,') == 6
    assert np.all([f"[image {number}: 84x56, 6 tokens" in text for number in (1, 2)])
    assert '<img src="http' not in text
