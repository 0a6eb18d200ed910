"""The list of settings: every key of the sections is on the page and in the help."""

import sys
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo
from tools.settings_page import PAGE, as_markdown

from treering.cli.main import main
from treering.cli.settings_help import kind_in_words, sections_of
from treering.config import Config, RlConfig, SftConfig

COMMANDS = {"sft": SftConfig, "train": RlConfig}


def fields_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield dotted keys and fields, read from the models themselves instead of their schema."""
    for attribute, field in model.model_fields.items():
        if field.exclude:
            # Can be set only from Python.
            continue
        kind: Any = field.annotation
        name = field.alias or attribute
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from fields_of(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{field.alias or name}", field


def listed(config_type: type[Config]) -> dict[str, Any]:
    return {
        f"{section.name}.{one.key}".lstrip("."): one for section in sections_of(config_type) for one in section.settings
    }


@pytest.mark.parametrize("config_type", COMMANDS.values())
def test_every_key_is_listed_with_its_default_and_description(config_type: type[Config]) -> None:
    expected = dict(fields_of(config_type))
    found = listed(config_type)
    assert found.keys() == expected.keys()
    for key, field in expected.items():
        default = None if field.is_required() else TypeAdapter(Any).dump_python(field.default, mode="json")
        assert (found[key].default is None) == (default is None), key
        assert default is None or tomllib.loads(f"default = {found[key].default}")["default"] == default, key
        assert found[key].description == field.description, key


def test_kinds_of_values_are_said_in_words() -> None:
    settings = listed(SftConfig)
    assert settings["optim.learning_rate"].kind == "number > 0"
    assert settings["train.gradient_checkpointing"].kind == '"none", "reentrant" or "non_reentrant"'
    assert settings["train.max_batch_tokens"].kind == 'integer or "auto"'
    assert settings["optim.betas"].kind == "[number >= 0 and < 1, number >= 0 and < 1]"
    assert settings["data.files"].kind == "path or array of path"
    # A bound that only reflects the size of an integer is not shown.
    assert settings["train.seed"].kind == "integer >= 0"
    assert kind_in_words({"type": "boolean"}) == "true or false"


def test_the_page_is_what_the_sections_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == as_markdown(), "run python tools/settings_page.py"


def test_the_page_has_no_more_settings_than_before() -> None:
    """Lower the bound when the count falls; do not raise it."""
    assert as_markdown().count("\n| `") <= 120


def test_help_shows_the_options_then_every_key_and_last_those_that_both_commands_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = []
    for name, config_type in COMMANDS.items():
        monkeypatch.setattr(sys, "argv", ["treering", name, "--help"])
        with pytest.raises(SystemExit):
            main()
        options, _, settings = capsys.readouterr().out.partition("Settings of CONFIG")
        assert "--json" in options
        parts = [
            [line.split()[0] for line in part.splitlines() if line.startswith("  ") and line[2:3].strip()]
            for part in settings.split("Shared by sft and train:")
        ]
        keys = [one.key for section in sections_of(config_type) for one in section.settings]
        assert sorted(parts[0] + parts[1]) == sorted(keys)
        assert all(section.title in settings for section in sections_of(config_type))
        shared.append(parts[1])
    assert sorted(shared[0]) == sorted(shared[1])
    assert {"tokenizer", "num_steps", "every", "project", "dir", "learning_rate"} < {*shared[0]}
    assert not {"trees_per_step", "files", "group_size", "file"} & {*shared[0]}
