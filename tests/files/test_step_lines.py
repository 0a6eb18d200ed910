"""Reopening a log keeps its whole lines, counts lost lines, and keeps a copy of a damaged file."""

import json
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering.errors import StateError
from treering.files.step_lines import read_rows, reopen, spans

PER_STEP = 3
LINES = [
    json.dumps({"step": step, "trial": trial}).encode() + b"\n" for step in range(1, 6) for trial in range(PER_STEP)
]
EXPECTED = dict.fromkeys(range(1, 5), PER_STEP)
"""The run resumes after step 4 of 5."""
KEPT = LINES[: 4 * PER_STEP]


def reopened(folder: Path, content: bytes) -> tuple[bytes, list[str]]:
    """Return the content of a reopened log, and the warnings."""
    file = folder / "log.jsonl"
    file.write_bytes(content)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reopen([file], 4, EXPECTED, log=file)
    return file.read_bytes() if file.exists() else b"", [str(warning.message) for warning in caught]


def without(*numbers: int) -> bytes:
    return b"".join(line for number, line in enumerate(LINES) if number not in numbers)


def replaced(number: int, line: bytes) -> bytes:
    return b"".join([*LINES[:number], line, *LINES[number + 1 :]])


@pytest.mark.parametrize("num_bytes", [len(b"".join(LINES)), len(b"".join(LINES)) - 7, len(b"".join(KEPT)) + 1])
def test_a_log_that_a_kill_left_is_truncated_silently(tmp_path: Path, num_bytes: int) -> None:
    assert reopened(tmp_path, b"".join(LINES)[:num_bytes]) == (b"".join(KEPT), [])
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


@pytest.mark.parametrize(
    ("content", "kept", "words"),
    [
        (replaced(4, b"\0" * 20 + b"\n"), without(4), "1 unreadable line, 1 missing line of step 2"),
        (replaced(4, b'{"step": 2, "a": "\xff"}\n'), without(4), "1 unreadable line, 1 missing line of step 2"),
        (replaced(4, b'{"step": true}\n'), without(4), "1 unreadable line, 1 missing line of step 2"),
        (replaced(4, b'{"step": 9}\n'), without(4), "1 unreadable line, 1 missing line of step 2"),
        (replaced(4, b"[" * 100_000 + b"\n"), without(4), "1 unreadable line, 1 missing line of step 2"),
        (without(0, 1, 2, 11), without(0, 1, 2, 11), "4 missing lines of steps 1, 4"),
        (b"".join(LINES[:7]) + LINES[7][:5], b"".join(LINES[:7]), "1 unreadable line, 5 missing lines of steps 3 to 4"),
        (replaced(4, 2 * LINES[4]), b"".join(LINES), "1 repeated line"),
        (replaced(4, LINES[4] + b"\n"), b"".join(LINES), "1 unreadable line"),
        (b"x\n" + b"".join(KEPT) + KEPT[-1], b"".join(KEPT), "1 unreadable line"),
        (b"\0" * 1000, b"", "1 unreadable line, 12 missing lines of steps 1 to 4"),
        (b"", b"", "12 missing lines of steps 1 to 4"),
    ],
)
def test_damage_is_counted_and_the_rest_stays(tmp_path: Path, content: bytes, kept: bytes, words: str) -> None:
    left, said = reopened(tmp_path, content)
    later = set(LINES[12:])
    assert left == b"".join(line for line in kept.splitlines(keepends=True) if line not in later)
    assert len(said) == 1
    assert f"log.jsonl is damaged: {words};" in said[0]
    aside = tmp_path / "log.jsonl.damaged"
    # With missing lines only, there is nothing to keep.
    assert aside.exists() == ("unreadable" in words or "repeated" in words)
    assert not aside.exists() or (aside.read_bytes() == content and aside.name in said[0])


def test_damaged_files_are_kept_under_different_names(tmp_path: Path) -> None:
    for _ in range(3):
        reopened(tmp_path, replaced(4, b"?\n"))
    names = ["log.jsonl", "log.jsonl.damaged", "log.jsonl.damaged-2", "log.jsonl.damaged-3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@given(st.data())
def test_every_lost_line_is_counted(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    damaged = bytearray(b"".join(LINES))
    for _ in range(data.draw(st.integers(1, 3))):
        change: Callable[[int, int], None] = data.draw(
            st.sampled_from(
                [
                    lambda start, size: damaged.__delitem__(slice(start, start + size)),
                    lambda start, size: damaged.__setitem__(slice(start, start + size), b"\0" * size),
                    lambda start, size: damaged.__setitem__(slice(start, start), damaged[:size]),
                ]
            )
        )
        change(data.draw(st.integers(0, len(damaged))), data.draw(st.integers(1, 60)))
    left, said = reopened(tmp_path_factory.mktemp("log"), bytes(damaged))
    found = Counter(json.loads(line)["step"] for line in left.splitlines())
    num_missing = sum(max(0, PER_STEP - found[step]) for step in EXPECTED)
    assert set(found) <= set(EXPECTED)
    assert len(said) <= 1
    assert not num_missing or f"{num_missing} missing line" in said[0]


def test_a_step_without_an_expected_count_has_at_least_one_line(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    files[0].write_bytes(LINES[0])
    files[1].write_bytes(LINES[6])
    with pytest.warns(UserWarning, match=r"log is damaged: 1 missing line of step 2; readable lines are kept"):
        reopen(files, 3, {1: None, 2: None, 3: None}, log=tmp_path / "log")


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").symlink_to(tmp_path / "disk.jsonl")
    left, _ = reopened(tmp_path, replaced(4, b"?\n"))
    assert left == b"".join(KEPT[:4] + KEPT[5:]) == (tmp_path / "disk.jsonl").read_bytes()
    assert (tmp_path / "log.jsonl").is_symlink()


def test_a_folder_or_a_broken_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("folder", "loop"):
        with pytest.raises(StateError, match=f"{name} .*move it away"):
            reopen([tmp_path / name], 1, {}, log=tmp_path)


def test_only_whole_lines_with_a_step_are_rows(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b'{"step": 1}\n[]\n{"step": 2}\n{"step": 3}')
    assert list(read_rows(tmp_path / "a")) == [{"step": 1}, {"step": 2}]
    assert list(read_rows(tmp_path / "b")) == []


def test_consecutive_steps_are_one_span() -> None:
    assert spans({7, 2, 4, 5, 6}) == "2, 4 to 7"
