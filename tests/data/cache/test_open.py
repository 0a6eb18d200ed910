"""Laws of the cache: its arrays equal direct rendering; after damage, kills and races it is whole or unused."""

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import fields
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.rendering.chat_folder import with_template
from tests.data.rendering.test_template import OPENING
from tests.killing import FileOperations
from treering.data import (
    Message,
    RenderedTrajectory,
    Renderer,
    Trajectory,
    by_task,
    read_trajectories,
    write_trajectories,
)
from treering.data.cache import build_dataset as build_module
from treering.data.cache import dataset as dataset_module
from treering.data.cache import folder as folder_module
from treering.data.cache.build_dataset import DataNotes, num_distinct
from treering.data.cache.dataset import TokenDataset
from treering.data.cache.folder import cache_folder, clear, entries
from treering.data.cache.open import cache_key, open_dataset
from treering.errors import DataWarning, InputError, StateError
from treering.tree.forest import Forest


def same(one: RenderedTrajectory, other: RenderedTrajectory) -> bool:
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in fields(RenderedTrajectory)]
    return all(
        np.array_equal(left, right) and left.dtype == right.dtype if isinstance(left, np.ndarray) else left == right
        for left, right in pairs
    )


def all_same(rows: list[RenderedTrajectory], others: list[RenderedTrajectory]) -> bool:
    return len(rows) == len(others) and all(map(same, rows, others))


def agrees(dataset: TokenDataset, rendered: list[RenderedTrajectory]) -> bool:
    tasks, expected = [dataset.task(i) for i in range(dataset.num_tasks)], by_task(rendered)
    return all_same([dataset.row(i) for i in range(dataset.num_rows)], rendered) and (
        len(tasks) == len(expected) and all(map(all_same, tasks, expected))
    )


finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    size = draw(st.integers(1, 6))
    per_token = st.lists(finite, min_size=size, max_size=size).map(np.array)
    advantages = draw(st.none() | per_token)
    return Trajectory(
        task_id=draw(st.sampled_from(["a", "b", 1, -(2**70)])),
        tokens=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=size, max_size=size)), np.int32),
        loss_mask=draw(st.none() | st.lists(st.booleans(), min_size=size, max_size=size).map(np.array)),
        logprobs=draw(st.none() | per_token),
        advantages=advantages,
        advantage=None if advantages is not None else draw(st.none() | finite),
        reward=draw(st.none() | finite),
        epoch=draw(st.none() | st.integers(0, 2**31 - 1)),
        step=draw(st.none() | st.integers(0, 2**31 - 1)),
    )


@given(st.lists(trajectories(), min_size=1, max_size=8), st.integers(1, 2000))
def test_the_rows_are_those_of_direct_rendering_however_the_parts_are_cut(
    tmp_path_factory: pytest.TempPathFactory, given_rows: list[Trajectory], part_size: int
) -> None:
    folder = tmp_path_factory.mktemp("random")
    file = folder / "set.jsonl"
    write_trajectories(file, given_rows)
    rendered = Renderer(tokenizer=None).render(read_trajectories(file))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "PART_SIZE", part_size)
        # Without a cache, built, and out of the cache.
        datasets = [
            open_dataset(file, Renderer(tokenizer=None), folder=place)
            for place in (None, folder / "cache", folder / "cache")
        ]
    for dataset in datasets:
        assert agrees(dataset, rendered)
        known = [(one.epoch, one.step) for one in given_rows]
        found = dataset.rows[["epoch", "step"]].tolist()
        assert found == [tuple(-1 if count is None else count for count in pair) for pair in known]
        assert dataset.rows["num_sampled"].tolist() == [int(one.loss_mask.sum()) for one in rendered]
        assert dataset.rows["num_prompt_tokens"].tolist() == [one.num_prompt_tokens for one in rendered]
        assert dataset.last_turn_ends.tolist() == [max([0, *one.turn_ends.tolist()]) for one in rendered]
        dataset.release()
        assert agrees(dataset, rendered)
    assert len(entries(folder / "cache")) == 1


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Two tasks whose rows alternate, with texts that contain special tokens."""
    file = tmp_path / "chats.jsonl"
    words = ["On the Rhine.", "At <|im_end|> a lake.", "In the Alps.", "Nowhere."]
    rows = [
        Trajectory(
            task_id=f"task {i % 2}",
            messages=(Message(role="user", content=f"Where, {i}?"), Message(role="assistant", content=word)),
            reward=i / 4,
        )
        for i, word in enumerate(words)
    ]
    write_trajectories(file, rows)
    return file


@pytest.mark.parametrize("template", ["plain", "hf"])
def test_chats_and_their_notes_are_the_same_out_of_the_cache(
    chats: Path, real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(build_module, "PART_SIZE", 1)
    direct = Renderer(tokenizer=real_data / "tokenizer", template=template)
    with warnings.catch_warnings(record=True) as expected:
        warnings.simplefilter("always")
        rendered = direct.render(read_trajectories(chats))
    for _ in range(2):
        renderer = Renderer(tokenizer=real_data / "tokenizer", template=template)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dataset = open_dataset(chats, renderer, folder=tmp_path / "cache")
        assert agrees(dataset, rendered)
        assert [str(each.message) for each in caught] == [str(each.message) for each in expected]
        assert len(caught) == (template == "hf")
        assert dataset.facts.form == direct.form_note


def tokens(folder: Path, name: str = "set.jsonl") -> Path:
    file = folder / name
    rows = [Trajectory(task_id=i % 2, tokens=np.arange(3 + i, dtype=np.int32), reward=0.5) for i in range(3)]
    write_trajectories(file, rows)
    return file


def is_built(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are built from now on."""
    built: list[Path] = []
    direct = build_module.build

    def build(folder: Path, path: Path, *rest: object) -> object:
        built.append(path)
        return direct(folder, path, *rest)

    monkeypatch.setattr("treering.data.cache.open.build", build)
    return built


