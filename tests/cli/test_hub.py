"""Models by hub id: from the cache without a network, else from the hub; a run keeps the commit that it began with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest

from tests.cli.hub_cache import FIRST, ID, SECOND, add_to_cache, local_hub, save_model
from tests.cli.runs import Commands, weights
from treering.cli.hub import find_folder, is_hub_id, tokenizer_folder
from treering.errors import InputError

SFT = """
[model]
path = "org/tiny"
device = "cpu"
[data]
files = ["data.jsonl"]
[train]
num_steps = 2
trees_per_step = 2
[optim]
learning_rate = 1e-2
[run]
dir = "out"
"""
TRAIN = """
[model]
path = "org/tiny"
device = "cpu"
[task]
max_prompts = 2
[sampling]
max_tokens = 4
[rl]
num_steps = 2
prompts_per_step = 2
group_size = 2
[engine]
num_threads = 1
[run]
dir = "out"
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this process, which may not use the network."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return folder


@pytest.fixture
def hub_commands(commands: Commands) -> Commands:
    (commands.folder / "sft.toml").write_text(SFT)
    (commands.folder / "train.toml").write_text(TRAIN)
    rows = [{"task_id": i, "tokens": [5, 6, 7 + j], "loss_mask": [0, 1, 1]} for i in range(3) for j in range(2)]
    (commands.folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return commands


def settings(run: Path) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads((run / "config.json").read_text())
    return found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("./Qwen/Qwen3-0.6B", False),
        ("../Qwen/Qwen3", False),
        ("/Qwen/Qwen3", False),
        ("~/models", False),
        ("qwen3", False),
        ("models/qwen3/base", False),
    ],
)
def test_what_looks_like_a_folder_is_never_asked_of_the_hub(tmp_path: Path, name: str, expected: bool) -> None:
    assert is_hub_id(name, [tmp_path]) is expected


def test_what_stands_on_disk_is_never_asked_of_the_hub(tmp_path: Path, cache: Path) -> None:
    folder = save_model(tmp_path / ID)
    add_to_cache(cache, save_model(tmp_path / "other", seed=1), commit=FIRST)
    assert find_folder(ID, [tmp_path], setting="model.path") == folder
    with pytest.raises(InputError, match=r"model.path = 'org/tiny' is a folder, but only hub ids have revisions"):
        find_folder(ID, [tmp_path], setting="model.path", revision="main")


def test_an_id_is_found_in_the_cache_by_branch_tag_and_commit(tmp_path: Path, cache: Path) -> None:
    add_to_cache(cache, save_model(tmp_path / "one"), commit=FIRST, ref="v1")
    add_to_cache(cache, save_model(tmp_path / "two", seed=1), commit=SECOND)
    found = {
        revision: find_folder(ID, [], setting="model.path", revision=revision).name
        for revision in (None, "main", "v1", FIRST)
    }
    assert found == {None: SECOND, "main": SECOND, "v1": FIRST, FIRST: FIRST}
    assert tokenizer_folder(ID).name == SECOND


@pytest.mark.parametrize("revision", [None, "v9", SECOND])
def test_what_the_cache_lacks_is_refused_with_both_ways_out(tmp_path: Path, cache: Path, revision: str | None) -> None:
    if revision is not None:
        add_to_cache(cache, save_model(tmp_path / "one"), commit=FIRST)
    of = "" if revision is None else f" at revision {revision!r}"
    with pytest.raises(InputError) as caught:
        find_folder(ID, [], setting="teacher.path", revision=revision)
    assert str(caught.value) == (
        f"teacher.path = 'org/tiny' is not a folder, and the cache {cache} has no complete model of that id{of} while "
        "HF_HUB_OFFLINE is set; run `hf download org/tiny` where there is a network, or name the folder of a model"
    )


def test_a_tokenizer_in_the_cache_does_not_count_as_a_model(tmp_path: Path, cache: Path) -> None:
    model = save_model(tmp_path / "one")
    (model / "model.safetensors").unlink()
    add_to_cache(cache, model, commit=FIRST)
    assert find_folder(ID, [], setting="data.tokenizer", wanted="tokenizer").name == FIRST
    with pytest.raises(
        InputError, match=r"model\.path = 'org/tiny' has no weights .* in .*; run `hf download org/tiny` where"
    ):
        find_folder(ID, [], setting="model.path")


