import json

import pytest

from tests.data.formats.reading import ANSWER, QUESTION
from treering import extras
from treering.data import read_trajectories
from treering.errors import DataWarning, InputError, MissingExtraError

RECORDS = [{"task_id": number, "messages": [QUESTION, ANSWER]} for number in (1, 2, 3)]


@pytest.fixture(scope="module")
def arrow():
    return pytest.importorskip("pyarrow", reason="needs pyarrow, of treering[datasets]")


def write_parquet(arrow, file, records):
    from pyarrow import parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.Table.from_pylist(records), file)


def save_dataset(arrow, folder, records):
    """Save a folder as `Dataset.save_to_disk` writes it: Arrow streams, listed in state.json."""
    folder.mkdir(parents=True)
    names = []
    for i, part in enumerate((records[:1], records[1:])):
        table = arrow.Table.from_pylist(part)
        names.append(f"data-{i:05d}-of-00002.arrow")
        with arrow.OSFile(str(folder / names[-1]), "wb") as sink, arrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def ids(path):
    return [one.task_id for one in read_trajectories(path)]


def test_rows_of_parquet_and_arrow_files_are_records_whatever_the_name(arrow, tmp_path):
    write_parquet(arrow, tmp_path / "set.jsonl", RECORDS)
    assert ids(tmp_path / "set.jsonl") == [1, 2, 3]
    table = arrow.Table.from_pylist(RECORDS)
    with arrow.OSFile(str(tmp_path / "set.arrow"), "wb") as sink, arrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert ids(tmp_path / "set.arrow") == [1, 2, 3]


def test_a_saved_dataset_is_read_in_order(arrow, tmp_path):
    save_dataset(arrow, tmp_path / "set", RECORDS)
    assert ids(tmp_path / "set") == [1, 2, 3]


def test_of_several_splits_train_is_read_and_said_and_another_by_its_folder(arrow, tmp_path):
    save_dataset(arrow, tmp_path / "train", RECORDS)
    save_dataset(arrow, tmp_path / "test", RECORDS[2:])
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    with pytest.warns(DataWarning, match="of the splits train, test, train is read"):
        assert ids(tmp_path) == [1, 2, 3]
    assert ids(tmp_path / "test") == [3]
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["test"]}))
    assert ids(tmp_path) == [3]
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["a", "b"]}))
    with pytest.raises(InputError, match=r"one split of a dataset is read, got a, b; name .*/SPLIT"):
        read_trajectories(tmp_path)


@pytest.mark.parametrize("digest", ["", "-{}0f1e2d3c4b5a697"], ids=["new", "old"])
def test_a_folder_of_parquet_files_is_one_set(arrow, tmp_path, digest):
    for i, part in enumerate((RECORDS[:2], RECORDS[2:])):
        write_parquet(arrow, tmp_path / "data" / f"train-{i:05d}-of-00002{digest.format(i)}.parquet", part)
    assert ids(tmp_path) == [1, 2, 3]
    write_parquet(arrow, tmp_path / "data" / f"test-00000-of-00001{digest.format(2)}.parquet", RECORDS[:1])
    with pytest.warns(DataWarning, match="of the splits test, train, train is read"):
        assert ids(tmp_path) == [1, 2, 3]


def test_keys_that_a_table_adds_to_an_object_are_removed_and_reported(arrow, tmp_path):
    def calling(**arguments):
        call = {"name": "f", "arguments": arguments}
        return {"task_id": 1, "messages": [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]}

    write_parquet(arrow, tmp_path / "set.parquet", [calling(x=1), calling(y="b")])
    with pytest.warns(DataWarning, match="null values in the arguments of calls or in schemas are read as absent keys"):
        found = read_trajectories(tmp_path / "set.parquet")
    assert [one.messages[1].tool_calls[0].arguments for one in found] == [{"x": 1}, {"y": "b"}]


def test_a_bad_row_and_a_damaged_file_are_named(arrow, tmp_path):
    write_parquet(arrow, tmp_path / "set.parquet", [*RECORDS, {"task_id": 4, "messages": []}])
    with pytest.raises(InputError, match=r"set\.parquet: row 4: messages must hold at least one"):
        read_trajectories(tmp_path / "set.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "set.parquet").read_bytes()[:200])
    with pytest.raises(InputError, match=r"cut\.parquet: a table cannot be read"):
        read_trajectories(tmp_path / "cut.parquet")


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "set.parquet").write_bytes(b"PAR1....")
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"needs pyarrow: pip install 'pyarrow>=17'"):
        read_trajectories(tmp_path / "set.parquet")
