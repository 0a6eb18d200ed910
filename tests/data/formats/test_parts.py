"""A dataset in parts is read whole or refused; a single part is read with a note."""

import json

import pytest

from treering.data import read_trajectories
from treering.data.formats.arrow import missing_parts
from treering.errors import DataWarning, InputError

pyarrow = pytest.importorskip("pyarrow", reason="the extra treering[datasets] is not installed")
RECORD = {"task_id": 1, "tokens": [5, 6]}


def write(folder, *names):
    from pyarrow import parquet

    folder.mkdir(exist_ok=True)
    for name in names:
        parquet.write_table(pyarrow.Table.from_pylist([RECORD]), folder / name)
    return folder


def test_a_folder_with_missing_parts_is_refused_and_a_whole_one_read(tmp_path):
    folder = write(tmp_path / "set", "train-00000-of-00003.parquet", "train-00002-of-00003.parquet")
    with pytest.raises(InputError, match=r"train-00001-of-00003\.parquet is missing; fetch the folder again"):
        read_trajectories(folder)
    assert len(read_trajectories(write(folder, "train-00001-of-00003.parquet"))) == 3


def test_missing_parts_of_another_split_do_not_matter(tmp_path):
    folder = write(tmp_path / "set", "train-00000-of-00001.parquet", "test-00000-of-00002.parquet")
    with pytest.warns(DataWarning, match="train is read"):
        assert len(read_trajectories(folder)) == 1


def test_a_part_that_is_named_is_read_with_a_word(tmp_path):
    file = tmp_path / "set-1-of-3.jsonl"
    file.write_text(json.dumps(RECORD) + "\n")
    with pytest.warns(DataWarning, match=r"part of a dataset, and set-0-of-3\.jsonl and 1 more are missing"):
        assert len(read_trajectories(file)) == 1


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        (["a-00000-of-00002.json", "a-00001-of-00002.json"], []),
        (["a-1-of-2", "a-2-of-2"], []),
        (["a-2-of-2"], ["a-1-of-2"]),
        (["a-00001-of-00002.parquet"], ["a-00000-of-00002.parquet"]),
        (["one-of-2.json"], []),
        (["a.json"], []),
        ([f"a-0000{i}-of-00002-{i}123456789abcdef.parquet" for i in range(2)], []),
        (["a-00001-of-00002-0123456789abcdef.parquet"], ["a-00000-of-00002.parquet"]),
        (["run-1-of-20261127000000.json"], []),
    ],
)
def test_parts_count_from_0_or_from_1(tmp_path, there, missing):
    for name in there:
        (tmp_path / name).touch()
    assert missing_parts(tmp_path / there[0]) == missing