def test_a_second_start_builds_nothing_and_reads_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, built = tokens(tmp_path), is_built(monkeypatch)
    first = open_dataset(file, Renderer(tokenizer=None), folder=tmp_path / "cache")
    monkeypatch.setattr(build_module, "read_records", lambda *_, **__: pytest.fail("read"))
    again = open_dataset(file, Renderer(tokenizer=None), folder=tmp_path / "cache")
    assert built == [file]
    assert agrees(again, [first.row(i) for i in range(3)])


def test_a_damaged_byte_anywhere_is_found_and_the_cache_is_built_again(tmp_path: Path) -> None:
    file = tokens(tmp_path)
    rendered = Renderer(tokenizer=None).render(read_trajectories(file))
    open_dataset(file, Renderer(tokenizer=None), folder=tmp_path / "cache")
    [entry] = entries(tmp_path / "cache")
    whole = tmp_path / "whole"
    shutil.copytree(entry.folder, whole)
    names = sorted(path.name for path in whole.iterdir())
    assert len(names) == 13
    for name in names:
        content = (whole / name).read_bytes()
        for place in range(0, len(content), max(1, len(content) // 6)):
            damaged = bytearray(content)
            damaged[place] ^= 1
            (entry.folder / name).write_bytes(damaged)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                dataset = open_dataset(file, Renderer(tokenizer=None), folder=tmp_path / "cache")
            assert agrees(dataset, rendered)
            # A changed byte of JSON may leave its meaning, such as the case of a name that nothing reads.
            assert caught or name == "manifest.json", (name, place)
            assert all("its cache cannot be used and is made again" in str(each.message) for each in caught)
            shutil.rmtree(entry.folder)
            shutil.copytree(whole, entry.folder)


@pytest.mark.parametrize("damage", ["cut", "missing", "empty", "file"])
def test_a_half_written_or_foreign_cache_is_built_again(tmp_path: Path, damage: str) -> None:
    file = tokens(tmp_path)
    open_dataset(file, Renderer(tokenizer=None), folder=tmp_path / "cache")
    [entry] = entries(tmp_path / "cache")
    if damage == "cut":
        os.truncate(entry.folder / "tokens.npy", 130)
    elif damage == "missing":
        (entry.folder / "rows.npy").unlink()
    else:
        shutil.rmtree(entry.folder)
        entry.folder.mkdir() if damage == "empty" else entry.folder.write_text("foreign")
    with pytest.warns(DataWarning, match="is made again"):
        dataset = open_dataset(file, Renderer(tokenizer=None), folder=tmp_path / "cache")
    assert agrees(dataset, Renderer(tokenizer=None).render(read_trajectories(file)))
    # Without a warning, which would be an error.
    open_dataset(file, Renderer(tokenizer=None), folder=tmp_path / "cache")


def test_a_kill_at_any_file_operation_leaves_a_usable_cache_or_none(tmp_path: Path) -> None:
    file = tokens(tmp_path)
    rendered = Renderer(tokenizer=None).render(read_trajectories(file))
    number = 0
    while not is_survived(file, tmp_path / "cache", kill_at=number + 1):
        number += 1
        dataset = open_dataset(file, Renderer(tokenizer=None), folder=tmp_path / "cache")
        assert agrees(dataset, rendered)
        assert len(entries(tmp_path / "cache")) == 1
        clear(tmp_path / "cache")
        assert list((tmp_path / "cache").iterdir()) == []
    assert number > 20


def is_survived(file: Path, cache: Path, *, kill_at: int) -> bool:
    """Return whether a process killed at a file operation in the cache's folder has opened a dataset by then."""
    child = os.fork()
    if child == 0:
        FileOperations(cache, kill_at)
        open_dataset(file, Renderer(tokenizer=None), folder=cache)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


OPENS = """
import sys
from pathlib import Path
from treering.data import Renderer
from treering.data.cache.open import open_dataset
print(open_dataset(sys.argv[1], Renderer(tokenizer=None), folder=Path(sys.argv[2])).flat_tokens[0].tolist())
"""


def test_several_processes_may_build_one_cache_at_once(tmp_path: Path) -> None:
    file, cache = tokens(tmp_path), tmp_path / "cache"
    command = [sys.executable, "-W", "error", "-c", OPENS, str(file), str(cache)]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = [worker.communicate(timeout=120)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert set(found) == {f"{[0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4]}\n"}
    assert len(list(cache.iterdir())) == 1


def test_a_cache_that_another_process_publishes_first_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tokens(tmp_path)
    direct = build_module.build

    def build(folder: Path, *rest: object) -> object:
        facts = direct(folder, *rest)
        monkeypatch.setattr("treering.data.cache.open.build", direct)
        open_dataset(file, Renderer(tokenizer=None), folder=tmp_path / "cache")
        return facts

    monkeypatch.setattr("treering.data.cache.open.build", build)
    dataset = open_dataset(file, Renderer(tokenizer=None), folder=tmp_path / "cache")
    assert agrees(dataset, Renderer(tokenizer=None).render(read_trajectories(file)))
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_the_key_changes_with_whatever_the_arrays_depend_on(tmp_path: Path) -> None:
    file = tokens(tmp_path)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    options = {"format": "auto"}
    keys = [cache_key(file, Renderer(tokenizer=folder), options)]
    assert cache_key(file, Renderer(tokenizer=folder), options) == keys[0]
    keys.append(cache_key(file, Renderer(tokenizer=None), options))
    keys.append(cache_key(file, Renderer(tokenizer=folder, template="plain"), options))
    keys.append(cache_key(file, Renderer(tokenizer=folder), {"format": "chat"}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    keys.append(cache_key(file, Renderer(tokenizer=folder), options))
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}")
    keys += [cache_key(file, Renderer(tokenizer=folder, date=date(year, 1, 1)), options) for year in (2024, 2025)]
    # The same size and time, with another byte.
    times = file.stat()
    file.write_bytes(file.read_bytes().replace(b"0.5", b"0.7"))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    keys.append(cache_key(file, Renderer(tokenizer=None), options))
    assert len(set(keys)) == len(keys)


def test_the_key_changes_with_a_table_in_a_linked_folder(tmp_path: Path) -> None:
    for name in ("elsewhere", "set"):
        (tmp_path / name).mkdir()
    (tmp_path / "set" / "data").symlink_to(tmp_path / "elsewhere")
    keys = set()
    for content in (b"one", b"two"):
        (tmp_path / "elsewhere" / "a.parquet").write_bytes(content)
        keys.add(cache_key(tmp_path / "set", Renderer(tokenizer=None), {}))
    assert len(keys) == 2


def test_a_copy_under_another_name_shares_the_cache_and_is_called_by_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt_ids": [1], "completion_ids": [2], "completion_logprobs": [-0.5]}\n' * 2)
    copy = tmp_path / "b.jsonl"
    shutil.copy(file, copy)
    built = is_built(monkeypatch)
    for path in (file, copy):
        with pytest.warns(DataWarning, match=f"^{path}: no task is named"):
            dataset = open_dataset(path, Renderer(tokenizer=None), folder=tmp_path / "c")
        assert dataset.facts.source == str(path)
    assert built == [file]


def test_a_folder_that_cannot_be_written_keeps_nothing_and_is_reported(tmp_path: Path) -> None:
    file = tokens(tmp_path)
    (tmp_path / "taken").write_text("a file")
    with pytest.warns(DataWarning, match="keeps no cache of it"):
        dataset = open_dataset(file, Renderer(tokenizer=None), folder=tmp_path / "taken")
    assert agrees(dataset, Renderer(tokenizer=None).render(read_trajectories(file)))


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("when", ["rendered", "named"])
def test_a_file_that_changes_while_it_is_read_is_refused_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool, when: str
) -> None:
    file, folder = tmp_path / "set.jsonl", tmp_path / "caches"
    write_trajectories(file, [Trajectory(task_id=n, tokens=np.array([1, 2], np.int32)) for n in range(3)])
    text = file.read_bytes()

    def rewriting(direct: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            found = direct(*given)
            file.write_bytes(text.replace(b"2", b"3"))
            return found

        return call

    renderer = Renderer(tokenizer=None)
    with monkeypatch.context() as patch:
        if when == "rendered":
            patch.setattr(renderer, "render_batch", rewriting(renderer.render_batch))
        else:
            # Without a cache no key is computed.
            patch.setattr("treering.data.cache.open.cache_key", rewriting(cache_key))
        if keeps or when == "rendered":
            with pytest.raises(InputError, match="changed while it was read"):
                open_dataset(file, renderer, folder=folder if keeps else None)
    file.write_bytes(text)
    assert open_dataset(file, Renderer(tokenizer=None), folder=folder).row(0).tokens.tolist() == [1, 2]


def test_missing_room_for_temporary_files_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_trajectories(tmp_path / "set.jsonl", [Trajectory(task_id=1, tokens=np.array([1, 2], np.int32))])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with pytest.raises(StateError, match=r"cannot be written \(No such file or directory\).*TMPDIR"):
        open_dataset(tmp_path / "set.jsonl", Renderer(tokenizer=None), folder=None)


def test_errors_are_those_of_reading_and_leave_nothing(tmp_path: Path) -> None:
    file = tokens(tmp_path)
    file.write_bytes(file.read_bytes() + b'{"task_id": 1}\n')
    for folder in (None, tmp_path / "cache"):
        with pytest.raises(InputError, match=r"set\.jsonl:4: "):
            open_dataset(file, Renderer(tokenizer=None), folder=folder)
        with pytest.raises(InputError, match="cannot be read"):
            open_dataset(tmp_path / "absent.jsonl", Renderer(tokenizer=None), folder=folder)
    assert list((tmp_path / "cache").iterdir()) == []


def test_notes_come_before_a_refusal_of_rendering_and_not_with_one_of_reading(tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    unnamed = '{"prompt": "a", "completion": "b"}\n'
    file.write_text(unnamed)
    with (
        pytest.warns(DataWarning, match=f"^{file}: no task is named"),
        pytest.raises(InputError, match="messages need a tokenizer"),
    ):
        open_dataset(file, Renderer(tokenizer=None), folder=tmp_path / "cache")
    file.write_text(f"{unnamed}[]\n")
    with pytest.raises(InputError, match=r"set\.jsonl:2: "):
        open_dataset(file, Renderer(tokenizer=None), folder=tmp_path / "cache")


def test_drafts_of_killed_processes_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with folder_module.drafted(cache) as living:
        dead = cache / ".unfinished-dead"
        dead.mkdir()
        (dead / "tokens.npy").write_text("half")
        young = cache / ".unfinished-young"
        young.mkdir()
        for path in (dead, living):
            os.utime(path, (0, 0))
        open_dataset(tokens(tmp_path), Renderer(tokenizer=None), folder=cache)
        assert (living.exists(), dead.exists(), young.exists()) == (True, False, True)
        assert clear(cache) > 0
        assert (living.exists(), young.exists()) == (True, False)
    assert list(cache.iterdir()) == []


def test_what_other_processes_remove_meanwhile_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_dataset(tokens(tmp_path), Renderer(tokenizer=None), folder=tmp_path / "cache")
    direct = os.walk

    def walk(folder: Path) -> list[tuple[str, list[str], list[str]]]:
        found = list(direct(folder))
        shutil.rmtree(folder)
        return found

    monkeypatch.setattr(folder_module.os, "walk", walk)
    assert [entry.num_bytes for entry in entries(tmp_path / "cache")] == [0]
    assert entries(tmp_path / "cache") == []


def test_what_is_mapped_outlives_its_files(tmp_path: Path) -> None:
    dataset = open_dataset(tokens(tmp_path), Renderer(tokenizer=None), folder=tmp_path / "cache")
    expected = [dataset.row(i) for i in range(3)]
    clear(tmp_path / "cache")
    dataset.release()
    assert agrees(dataset, expected)
    assert dataset.row(2).tokens.tolist() == [0, 1, 2, 3, 4]


def num_mapped_bytes() -> int:
    """Return how many bytes of mapped files are resident in this process."""
    return int(Path("/proc/self/statm").read_text().split()[2]) * os.sysconf("SC_PAGE_SIZE")


def test_pages_that_were_read_go_back_to_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_tokens, num_rows = 1 << 18, 8
    file = tmp_path / "set.jsonl"
    write_trajectories(file, [Trajectory(task_id=i, tokens=np.zeros(num_tokens, np.int32)) for i in range(num_rows)])
    num_bytes = 4 * num_tokens
    dataset = open_dataset(file, Renderer(tokenizer=None), folder=tmp_path / "cache")
    before = num_mapped_bytes()
    kept = [dataset.row(i).tokens for i in range(num_rows)]
    assert all(int(tokens.sum()) == 0 for tokens in kept)
    assert num_mapped_bytes() - before > 0.9 * num_rows * num_bytes
    dataset.release()
    assert num_mapped_bytes() - before < 0.1 * num_rows * num_bytes
    # Iterating over the tasks releases pages by itself.
    monkeypatch.setattr(dataset_module, "_RELEASE_TOKENS", num_tokens)
    most = 0
    for [one] in map(dataset.task, range(num_rows)):
        assert int(one.tokens.sum()) == 0
        most = max(most, num_mapped_bytes() - before)
    assert most < 0.5 * num_rows * num_bytes


def test_the_folder_is_that_of_the_variable_else_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREERING_CACHE", "/fast")
    assert cache_folder() == Path("/fast/tokens")
    monkeypatch.delenv("TREERING_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/treering/tokens")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == Path("/home/me/.cache/treering/tokens")


def test_processes_render_the_same_rows_in_the_same_order_and_say_the_same_once(
    chats: Path, real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "PART_SIZE", 1)
    monkeypatch.setattr(build_module, "_LARGE", 1)
    folder = with_template(real_data / "tokenizer", tmp_path, OPENING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)
        expected = Renderer(tokenizer=folder).render(read_trajectories(chats))
    said = []
    for num_workers in (0, 2):
        renderer = Renderer(tokenizer=folder)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dataset = open_dataset(chats, renderer, folder=None, num_workers=num_workers)
        assert agrees(dataset, expected)
        said.append((dataset.facts, [str(each.message) for each in caught]))
    assert said[0] == said[1]
    # The thoughts of the four answers are not recorded.
    assert [text.split(",")[0] for text in said[0][1]] == [
        "the chat template opens a thought before each answer",
        "1 of 8 messages holds the text of special tokens",
    ]


def test_an_error_in_a_process_is_that_of_this_one(chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "PART_SIZE", 1)
    monkeypatch.setattr(build_module, "_LARGE", 1)
    with pytest.raises(InputError, match="messages need a tokenizer"):
        open_dataset(chats, Renderer(tokenizer=None), folder=None, num_workers=2)


def test_token_ids_without_a_mask_are_counted() -> None:
    ids, mask, notes = np.array([5, 6], np.int32), np.array([False, True]), DataNotes()
    some = [Trajectory(task_id=1, tokens=ids, loss_mask=own) for own in (mask, None, None)]
    notes.add(some, Renderer(tokenizer=None).render(some))
    [note] = notes.sentences()
    assert note.startswith("2 of 3 trajectories of token ids have no loss_mask, so every token of theirs is trained")


@given(st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=8), min_size=1, max_size=8))
def test_distinct_tokens_are_those_of_a_forest(branches: list[list[int]]) -> None:
    arrays = [np.array(branch, np.int32) for branch in branches]
    assert num_distinct(arrays) == Forest.from_sequences(arrays).num_tokens
