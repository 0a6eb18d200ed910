import gzip
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering.data import Message, ToolCall, Trajectory, append_trajectories, read_trajectories, write_trajectories
from treering.data.formats.codec import encode
from treering.data.formats.record_files import whole_lines
from treering.errors import DataWarning, InputError

GOOD = b'{"task_id": "a", "tokens": [1, 2]}\n'
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
arguments = text | st.dictionaries(text, st.integers() | text | st.none(), max_size=2)
calls = st.builds(ToolCall, name=text.filter(bool), arguments=arguments, id=st.none() | text)
called = st.lists(calls, min_size=1, max_size=2).map(tuple)
messages = (
    st.builds(Message, role=text.filter(bool), content=text, name=st.none() | text)
    | st.builds(Message, role=st.just("assistant"), content=text.filter(bool), trained=st.booleans())
    | st.builds(Message, role=st.just("assistant"), content=text | st.none(), tool_calls=called)
)


@st.composite
def trajectories(draw):
    scalars = {
        "task_id": draw(text.filter(bool) | st.integers(-5, 5)),
        "reward": draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
        "step": draw(st.none() | st.integers(0, 2**31 - 1)),
    }
    if draw(st.booleans()):
        return Trajectory(messages=tuple(draw(st.lists(messages, min_size=1, max_size=3))), **scalars)
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5))
    mask = draw(st.none() | st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    return Trajectory(tokens=np.array(ids, np.int32), loss_mask=None if mask is None else np.array(mask), **scalars)


@pytest.mark.filterwarnings("ignore:.*the role .* is not known")
@given(st.lists(trajectories(), min_size=1, max_size=4), st.sampled_from(["set.jsonl", "set.jsonl.gz"]))
def test_reading_what_was_written_gives_the_same_trajectories(tmp_path_factory, written, name):
    file = tmp_path_factory.mktemp("files") / name
    write_trajectories(file, written)
    read = read_trajectories(file)
    assert [encode(trajectory) for trajectory in read] == [encode(trajectory) for trajectory in written]
    assert [trajectory.messages for trajectory in read] == [trajectory.messages for trajectory in written]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    file = tmp_path / "set.jsonl"
    file.write_bytes(GOOD)

    def failing():
        yield Trajectory(task_id=1, tokens=np.array([1], np.int32))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_trajectories(file, failing())
    assert (os.listdir(tmp_path), file.read_bytes()) == (["set.jsonl"], GOOD)


def test_blank_lines_are_skipped_and_line_separators_inside_text_are_not_line_ends(tmp_path):
    file = tmp_path / "set.jsonl"
    file.write_bytes(b"\n" + GOOD + b"  \n" + '{"task_id": "\u2028", "tokens": [3]}'.encode())
    assert [trajectory.task_id for trajectory in read_trajectories(file)] == ["a", "\u2028"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{nope}", r"set\.jsonl:3: a line must be one JSON object"),
        (b'{"task_id": 1, "tokens": ["1"]}', r"set\.jsonl:3: tokens\[0\] must be an integer"),
        (b'{"task_id": "\xff"}', r"set\.jsonl:3: a line must be UTF-8"),
        (b"[" * 100_000, r"set\.jsonl:3: "),
        (b'{"task_id": 1, "tokens": [1], "reward": 1' + b"0" * 400 + b"}", r"set\.jsonl:3: "),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path, line, message):
    file = tmp_path / "set.jsonl"
    file.write_bytes(GOOD + b"\n" + line + b"\n" + GOOD)
    with pytest.raises(InputError, match=message):
        read_trajectories(file)


@pytest.mark.parametrize(
    "content",
    [
        GOOD,
        gzip.compress(GOOD * 50)[:-20],
        gzip.compress(GOOD)[:-8] + b"12345678",
        gzip.compress(GOOD)[:10] + b"\xff" * 50,
    ],
    ids=["plain text", "cut short", "wrong checksum", "overwritten"],
)
def test_a_damaged_gzip_file_is_refused_by_name(tmp_path, content):
    file = tmp_path / "set.jsonl.gz"
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"set\.jsonl\.gz: not a whole gzip file"):
        read_trajectories(file)


@pytest.mark.parametrize(("name", "rule"), [("absent.jsonl", "cannot be read"), ("empty.jsonl", "at least one")])
def test_a_missing_or_empty_file_is_refused_by_name(tmp_path, name, rule):
    (tmp_path / "empty.jsonl").write_bytes(b"\n\n")
    with pytest.raises(InputError, match=rf"{name}: .*{rule}"):
        read_trajectories(tmp_path / name)


def test_a_file_that_cannot_be_written_is_refused_by_name(tmp_path):
    (tmp_path / "taken").write_text("")
    for write, folder in ((write_trajectories, "absent"), (append_trajectories, "taken")):
        with pytest.raises(InputError, match=r"set\.jsonl: cannot be written"):
            write(tmp_path / folder / "set.jsonl", [])


@given(st.lists(st.lists(trajectories(), max_size=3), min_size=1, max_size=3).filter(any))
def test_appending_in_parts_gives_the_file_that_writing_at_one_time_gives(tmp_path_factory, parts):
    folder = tmp_path_factory.mktemp("files")
    for part in parts:
        append_trajectories(folder / "new" / "parts.jsonl", part)
    write_trajectories(folder / "whole.jsonl", [trajectory for part in parts for trajectory in part])
    assert (folder / "new" / "parts.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()


@pytest.mark.parametrize("whole", [b"", b'{"a": 1}\n', b'{"a": 1}\n\n{\n'])
@pytest.mark.parametrize("torn", [b"{", b'{"a": "\xc3', b'{"a": 1', b"[" * 100_000])
def test_a_torn_last_line_is_left_out_with_one_warning(tmp_path, whole, torn):
    file = tmp_path / "log.jsonl"
    file.write_bytes(whole + torn)
    line = whole.count(b"\n") + 1
    with pytest.warns(DataWarning, match=f"{file}:{line}: the last line is torn") as warned:
        assert b"".join(line for _, line in whole_lines(file)) == whole.replace(b"\n\n", b"\n")
    assert len(warned) == 1
    for written in (b"", b'{"a": 1}', b"{\n{}\n"):
        file.write_bytes(written)
        assert b"".join(line for _, line in whole_lines(file)) == written