def test_a_command_refuses_an_unknown_id_in_one_line(hub_commands: Commands, cache: Path) -> None:
    for name in ("sft", "train"):
        line = hub_commands.refused(name)
        assert f"model.path = 'org/tiny' is not a folder in ., and the cache {cache} has no" in line
        assert "run `hf download org/tiny`" in line
        assert not (hub_commands.folder / "out").exists()


@pytest.mark.parametrize("name", ["sft", "train"])
def test_a_run_keeps_its_commit_wherever_the_cache_is(
    hub_commands: Commands, cache: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    models = [save_model(hub_commands.folder / "m" / str(seed), seed=seed) for seed in (0, 1)]
    add_to_cache(cache, models[0], commit=FIRST)
    length = {"sft": "train.num_steps", "train": "rl.num_steps"}[name]
    hub_commands.done(name)
    assert settings(hub_commands.folder / "out")["model"]["revision"] == FIRST
    identity = (hub_commands.folder / "out" / "run.json").read_text()
    assert str(cache) not in identity
    assert json.loads(identity)["model.path"] == ID
    # Another cache, where the main branch has moved on.
    moved = hub_commands.folder / "moved"
    add_to_cache(moved, models[0], commit=FIRST)
    add_to_cache(moved, models[1], commit=SECOND)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(moved))
    assert "resuming the run in out after step 2" in hub_commands.done(name, f"{length}=3")
    refused = hub_commands.refused(name, "model.revision=main", f"{length}=4")
    assert f"model.revision is '{FIRST}' there and '{SECOND}' here" in refused
    # A new run uses the commit that the branch names now.
    hub_commands.done(name, "run.dir=new")
    assert settings(hub_commands.folder / "new")["model"]["revision"] == SECOND


def test_a_hub_id_trains_as_its_folder_does(hub_commands: Commands, cache: Path) -> None:
    model = save_model(hub_commands.folder / "m")
    add_to_cache(cache, model, commit=FIRST)
    hub_commands.done("sft")
    hub_commands.done("sft", f"model.path={model}", "run.dir=of_folder")
    ours, theirs = (weights(hub_commands.folder / run, 2) for run in ("out", "of_folder"))
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    assert json.loads((hub_commands.folder / "of_folder" / "run.json").read_text())["model.revision"] is None


def test_a_teacher_is_found_by_its_id(hub_commands: Commands, cache: Path) -> None:
    add_to_cache(cache, save_model(hub_commands.folder / "m"), commit=FIRST)
    student = save_model(hub_commands.folder / "s", seed=1)
    hub_commands.done("sft", f"model.path={student}", "teacher.path=org/tiny")
    identity = json.loads((hub_commands.folder / "out" / "run.json").read_text())
    assert (identity["teacher.path"], identity["teacher.revision"]) == (ID, FIRST)


def test_a_model_is_fetched_from_the_hub_once_and_without_what_it_does_not_need(tmp_path: Path) -> None:
    model = save_model(tmp_path / "m")
    for unwanted in ("README.md", "consolidated.safetensors", "model.gguf"):
        (model / unwanted).write_text("unwanted")
    with local_hub(model, FIRST) as (address, asked):
        folder = found(tmp_path, address, "org/tiny").stdout.strip()
        assert Path(folder).name == FIRST
        assert Path(folder).is_relative_to(tmp_path / "home")
        names = {path.rpartition("/")[2] for path in asked if "/resolve/" in path}
        assert names == {"config.json", "generation_config.json", "model.safetensors"}
        num_asked = len(asked)
        again = found(tmp_path, address, "org/tiny", FIRST)
        assert (again.stdout.strip(), again.stderr) == (folder, "")
        assert len(asked) == num_asked, "a commit that the cache has needs no network"
        assert "the hub has no such id that you may read; correct it" in found(tmp_path, address, "org/absent").stderr
    assert found(tmp_path, address, "org/tiny").stdout.strip() == folder, "without the hub, what the cache has"
    refused = found(tmp_path, address, "org/other").stderr
    assert "while the hub cannot be reached; run `hf download org/other` where there is a network" in refused


def found(home: Path, address: str, name: str, revision: str = "") -> subprocess.CompletedProcess[str]:
    """Return what `find_folder` prints in its own process, because the hub's client reads the environment on import."""
    script = f"from treering.cli.hub import find_folder\nprint(find_folder({name!r}, [], setting='model.path'"
    env = {key: value for key, value in os.environ.items() if key != "HF_HUB_CACHE"}
    env |= {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    env |= {"HF_HOME": str(home / "home"), "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", f"{script}, revision={revision or None!r}))"]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
