"""Commands that documents show exist, and the first steps run as shown, in an empty folder."""

import contextlib
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.data.conftest import CHAT_TEMPLATE, build_tokenizer
from treering.cli.commands import app
from treering.cli.main import _UsageError, main
from treering.cli.settings_help import sections_of
from treering.config import RlConfig, SftConfig

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
QUICK_START, _, _ = (ROOT / "docs" / "quick_start.md").read_text(encoding="utf-8").partition("\n## Recipes\n")
_, _, FROM_OWN_DATA = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## On your own data\n")
OWN_DATA = FROM_OWN_DATA.partition("\n## ")[0]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# A command, after variables or torchrun; a line `treering: ...` is output of a command.
COMMAND = re.compile(r"^(?:\w+=\S+ |torchrun (?:-\S+ (?:\d+ )?)*)*treering (.*)$", re.MULTILINE)
ENDINGS = {"json": "jsonl", "python": "py"}
MODEL = Path("Qwen", "Qwen3-0.6B")
SETTINGS = {
    f"{section.name}.{one.key}".lstrip(".")
    for config in (SftConfig, RlConfig)
    for section in sections_of(config)
    for one in section.settings
}


def commands_in(text: str) -> list[list[str]]:
    """Return the words after `treering` of each command in the code blocks of a text."""
    blocks = "\n".join(block.replace("\\\n", " ") for _, block in BLOCK.findall(text))
    return [shlex.split(command, comments=True) for command in COMMAND.findall(blocks)]


def is_setting(key: str) -> bool:
    """Return whether a dotted key is a setting, or lies in one that is a table."""
    return any(key == one or key.startswith(f"{one}.") for one in SETTINGS)


def keys_of(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Return the dotted keys of a TOML document, without tables."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from keys_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def unknown_settings(words: list[str]) -> list[str]:
    """Parse a command as the command line does, without running it; return its overrides of settings that are none."""
    group = typer.main.get_command(app)
    context = group.make_context("treering", [], resilient_parsing=True)
    command = group.get_command(context, words[0])
    assert command is not None, f"no command {words[0]}"
    with contextlib.suppress(typer.Exit):
        command.make_context(words[0], words[1:])
    if words[0] not in ("sft", "train", "eval"):
        return []
    return [word for word in words[2:] if "=" in word and not is_setting(word.partition("=")[0])]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_parse(page: Path) -> None:
    for words in commands_in(page.read_text(encoding="utf-8")):
        assert unknown_settings(words) == []


def test_commands_are_found_and_mistyped_ones_refused() -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert sum(len(commands_in(text)) for text in texts) >= sum(text.count("\ntreering ") for text in texts) >= 40
    for right in ("inspect a --show 3", "sft a.toml train.num_epochs=1"):
        assert unknown_settings(right.split()) == []
    assert unknown_settings(["sft", "a.toml", "train.num_epoch=1"]) == ["train.num_epoch=1"]
    for wrong in ("inpsect a", "inspect a --shwo 3", "init a"):
        with pytest.raises((_UsageError, AssertionError)):
            unknown_settings(wrong.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_targets_and_settings_of_a_page_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        for target in re.findall(r"^make ([\w-]+)", block, re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
        if language == "toml":
            unknown = [key for key in keys_of(tomllib.loads(block)) if "." in key and not is_setting(key)]
            assert unknown == []


def files_in(text: str) -> Iterator[tuple[str, str]]:
    """Return name and content of the files that a text shows: a block is the file that was named last before it."""
    for block in BLOCK.finditer(text):
        ending = ENDINGS.get(block[1], "")
        names = re.findall(rf"`(\w+\.{ending})`", text[: block.start()]) if ending else []
        if names:
            yield names[-1], block[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with the reader's files and, under the name that pages use, a tiny model with a tokenizer."""
    monkeypatch.chdir(tmp_path)
    for name, content in files_in(QUICK_START):
        Path(name).write_text(content, encoding="utf-8")
    MODEL.mkdir(parents=True)
    tokenizer = build_tokenizer(["<|im_start|>", "<|im_end|>"], ["What is 17 + 25?"], use_regex=True)
    tokenizer.save(str(MODEL / "tokenizer.json"))
    (MODEL / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE})
    )
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes = {"vocab_size": 400, "head_dim": 8, "intermediate_size": 16, "max_position_embeddings": 100}
    Qwen3ForCausalLM(Qwen3Config(**shape, **sizes)).save_pretrained(MODEL)
    return tmp_path


@pytest.mark.parametrize(
    ("section", "written"),
    [
        (QUICK_START, ["sft.toml", "runs/traces-sft/report.html", "train.toml", "runs/prompts-train/report.html"]),
        (OWN_DATA, ["sft.toml", "runs/traces-sft/checkpoints"]),
    ],
    ids=["quick_start", "README"],
)
def test_the_first_steps_run_as_shown(
    section: str,
    written: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands = commands_in(section)
    assert {"inspect", "init", "sft"} <= {words[0] for words in commands}
    outputs = []
    for words in commands:
        monkeypatch.setattr(sys, "argv", ["treering", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert not ended.value.code, (words, err)
        outputs.append(out)
    assert [path for path in written if not (folder / path).exists()] == []
    # The page continues with the command that the first one suggests.
    assert f"Next: treering {shlex.join(commands[2])}" in " ".join(outputs[0].split())
    assert "⟦" in outputs[1]
