"""`treering report` writes a page and a table of rollouts, and prints their paths."""

import json
from pathlib import Path

import pytest

from tests.report.folders import write_run
from treering.cli import report as command
from treering.cli.inspect.drafts import rollout_files
from treering.cli.report import find_text, run
from treering.errors import ConfigError, InputError, StateError
from treering.files.lock import FileLock
from treering.report.run_data import read_run


def test_the_page_goes_into_the_folder_or_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a")
    run([tmp_path / "a"], out=None, open_page=False, rollouts=None, json_output=False)
    assert capsys.readouterr().out.strip() == str(tmp_path / "a" / "report.html")
    run([tmp_path / "a"], out=tmp_path / "page.html", open_page=False, rollouts=None, json_output=False)
    for page in (tmp_path / "a" / "report.html", tmp_path / "page.html"):
        assert page.read_text().startswith("<!doctype html>")


def test_json_is_what_the_page_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_run(tmp_path / "a")
    run([tmp_path / "a"], out=None, open_page=False, rollouts=None, json_output=True)
    assert json.loads(capsys.readouterr().out)["runs"][0]["rows"] == rows
    assert not (tmp_path / "a" / "report.html").exists()


def test_a_page_that_is_not_written_is_not_opened_or_refreshed(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    with pytest.raises(ConfigError, match="--refresh rewrites the page, but --json prints its content once"):
        run([tmp_path / "a"], out=tmp_path / "page.html", refresh=True, json_output=True)
    with pytest.raises(ConfigError, match="--open shows a page, but --json writes none"):
        run([tmp_path / "a"], out=None, open_page=True, rollouts=None, json_output=True)


def test_a_page_does_not_replace_a_folder(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    with pytest.raises(StateError, match="belongs to a file"):
        run([tmp_path / "a"], out=tmp_path, open_page=False, rollouts=None, json_output=False)


def test_a_run_on_sums_has_the_texts_of_its_symbols(tmp_path: Path) -> None:
    from treering.rl.tasks.sums import ChainedSums

    write_run(tmp_path / "a", config={"task": {"kind": "sums"}, "rl": {}})
    text_of = find_text(read_run(tmp_path / "a"))
    assert text_of is not None
    assert "".join(map(text_of, ChainedSums.encode("12+3").tolist())) == "12+3"


def test_every_rollout_is_a_row_of_the_table(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    write_run(tmp_path / "a", num_steps=6, config={"task": {"kind": "sums"}, "rl": {}})
    run([tmp_path / "a"], out=None, open_page=False, rollouts=tmp_path / "rollouts.parquet", json_output=False)
    rows = parquet.read_table(tmp_path / "rollouts.parquet").to_pylist()
    assert [(each["epoch"], each["prompt_id"]) for each in rows[:4]] == [(0, "a"), (0, "a"), (0, "a"), (0, "b")]
    assert len(rows) == 3 * 2 * 3
    first = rows[0]
    assert first["tokens"] == [1, 2, 10, 11, 12, 13, 20, 21, 22]
    assert (first["reward"], first["advantage"], first["num_tokens"], first["num_sampled"]) == (1.0, 1.25, 9, 7)
    text_of = find_text(read_run(tmp_path / "a"))
    assert text_of is not None
    assert first["prompt"] == text_of(1) + text_of(2)


def test_a_damaged_tokenizer_leaves_ids(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    (tmp_path / "a" / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "a" / "checkpoints" / "step-000001" / "tokenizer.json").write_text("{")
    assert find_text(read_run(tmp_path / "a")) is None


def test_a_table_inside_of_the_runs_folder_does_not_hide_the_run(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    folder = tmp_path / "a"
    write_run(folder, num_steps=6, config={"task": {"kind": "sums"}, "rl": {}})
    before = rollout_files(folder)
    run([folder], out=None, open_page=False, rollouts=folder / "rollouts.parquet", json_output=False)
    assert rollout_files(folder) == before
    run([folder], out=None, open_page=False, rollouts=folder / "rollouts.parquet", json_output=False)
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_a_table_that_cannot_be_made_leaves_the_earlier_one(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    folder, file = tmp_path / "a", tmp_path / "rollouts.parquet"
    write_run(folder, num_steps=6, config={"task": {"kind": "sums"}, "rl": {}})
    file.write_bytes(b"earlier")
    last = sorted((folder / "rollouts").glob("*.jsonl"))[-1]
    last.write_text("{}\n" + last.read_text())
    with pytest.raises(InputError, match=last.name):
        run([folder], out=None, open_page=False, rollouts=file, json_output=False)
    assert file.read_bytes() == b"earlier"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("option", ["open_page", "refresh"])
def test_an_opened_or_refreshed_page_follows_a_run_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    write_run(tmp_path / "a")
    lock = FileLock(tmp_path / "a" / "run.lock", lambda holder: holder)
    pages: list[str] = []
    opened: list[str] = []
    monkeypatch.setattr(command.webbrowser, "open", opened.append)

    def sleep(seconds: float) -> None:
        pages.append((tmp_path / "a" / "report.html").read_text())
        if len(pages) == 2:
            lock.release()

    monkeypatch.setattr(command.time, "sleep", sleep)
    run([tmp_path / "a"], out=None, **{option: True})
    assert len(pages) == 2
    assert len(opened) == (option == "open_page")
    assert all(f'"refresh_s":{command.REFRESH_S}' in page for page in pages)
    assert '"refresh_s":null' in (tmp_path / "a" / "report.html").read_text()
    run([tmp_path / "a"], out=None, **{option: True})
    assert len(pages) == 2


def test_several_runs_are_one_page_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write_run(tmp_path / name)
    folders = [tmp_path / "a", tmp_path / "b"]
    run(folders, out=None, open_page=False, rollouts=None, json_output=False)
    assert capsys.readouterr().out.strip() == "comparison.html"
    assert not (tmp_path / "a" / "report.html").exists()
    with pytest.raises(ConfigError, match="rollouts of one run, got 2"):
        run(folders, out=None, open_page=False, rollouts=tmp_path / "r.parquet", json_output=False)
