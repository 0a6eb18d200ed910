"""The core works without the packages of `treering[train]`; commands that need them print how to install them."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from treering import extras
from treering.errors import MissingExtraError

ROOT = Path(__file__).parents[1]
WITHOUT = """
import sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages}:
            raise ImportError(name + " is not installed")

sys.meta_path.insert(0, Refuses())
"""
COMMAND = """
from treering.cli.main import main
sys.argv = ["treering", *sys.argv[1:]]
main()
"""
DRAFTS = """
import numpy as np
import treering

forest = treering.Forest.from_sequences([[5, 6, 7], [5, 6, 8]])
print(forest.num_tokens)
response = np.arange(10, 40, dtype=np.int32)
store = treering.HistoryStore()
store.add("q", [response], version=0)
store.publish()
rows = treering.DraftRows(
    prompt_ids=["q"],
    groups=np.array([0]),
    tokens=np.concatenate([[5, 6], response[:8]]).astype(np.int32)[None],
    num_tokens=np.array([10]),
    num_prompt_tokens=np.array([2]),
    max_drafts=np.array([4]),
)
print(treering.Drafter(store, max_draft=4).propose(rows).tokens.tolist())
request = treering.Request(prompt_id="q", prompt=response, sampling=treering.Sampling(max_tokens=4))
"""
TOKENS = [
    {"task_id": 1, "tokens": [5, 6, 7], "loss_mask": [0, 0, 1]},
    {"task_id": 1, "tokens": [5, 6, 8], "loss_mask": [0, 0, 1]},
]
MESSAGES = [{"task_id": 1, "messages": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]}]
EPOCHS = [
    {"prompt_id": "a", "task_id": "a", "epoch": epoch, "tokens": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 1, 1]}
    for epoch in (0, 1)
]


def without_train(
    code: str, *arguments: str, cwd: Path, packages: Iterable[str] = extras.TRAIN
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT.format(packages=set(packages)) + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd)


def read_project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def optional_dependencies() -> dict[str, list[str]]:
    return read_project()["optional-dependencies"]


def command_for(extra: str) -> str:
    """Return the command that installs an extra: package names in order, each with its range as in the wheel."""
    ranges = [line.replace(">=5.0,<6", "<6,>=5.0") for line in sorted(optional_dependencies()[extra])]
    quoted = " ".join(f"'{line}'" for line in ranges)
    return f"pip install {quoted}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, lines in {"tokens": TOKENS, "messages": MESSAGES, "epochs": EPOCHS}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["inspect", "tokens.jsonl", "--why", "--json"], '"unique_tokens": 4'),
        (["inspect", "--drafts", "epochs.jsonl", "--json"], '"speedup"'),
        (["simulate", "--workers", "2", "--rollouts", "8", "--slots", "4", "--steps", "2", "--json"], "histopipe"),
        (["--help"], "simulate"),
    ],
)
def test_a_command_of_the_core_runs(folder: Path, arguments: list[str], part: str) -> None:
    done = without_train(COMMAND, *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert part in done.stdout


def test_tokenizers_and_jinja_alone_read_chats(folder: Path) -> None:
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(["2", "4", "+", "=", "?"])}, unk_token="?")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    packages = set(extras.TRAIN) - set(extras.CHAT)
    arguments = ["inspect", "messages.jsonl", "--tokenizer", ".", "--json", "--no-cache"]
    done = without_train(COMMAND, *arguments, cwd=folder, packages=packages)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"][0]["flat_tokens"] == 5
    assert "chats are rendered by the chat template of ." in done.stderr
    done = without_train(COMMAND, *arguments, cwd=folder, packages=packages | {"jinja2"})
    assert done.stderr == f"treering: a chat template needs jinja2: {command_for('chat')}\n"


def test_forests_history_and_drafter_work(tmp_path: Path) -> None:
    done = without_train(DRAFTS, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "4\n[18, 19, 20, 21]\n"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "needs"),
    [
        (["sft", "config.toml"], "treering sft needs torch and transformers"),
        (["train", "config.toml"], "treering train needs torch and transformers"),
        (["demo"], "treering demo needs torch and transformers"),
        (["inspect", "messages.jsonl", "--tokenizer", "t"], "the tokenizer t needs tokenizers"),
    ],
)
def test_a_command_that_needs_an_extra_names_it_in_one_line(folder: Path, arguments: list[str], needs: str) -> None:
    done = without_train(COMMAND, *arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    extra = "chat" if "tokenizers" in needs else "train"
    assert done.stderr == f"treering: {needs}: {command_for(extra)}\n"


def test_the_doctor_prints_how_to_install_missing_packages(tmp_path: Path) -> None:
    done = without_train(COMMAND, "doctor", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"because torch is missing: {command_for('train')}\n" in done.stdout


@pytest.mark.parametrize("name", ["backward", "objectives.sft"])
def test_a_public_name_that_needs_an_extra_names_it(tmp_path: Path, name: str) -> None:
    done = without_train(f"import treering\ntreering.{name}", cwd=tmp_path)
    last = done.stderr.splitlines()[-1]
    assert last.endswith(f"treering.{name} needs torch and transformers: {command_for('train')}")


def test_the_checked_packages_are_those_of_the_extra() -> None:
    project = read_project()
    for name, packages in {"train": extras.TRAIN, "chat": extras.CHAT}.items():
        assert {line.partition(">")[0] for line in project["optional-dependencies"][name]} == set(packages)
    assert not {line.partition(">")[0] for line in project["dependencies"]} & set(extras.TRAIN)


def test_small_packages_are_named_where_only_they_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name in {"jaxtyping", "tokenizers"} else name)
    with pytest.raises(MissingExtraError) as error:
        extras.require("a run")
    assert str(error.value) == f"a run needs tokenizers and jaxtyping: {command_for('train')}"
    extras.require("a run", "torch")


def test_a_hint_names_what_is_missing_or_too_old_and_never_a_name_that_no_index_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for extra, lines in optional_dependencies().items():
        names = {re.split("[<>=; ]", line)[0] for line in lines if not line.startswith("treering[")}
        command = extras.install_hint(extra)
        assert "treering" not in command
        assert any(re.search(f"'{name}[<>=]", command) for name in names)
    monkeypatch.setattr(extras, "versions_of", lambda names: {name: "4.0" for name in names if name != "torch"})
    assert extras.install_hint("train") == "pip install 'torch>=2.10' 'transformers<6,>=5.0'"

    def not_installed(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", not_installed)
    assert extras.install_hint("serve") == "pip install -e '.[serve]' in the checkout of Treering"


def test_no_page_or_message_installs_a_name_that_no_index_has() -> None:
    """Only one comment names the package as it will be published."""
    folders = ("docs", "examples", "src")
    files = [
        file for folder in folders for file in (ROOT / folder).rglob("*") if file.suffix in {".md", ".py", ".toml"}
    ]
    lines = [line for file in [*files, ROOT / "README.md"] for line in file.read_text(encoding="utf-8").splitlines()]
    found = [line.strip() for line in lines if re.search(r"install (-\S+ \S+ )*['\"]?treering", line)]
    assert found == ["# once published: pip install 'treering[train]'"]
