"""Prompts with images: the processor's tokens and positions, ids by pixels, and groups trained on forests."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.data.images.vlm_folder import as_bytes, as_uri, image, make_folder
from tests.rl.rollouts import rollout_of
from treering.data import Renderer, read_trajectories
from treering.engine.protocol import Sampling
from treering.rl.batch import make_rl_batch
from treering.rl.collect import Collection, Group
from treering.rl.tasks.prompts_file import PromptsFile
from treering.rl.tasks.task import Prompt

SIZE = (56, 56)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("vlm"), "qwen")


def uri(seed: int) -> str:
    return as_uri(as_bytes(image(seed, SIZE)))


def asked(seed: int) -> list[object]:
    part = {"type": "image_url", "image_url": {"url": uri(seed)}}
    return [{"role": "user", "content": [part, {"type": "text", "text": "the tool"}]}]


def read(path: Path, folder: Path, *records: object) -> PromptsFile:
    file = path / "prompts.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return PromptsFile(file, tokenizer=folder, reward="exact_answer")


def test_a_prompt_is_what_stands_before_an_answer(tmp_path: Path, folder: Path) -> None:
    [prompt] = read(tmp_path, folder, {"prompt": asked(0), "answer": "1"}).prompts
    answer = {"role": "assistant", "content": "the agent"}
    (tmp_path / "chat.jsonl").write_text(json.dumps({"task_id": 0, "messages": [*asked(0), answer]}))
    [chat] = Renderer(tokenizer=folder).render(read_trajectories(tmp_path / "chat.jsonl"))
    num_prompt = int(chat.loss_mask.argmax())
    assert prompt.tokens.tolist() == chat.tokens[:num_prompt].tolist()
    [own], [expected] = prompt.images, chat.images
    assert (own.start, own.image.digest) == (expected.start, expected.image.digest)


def test_prompts_with_different_images_are_distinguished(tmp_path: Path, folder: Path) -> None:
    task = read(tmp_path, folder, *({"prompt": asked(seed), "answer": "1"} for seed in (0, 1, 0)))
    first, second = task.prompts
    assert first.tokens.tolist() == second.tokens.tolist()
    assert first.prompt_id != second.prompt_id
    assert first.content != second.content
    assert task.num_duplicates == 1


def test_images_of_columns_stand_before_the_text(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "a.png").write_bytes(as_bytes(image(0, SIZE)))
    beside = {"question": "the tool", "images": ["a.png"], "answer": "1"}
    with_part = {
        "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "the tool"}]}],
        "image": "a.png",
        "answer": "1",
        "id": "with a part",
    }
    task = read(tmp_path, folder, beside, with_part, {"prompt": asked(0), "answer": "1", "id": "of a part"})
    assert len({prompt.content for prompt in task.prompts}) == 1
    assert len(task.notes) == 1
    assert task.notes[0].endswith("as TRL puts them (1 prompt)")


def test_a_group_is_asked_and_trained_with_its_images(tmp_path: Path, folder: Path) -> None:
    task = read(tmp_path, folder, *({"prompt": asked(seed), "answer": "1"} for seed in (0, 1)))
    collection = Collection(task.prompts, {}, group_size=2, sampling=Sampling(max_tokens=2))
    asked_for = [[one.image.digest for one in request.images] for request in collection.requests()]
    assert asked_for == [[one.image.digest for one in p.images] for p in task.prompts for _ in "ab"]
    batch = make_rl_batch([_group(prompt) for prompt in task.prompts], estimator="grpo", layout="tree")
    for forest, prompt in zip(batch.trees.forests, task.prompts, strict=True):
        [placed] = prompt.images
        assert [one.digest for one in forest.images] == [placed.image.digest]
        assert np.flatnonzero(forest.tokens < 0).tolist() == list(range(placed.start, placed.stop))
        assert forest.num_tokens == prompt.tokens.size + 2


def _group(prompt: Prompt) -> Group:
    return Group(
        prompt=prompt,
        rollouts=tuple(rollout_of([5 + i], prompt_id=prompt.prompt_id, sample=i, reward=float(i)) for i in range(2)),
    )
