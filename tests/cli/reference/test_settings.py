"""The list of settings: every key of the sections, on the page and in the help."""

import sys
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo
from tools.settings_page import PAGE, as_markdown

from treering.cli.main import main
from treering.cli.reference.settings import kind_in_words, sections_of
from treering.config import Config, RlConfig, SftConfig

COMMANDS = {"sft": SftConfig, "train": RlConfig}


def fields_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted keys and fields, from the models themselves instead of their schema."""
    for attribute, field in model.model_fields.items():
        kind: Any = field.annotation
        # As it stands in a file.
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
    assert settings["train.learning_rate"].kind == "number > 0"
    assert settings["train.parents"].kind == '"auto", "keep", "recompute" or "offload"'
    assert settings["train.max_batch_tokens"].kind == 'integer or "auto"'
    assert settings["train.betas"].kind == "[number >= 0 and < 1, number >= 0 and < 1]"
    assert settings["data.files"].kind == "array of path"
    # A bound that only says what a machine holds is left out.
    assert settings["train.seed"].kind == "integer >= 0"
    assert kind_in_words({"type": "boolean"}) == "true or false"


def test_the_page_is_what_the_sections_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == as_markdown(), "run python tools/settings_page.py"


@pytest.mark.parametrize(("name", "config_type"), COMMANDS.items())
def test_help_shows_the_options_and_then_every_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, config_type: type[Config]
) -> None:
    monkeypatch.setattr(sys, "argv", ["treering", name, "--help"])
    with pytest.raises(SystemExit):
        main()
    out = capsys.readouterr().out
    options, _, settings = out.partition("Settings of CONFIG")
    assert "--json" in options
    shown = [line.split()[0] for line in settings.splitlines() if line.startswith("  ") and line[2:3].strip()]
    assert shown == [one.key for section in sections_of(config_type) for one in section.settings]
    assert all(section.title in settings for section in sections_of(config_type))
