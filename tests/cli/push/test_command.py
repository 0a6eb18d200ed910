"""`treering push`: the card says what was trained; the model, its tokenizer and the card are uploaded, and no more."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from tests.cli.hub_cache import FIRST, add_to_cache, save_model, save_tokenizer
from tests.cli.runs import Commands, call
from tests.cli.test_hub import SFT, TRAIN, cache, hub_commands
from tests.cli.test_lora import LORA
from treering.cli.push.card import model_card, published

__all__ = ["cache", "hub_commands"]

SECRET = "hf_secret_of_the_environment"
SFT_FILES = {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}


class Hub:
    """What a hub was sent; stands for `huggingface_hub.HfApi`."""

    def __init__(self) -> None:
        self.repos: list[tuple[str, dict[str, Any]]] = []
        self.commits: list[tuple[str, str, dict[str, bytes]]] = []
        self.error: Exception | None = None

    def create_repo(self, repo_id: str, **options: Any) -> str:
        if self.error is not None:
            raise self.error
        self.repos.append((repo_id, options))
        return f"https://hub/{repo_id}"

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> None:
        root = Path(folder_path)
        files = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        self.commits.append((repo_id, commit_message, files))

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1][2]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    return made


@pytest.fixture
def push(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs `treering push`; returns exit code, stdout and stderr."""

    def pushed(*arguments: str) -> tuple[Any, str, str]:
        return call(monkeypatch, "push", *arguments), *capfd.readouterr()

    return pushed


def trained(commands: Commands, name: str = "sft", *, base: str = "./base", more: str = "") -> Path:
    """A run in `out` on a model folder with a tokenizer."""
    model = commands.folder / "base"
    save_model(model)
    save_tokenizer(model)
    text = (SFT if name == "sft" else TRAIN).replace('path = "org/tiny"', f'path = "{base}"')
    (commands.folder / f"{name}.toml").write_text(f"{text}{more}")
    commands.done(name)
    return commands.folder / "out"


def test_model_tokenizer_and_card_are_uploaded_and_nothing_else(hub_commands: Commands, hub: Hub, push: Any) -> None:
    run = trained(hub_commands)
    code, out, err = push("out", "me/tiny", "--private")
    assert (code, err) == (0, "")
    assert "is now at https://hub/me/tiny" in " ".join(out.split())
    assert hub.repos == [("me/tiny", {"private": True, "exist_ok": True})]
    assert [commit[:2] for commit in hub.commits] == [("me/tiny", "Upload step-000002")]
    assert set(hub.files) == SFT_FILES
    checkpoint = run / "checkpoints" / "step-000002"
    assert {path.name for path in checkpoint.iterdir()} - SFT_FILES == {"manifest.json", "training_state.pt"}
    for name in SFT_FILES - {"README.md"}:
        assert hub.files[name] == (checkpoint / name).read_bytes()
    for content in hub.files.values():
        assert SECRET.encode() not in content
        assert str(hub_commands.folder).encode() not in content


def test_the_card_states_the_run(hub_commands: Commands, hub: Hub, push: Any) -> None:
    run = trained(hub_commands)
    card = (run / "checkpoints" / "step-000002" / "README.md").read_text()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    flat, computed = (sum(row[f"train/num_{name}"] for row in rows) for name in ("branch_tokens", "tokens"))
    assert card.startswith(
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- treering\n- sft\n---"
    )
    for line in (
        "| base model | base, a folder |",
        "| data | data.jsonl |",
        "| objective | sft |",
        "| steps | 2 |",
        f"| sharing | {1 - computed / flat:.3f}: {computed:,} tokens were computed for {flat:,} |",
        f"| loss | {rows[0]['train/loss']:.4f} at first, {rows[1]['train/loss']:.4f} at last |",
        "learning_rate = 0.01",
        "trees_per_step = 2",
        'model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")',
    ):
        assert line in card.splitlines(), line
    assert "| versions | treering " in card
    assert "[lora]" not in card
    push("out", "me/tiny", "--base-model", "org/tiny")
    uploaded = hub.files["README.md"].decode()
    assert "---\nbase_model: org/tiny\n" in uploaded
    assert "| base model | org/tiny |" in uploaded
    assert 'from_pretrained("me/tiny")' in uploaded
    assert "path/to/this/folder" not in uploaded


