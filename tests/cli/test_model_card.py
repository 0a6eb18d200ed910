"""The card of a checkpoint describes what was trained, without anything about the machine."""

import json
from pathlib import Path

import pytest

from tests.cli.hub_cache import FIRST, add_to_cache, save_model, save_tokenizer
from tests.cli.runs import Commands
from tests.cli.test_hub import SFT, TRAIN, cache, hub_commands
from tests.cli.test_lora import LORA
from treering.cli.model_card import model_card

__all__ = ["cache", "hub_commands"]

SECRET = "hf_secret_of_the_environment"


def trained(commands: Commands, name: str = "sft", *, base: str = "./base", more: str = "") -> Path:
    """A run in `out` on a model folder with a tokenizer."""
    model = commands.folder / "base"
    save_model(model)
    save_tokenizer(model)
    text = (SFT if name == "sft" else TRAIN).replace('path = "org/tiny"', f'path = "{base}"')
    (commands.folder / f"{name}.toml").write_text(f"{text}{more}")
    commands.done(name)
    return commands.folder / "out"


def test_an_upload_without_the_training_state_has_model_tokenizer_and_card_and_nothing_of_this_machine(
    hub_commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    checkpoint = trained(hub_commands) / "checkpoints" / "step-000002"
    names = {path.name for path in checkpoint.iterdir()}
    model = {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert names - model == {"manifest.json", "training_state.pt"}
    for content in (path.read_bytes() for path in checkpoint.iterdir() if path.name in model):
        assert SECRET.encode() not in content
        assert str(hub_commands.folder).encode() not in content


def test_the_card_states_the_run(hub_commands: Commands) -> None:
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
        f"| sharing | {1 - computed / flat:.3f} |",
        f"| loss | {rows[0]['train/loss']:.4f} in the first step, {rows[1]['train/loss']:.4f} in the last |",
        "learning_rate = 0.01",
        "trees_per_step = 2",
        'model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")',
    ):
        assert line in card.splitlines(), line
    assert "| versions | treering " in card
    assert "[lora]" not in card


def test_the_card_of_reinforcement_learning_states_rewards(hub_commands: Commands) -> None:
    run = trained(hub_commands, "train")
    card = (run / "checkpoints" / "step-000002" / "README.md").read_text()
    for start in ("| task | sums |", "| objective | grpo |", "| mean reward | "):
        assert start in card
    assert "AutoTokenizer" not in card
    assert "rollouts of" not in card


def test_a_card_covers_the_steps_up_to_its_checkpoint(hub_commands: Commands) -> None:
    run = trained(hub_commands, more="save_every = 1\n")
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["train/loss"]
    card = (run / "checkpoints" / "step-000001" / "README.md").read_text()
    assert f"| loss | {first:.4f} in the first step, {first:.4f} in the last |" in card
    assert model_card(run, 1, has_tokenizer=True) == card, "later steps change nothing"


def test_the_card_of_adapters_loads_them(hub_commands: Commands) -> None:
    card = (trained(hub_commands, more=LORA) / "checkpoints" / "step-000002" / "README.md").read_text()
    assert 'AutoPeftModelForCausalLM.from_pretrained("path/to/this/folder")' in card
    assert "library_name: peft" in card
    assert "rank = 2" in card
    assert str(hub_commands.folder) not in card


def test_a_run_from_the_hub_knows_its_base_model(hub_commands: Commands, cache: Path) -> None:
    add_to_cache(cache, save_model(hub_commands.folder / "m"), commit=FIRST)
    checkpoint = trained(hub_commands, base="org/tiny", more=LORA) / "checkpoints" / "step-000002"
    settings = json.loads((checkpoint / "adapter_config.json").read_bytes())
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("org/tiny", FIRST)
    card = (checkpoint / "README.md").read_text()
    assert card.startswith("---\nbase_model: org/tiny\nlibrary_name: peft\n")
    assert f"| base model | org/tiny at {FIRST} |" in card
    assert str(cache) not in card


def test_a_card_without_its_run_shows_what_is_known(tmp_path: Path) -> None:
    card = model_card(tmp_path / "gone", 3, has_tokenizer=False)
    assert "# gone, step 3" in card
    assert "| sharing" not in card
