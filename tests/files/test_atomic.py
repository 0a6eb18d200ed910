"""A folder or a file is written whole or not at all."""

from pathlib import Path

import pytest

from treering.files.writing import read_facts, write_file, write_folder


def test_a_failed_write_leaves_the_old_version_and_no_draft(tmp_path: Path) -> None:
    def fill(draft: Path) -> None:
        (draft / "a").write_text("old")

    def fail(draft: Path) -> None:
        target = draft / "a" if draft.is_dir() else draft
        target.write_text("new")
        raise OSError(28, "No space left on device")

    write_folder(tmp_path / "folder", fill, {"version": 1})
    write_file(tmp_path / "file", lambda draft: draft.write_text("old"))
    with pytest.raises(OSError, match="No space"):
        write_folder(tmp_path / "folder", fail, {})
    with pytest.raises(OSError, match="No space"):
        write_file(tmp_path / "file", fail)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "a").read_text() == "old"
    assert read_facts(tmp_path / "folder") == {"version": 1}