def test_the_card_of_reinforcement_learning_states_rewards_and_drafts(hub_commands: Commands, hub: Hub) -> None:
    run = trained(hub_commands, "train")
    card = (run / "checkpoints" / "step-000002" / "README.md").read_text()
    for start in ("| task | sums |", "| objective | grpo |", "| mean reward | ", "| tokens per forward | "):
        assert start in card
    assert "AutoTokenizer" not in card
    assert "rollouts of" not in card


def test_a_card_covers_the_steps_up_to_its_checkpoint(hub_commands: Commands) -> None:
    run = trained(hub_commands, more="save_every = 1\n")
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["train/loss"]
    card = (run / "checkpoints" / "step-000001" / "README.md").read_text()
    assert f"| loss | {first:.4f} at first, {first:.4f} at last |" in card
    assert model_card(run, 1, has_tokenizer=True) == card, "later steps change nothing"


def test_adapters_name_their_base_model_and_never_a_folder_of_this_machine(
    hub_commands: Commands, hub: Hub, push: Any
) -> None:
    trained(hub_commands, more=LORA)
    code, _, err = push("out", "me/tiny")
    assert code == 2
    assert "name its hub id with --base-model" in err
    assert hub.commits == []
    assert push("out", "me/tiny", "--base-model", "org/tiny")[0] == 0
    assert set(hub.files) == {"README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
    assert json.loads(hub.files["adapter_config.json"])["base_model_name_or_path"] == "org/tiny"
    assert all(str(hub_commands.folder).encode() not in content for content in hub.files.values())
    card = hub.files["README.md"].decode()
    assert 'AutoPeftModelForCausalLM.from_pretrained("me/tiny")' in card
    assert "library_name: peft" in card
    assert "rank = 2" in card


def test_a_run_from_the_hub_knows_its_base_model(hub_commands: Commands, cache: Path, hub: Hub, push: Any) -> None:
    add_to_cache(cache, save_model(hub_commands.folder / "m"), commit=FIRST)
    trained(hub_commands, base="org/tiny", more=LORA)
    assert push("out", "me/tiny")[0] == 0
    settings = json.loads(hub.files["adapter_config.json"])
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("org/tiny", FIRST)
    card = hub.files["README.md"].decode()
    assert card.startswith("---\nbase_model: org/tiny\nlibrary_name: peft\n")
    assert f"| base model | org/tiny at {FIRST} |" in card
    assert str(cache) not in card
    assert "this run began from org/tiny" in push("out", "me/tiny", "--base-model", "org/other")[2]


def test_a_dry_run_lists_the_files_and_uploads_none(hub_commands: Commands, hub: Hub, push: Any) -> None:
    trained(hub_commands)
    code, out, _ = push("out", "me/tiny", "--dry-run", "--json")
    found = json.loads(out)
    assert (code, set(found["files"]), found["url"]) == (0, SFT_FILES, None)
    assert hub.repos == hub.commits == []


def test_what_cannot_be_pushed_is_refused_in_one_line(
    hub_commands: Commands, hub: Hub, push: Any, tmp_path: Path
) -> None:
    run = trained(hub_commands)
    hub.error = OfflineModeIsEnabled("offline")
    refused = {
        ("out", "tiny"): "REPO_ID reads ORGANISATION/NAME or USER/NAME, and it is 'tiny'; correct it",
        ("base", "me/tiny"): "a run folder holds checkpoints/step-..., and base has none",
        ("out", "me/tiny", "--step", "1"): "checkpoints of the steps 2, and --step is 1; choose one of them",
        ("out", "me/tiny"): "pushing needs a network, and HF_HUB_OFFLINE is set; unset it",
    }
    for arguments, message in refused.items():
        code, out, err = push(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err
    (run / "checkpoints" / "step-000002" / "config.json").write_text("{}")
    assert "is damaged (step-000002: config.json has changed" in push("out", "me/tiny")[2]
    assert hub.commits == []


def test_a_card_without_a_run_beside_it_says_what_it_can(tmp_path: Path) -> None:
    card = model_card(tmp_path / "gone", 3, has_tokenizer=False)
    assert "# gone, step 3" in card
    assert "| sharing" not in card
    assert published(card, "me/tiny", None).count("me/tiny") == 1
