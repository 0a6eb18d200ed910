"""The rows of the data that `treering sft` trains on, and what it logs about them."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

from treering.cli.corpus import Corpus, load_corpus
from treering.config.record import load
from treering.config.sft_config import SftConfig
from treering.errors import ConfigError, InputError

LENGTHS = (3, 6, 4, 9)
"""Trajectories of four tasks; all tokens but the first two are trained, in turns of two tokens."""


def row(task: int, size: int, **fields: object) -> dict[str, object]:
    mask = [0, 0, *([1, 1, 0] * size)][:size]
    return {"task_id": task, "tokens": [10 * task + i for i in range(size)], "loss_mask": mask, **fields}


def write(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def read(folder: Path, *overrides: str, files: str = '["a.jsonl"]') -> Corpus:
    settings = ["train.num_steps=1", f"data.files={files}", *overrides]
    return load_corpus(load(SftConfig, None, settings).data, config_dir=folder)


def sizes(corpus: Corpus) -> list[int]:
    return [sequence.size for task in corpus.tasks for sequence in task.sequences]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "a.jsonl", *(row(task, size) for task, size in enumerate(LENGTHS)))
    return tmp_path


def test_overlong_sequences_are_named_dropped_or_cut_and_counted(folder: Path) -> None:
    refused = r"a.jsonl:2: 6 tokens, above data.max_length = 5; .*data.overlong = \"drop\" or \"cut\""
    with pytest.raises(InputError, match=refused):
        read(folder, "data.max_length=5")
    dropped = read(folder, "data.max_length=5", 'data.overlong="drop"')
    assert sizes(dropped) == [3, 4]
    assert "2 of 4 sequences dropped by data.max_length = 5" in dropped.notes
    cut = read(folder, "data.max_length=5", 'data.overlong="cut"')
    assert sizes(cut) == [3, 5, 4, 5]
    assert "2 of 4 sequences cut to data.max_length = 5" in cut.notes
    assert read(folder, "data.max_length=9").notes == ()
    write(folder / "a.jsonl", row(0, 6), row(1, 6, loss_mask=[0, 0, 0, 0, 0, 1]))
    some = read(folder, "data.max_length=5", 'data.overlong="cut"')
    assert "2 of 2 sequences cut to data.max_length = 5, 1 of them before their first trained token" in some.notes


@pytest.mark.parametrize("limit", range(1, 10))
def test_a_cut_sequence_is_a_prefix_with_its_own_mask_and_trains_no_other_end(folder: Path, limit: int) -> None:
    whole = read(folder).tasks
    if limit < 3:
        told = rf"4 tasks have none: 4 of 4 sequences cut to data.max_length = {limit}, 4 of them before their first"
        with pytest.raises(InputError, match=f"{told} trained token; raise it"):
            read(folder, f"data.max_length={limit}", 'data.overlong="cut"')
        return
    for task in read(folder, f"data.max_length={limit}", 'data.overlong="cut"').tasks:
        full = whole[task.task_id]
        size = min(limit, LENGTHS[task.task_id])
        assert task.sequences[0].tolist() == full.sequences[0][:size].tolist()
        assert task.loss_masks[0].tolist() == full.loss_masks[0][:size].tolist()


def test_a_limit_that_leaves_nothing_is_refused(folder: Path) -> None:
    write(folder / "a.jsonl", *(row(task, size, reward=1.0) for task, size in enumerate(LENGTHS)))
    with pytest.raises(InputError, match=r"no trajectory to train: 4 of 4 sequences dropped by data.max_length = 2; "):
        read(folder, "data.max_length=2", 'data.overlong="drop"')


def test_what_becomes_of_overlong_sequences_needs_a_limit(folder: Path) -> None:
    with pytest.raises(ConfigError, match="which is not set; set max_length"):
        read(folder, 'data.overlong="cut"')


def test_rewards_are_a_filter_or_are_said(folder: Path) -> None:
    rewards = (0.0, 1.0, None, 0.5)
    write(folder / "a.jsonl", *(row(task, 4, reward=reward) for task, reward in enumerate(rewards)))
    (said,) = read(folder).notes
    assert said.startswith("3 sequences have rewards, 0 to 1; all are trained alike")
    best = read(folder, "data.min_reward=0.5")
    assert [task.task_id for task in best.tasks] == [1, 3]
    assert best.notes == ("2 of 4 sequences dropped by data.min_reward = 0.5, 1 of them without a reward",)
    assert len(read(folder, "data.min_reward=-1.0").tasks) == 3
    with pytest.raises(InputError, match=r"no trajectory to train: 4 of 4 sequences dropped by data.min_reward = 2"):
        read(folder, "data.min_reward=2.0")


SAME = {
    "again": '["a.jsonl", "a.jsonl"]',
    "pattern": '["a.jsonl", "a*.jsonl"]',
    "link": '["a.jsonl", "link.jsonl"]',
    "copy": '["a.jsonl", "copy.jsonl"]',
    "compressed": '["a.jsonl", "a.jsonl.gz"]',
    "spelled": '["a.jsonl", "../" + folder + "/a.jsonl"]',
}


@pytest.mark.parametrize("name", SAME)
def test_a_file_given_twice_is_reported_under_both_names(folder: Path, name: str) -> None:
    (folder / "link.jsonl").symlink_to(folder / "a.jsonl")
    shutil.copy(folder / "a.jsonl", folder / "copy.jsonl")
    (folder / "a.jsonl.gz").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes()))
    files = SAME[name].replace('" + folder + "', folder.name)
    corpus = read(folder, files=files)
    assert len(sizes(corpus)) == 2 * len(LENGTHS)
    (said,) = (note for note in corpus.notes if "hold the same data, so it is trained twice" in note)
    assert str(folder / "a.jsonl") in said


def test_files_of_other_data_are_not_said(folder: Path) -> None:
    write(folder / "b.jsonl", *(row(task, size, loss_mask=[1] * size) for task, size in enumerate(LENGTHS)))
    write(folder / "c.jsonl", *(row(task + 1, size) for task, size in enumerate(LENGTHS)))
    assert read(folder, files='["a.jsonl", "b.jsonl", "c.jsonl"]').notes == ()


def test_a_set_without_a_trained_token_is_refused(folder: Path) -> None:
    write(folder / "a.jsonl", row(0, 4, loss_mask=[0, 0, 0, 0]), row(1, 1, loss_mask=[1]))
    with pytest.raises(InputError, match="training needs a trained token, but 2 tasks have none"):
        read(folder)
