"""Messages name the command that was used, and recognise common mistakes."""

import re
from pathlib import Path

import pytest

import treering
from tests.cli.hub_cache import save_model
from tests.cli.runs import call
from treering.cli.hub import locate, search_folders
from treering.config import SftConfig, load
from treering.data import read_trajectories
from treering.errors import ConfigError, InputError, plural

LIBRARY = ("data", "tree", "history", "schedule", "model", "train", "engine", "rl", "analysis", "runtime")


def test_the_library_knows_no_options_of_commands():
    root = Path(treering.__file__).parent
    files = [file for room in LIBRARY for file in (root / room).rglob("*.py")]
    found = [file.name for file in files if re.search(r"--(tokenizer|template|format|model-shape)", file.read_text())]
    assert len(files) > 100
    assert found == []


def test_a_command_names_its_own_settings(commands):
    (commands.folder / "chat.jsonl").write_text('{"task_id": 1, "messages": [{"role": "user", "content": "2"}]}\n')
    line = commands.refused("sft", 'data.source="files"', 'data.files=["chat.jsonl"]')
    assert line.endswith(
        'messages need a tokenizer, got none; pass data.tokenizer = "DIR" (a Hugging Face folder or hub id)'
    )


CHAT = '{"task_id": 1, "messages": [{"role": "user", "content": "2"}, {"role": "assistant", "content": "3"}]}\n'


@pytest.mark.parametrize("words", [["inspect", "chat.jsonl"], ["init", "chat.jsonl", "--model", "model"]])
def test_a_command_advises_only_options_that_it_has(folder, monkeypatch, capsys, words):
    save_model(folder / "model")
    (folder / "chat.jsonl").write_text(CHAT)
    assert call(monkeypatch, *words) == 2
    told = capsys.readouterr().err
    options = re.findall(r"--[a-z-]+", told)
    assert options
    assert call(monkeypatch, words[0], "--help") == 0
    usage = capsys.readouterr().out
    assert [option for option in options if option not in usage] == []


@pytest.mark.parametrize(("name", "other"), [("sft", "train"), ("train", "sft")])
def test_a_file_of_the_other_command_is_known_as_such(commands, name, other):
    (commands.folder / f"{name}.toml").write_bytes((commands.folder / f"{other}.toml").read_bytes())
    line = commands.refused(name)
    assert f"{name}.toml is a file of `treering {other}`" in line
    assert line.endswith(f"run treering {other} {name}.toml")


def test_a_missing_file_names_where_it_was_looked_for_and_the_nearest_names(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "b" / "traces.jsonl").touch()
    with pytest.raises(InputError) as raised:
        locate(Path("trace.jsonl"), [tmp_path / "a", tmp_path / "b"])
    assert str(raised.value).startswith(f"trace.jsonl is not in {tmp_path / 'a'}, {tmp_path / 'b'}")
    assert f"did you mean {tmp_path / 'b' / 'traces.jsonl'}?" in str(raised.value)
    folders = search_folders(Path())
    assert len(folders) == len(set(folders))
    with pytest.raises(InputError, match=r"No such file or directory\); did you mean .*traces\.jsonl\? check the path"):
        read_trajectories(tmp_path / "b" / "trace.jsonl")


@pytest.mark.parametrize(("short", "full"), [("bf16", "bfloat16"), ("fp32", "float32"), ("bfloat16", "bfloat16")])
def test_short_names_of_dtypes_are_the_full_ones(tmp_path, short, full):
    file = tmp_path / "sft.toml"
    file.write_text('[data]\nsource = "generated"\n[train]\nnum_steps = 1\n')
    assert load(SftConfig, file, [f"model.dtype={short}"]).model.dtype == full
    with pytest.raises(ConfigError, match="half precision needs loss scaling"):
        load(SftConfig, file, ["model.dtype=fp16"])


def test_a_count_agrees_with_its_noun():
    assert plural(0, "prompt") == "0 prompts"
    assert plural(1, "prompt") == "1 prompt"
    assert plural(1200, "entry", "entries") == "1,200 entries"
    assert plural(1, "task is", "tasks are") == "1 task is"
