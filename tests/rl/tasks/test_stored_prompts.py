"""Prompts stored in files equal the given ones, take no memory, and are tokenized once for all starts."""

import json
import pickle
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tests.data.cache.datasets import dataset_of
from tests.data.images.vlm_folder import as_bytes, image, make_folder
from treering.data import RenderedTrajectory
from treering.data.cache.dataset import TokenDataset
from treering.data.cache.folder import entries
from treering.data.rendering.encoder import Encoder
from treering.errors import DataWarning, InputError, StateError
from treering.rl.tasks import prompts_file
from treering.rl.tasks.prompts_file import ChosenPrompts, PromptsFile, PromptWriter, prompt_of
from treering.rl.tasks.task import Prompt


def fields_of(prompt: Prompt) -> tuple[object, ...]:
    images = [(placed.start, placed.image.digest, placed.image.values.tobytes()) for placed in prompt.images]
    tokens = (prompt.tokens.dtype, prompt.tokens.tolist())
    return type(prompt.prompt_id), prompt.prompt_id, tokens, prompt.answer, prompt.columns, images


def rows_of(num_prompts: int) -> TokenDataset:
    """Return tokens in rows, of which row n has n + 1 tokens, at most 7."""
    sizes = [1 + number % 7 for number in range(num_prompts)]
    rows = [
        RenderedTrajectory(
            task_id=0,
            tokens=np.arange(size, dtype=np.int32),
            loss_mask=np.zeros(size, np.bool_),
            turn_ends=np.zeros(0, np.int32),
            index=number,
        )
        for number, size in enumerate(sizes)
    ]
    return dataset_of(rows)


def columns_of(number: int) -> dict[str, object]:
    return {"text": f"{number} " + "x" * 1000, "unit": {"factors": [0.5, None]}, "when": b"\xff"}


def test_prompts_are_those_that_were_given_in_any_order_and_slice() -> None:
    rows = rows_of(18)
    with PromptWriter(rows) as writer:
        # Every second row.
        given = [prompt_of(rows, 2 * number, number or "zero", None, columns_of(number)) for number in range(9)]
        for number, prompt in enumerate(given):
            writer.add(2 * number, prompt)
        stored = writer.prompts()
    assert list(map(fields_of, stored)) == list(map(fields_of, given))
    assert fields_of(stored[-2]) == fields_of(given[7])
    assert list(map(fields_of, stored[1:8:3][1:])) == list(map(fields_of, given[4:8:3]))
    chosen = ChosenPrompts(stored, [5, 0, 2])
    assert [prompt.prompt_id for prompt in chosen[::-1]] == [2, "zero", 5]
    assert stored[0].tokens.flags.writeable
    for missing in (9, -10):
        with pytest.raises(IndexError):
            stored[missing]


def test_prompts_take_sixteen_bytes_each_besides_their_rows() -> None:
    rows = rows_of(2000)
    tracemalloc.start()
    try:
        with PromptWriter(rows) as writer:
            for number in range(2000):
                writer.add(number, prompt_of(rows, number, number, None, columns_of(number)))
            stored = writer.prompts()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(stored) == 2000
    # Growing arrays have up to an eighth more, a file a buffer; a prompt has a kilobyte.
    assert held < 2000 * 18 + 32_000


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(StateError, match=r"cannot be written \(No such file or directory\).*TMPDIR"):
        PromptWriter(rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("vlm"), "qwen")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Prompts with and without ids, an image, a repeated prompt, and a long one."""
    (tmp_path / "a.png").write_bytes(as_bytes(image(0, (56, 56))))
    records = [
        {"question": "the tool", "answer": 2.50, "level": 1.5},
        {"question": "the agent", "images": ["a.png"], "answer": "1", "id": "seen"},
        {"question": "the tool", "answer": "3"},
        {"question": "the agent " * 40, "answer": "4"},
        {"prompt": [{"role": "user", "content": "tool"}], "answer": "5", "task_id": 7},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def read(file: Path, folder: Path, cache: Path | None, **options: int) -> PromptsFile:
    return PromptsFile(file, tokenizer=folder, reward="exact_answer", cache=cache, **options)


def said_of(task: PromptsFile) -> tuple[object, ...]:
    # Processes that sample receive them pickled.
    prompts = [fields_of(pickle.loads(pickle.dumps(prompt))) for prompt in task.prompts]
    return prompts, task.num_overlong, task.num_duplicates, task.form_note, task.notes


@pytest.mark.parametrize("limits", [{}, {"max_prompt_tokens": 50}, {"max_prompts": 2}])
def test_a_second_start_tokenizes_nothing_and_has_the_same_prompts(
    file: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int]
) -> None:
    expected = said_of(read(file, folder, None, **limits))
    assert said_of(read(file, folder, tmp_path / "cache", **limits)) == expected
    monkeypatch.setattr(Encoder, "encode", lambda *_: pytest.fail("tokenized"))
    assert said_of(read(file, folder, tmp_path / "cache", **limits)) == expected
    assert [entry.source for entry in entries(tmp_path / "cache")] == [str(file)]


def test_a_limit_of_tokens_alone_takes_the_same_cache_and_whatever_changes_tokens_another(
    file: Path, folder: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    kept = [len(read(file, folder, cache, max_prompt_tokens=limit).prompts) for limit in (50, 1000)]
    assert (kept, len(entries(cache))) == ([3, 4], 1)
    read(file, folder, cache, max_prompts=2)
    file.write_text(file.read_text().replace("tool", "user"))
    before = read(file, folder, cache).prompts[1].content
    assert len(entries(cache)) == 3
    (tmp_path / "a.png").write_bytes(as_bytes(image(1, (56, 56))))
    assert read(file, folder, cache).prompts[1].content == read(file, folder, None).prompts[1].content != before


def test_a_reward_is_checked_at_each_start_and_a_damaged_cache_is_made_again(
    file: Path, folder: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    expected = said_of(read(file, folder, cache))
    with file.open("a") as stream:
        stream.write('{"question": "user"}\n')
    own = PromptsFile(file, tokenizer=folder, reward="tests.rl.tasks.test_prompts_file:measured", cache=cache)
    assert len(own.prompts) == 5
    with pytest.raises(InputError, match=r"prompts\.jsonl:6: the reward exact_answer needs an answer, got None"):
        read(file, folder, cache)
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:5]))
    for entry in entries(cache):
        (entry.folder / "tokens.npy").write_bytes(b"")
    with pytest.warns(DataWarning, match="cache cannot be used and is made again"):
        assert said_of(read(file, folder, cache)) == expected
    with pytest.warns(DataWarning, match="keeps no cache of it"):
        assert said_of(read(file, folder, file)) == expected


def test_a_file_that_changes_after_its_tokens_were_opened_is_refused(
    file: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = prompts_file.open_built

    def open_built(*args: object, **named: object) -> object:
        tokens = opened(*args, **named)  # type: ignore[arg-type]
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(lines[::-1]))
        return tokens

    monkeypatch.setattr(prompts_file, "open_built", open_built)
    with pytest.raises(InputError, match="changed while it was read"):
        read(file, folder, tmp_path / "cache")
