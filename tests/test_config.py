"""Configurations: which file or override wins, and errors that name the mistake and its fix."""

import contextlib
import re
import tomllib
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering.config import Config, RlConfig, SftConfig, load
from treering.config.optim import OptimOptions
from treering.config.problems import REMOVED
from treering.config.record import load_written
from treering.config.steps import StepsOptions
from treering.errors import ConfigError

MINIMAL = '[data]\nsource = "generated"\n[train]\nnum_steps = 20\n'


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    return written(tmp_path, MINIMAL)


def written(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(SftConfig, path, overrides)
    return str(caught.value)


def test_a_file_gives_its_values_and_defaults_fill_the_rest(minimal: Path) -> None:
    config = load(SftConfig, minimal)
    assert (config.train.num_steps, config.data.source) == (20, "generated")
    assert (config.train.layout, config.metrics.sinks) == ("tree", ("jsonl",))


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones(minimal: Path) -> None:
    overrides = ["train.num_steps=5", "optim.learning_rate=1e-3", "train.num_steps = 7", "data.max_tasks=3"]
    config = load(SftConfig, minimal, overrides)
    assert (config.train.num_steps, config.optim.learning_rate, config.data.max_tasks) == (7, 1e-3, 3)


def test_an_override_is_read_as_toml_and_else_as_a_string(minimal: Path) -> None:
    config = load(
        SftConfig,
        minimal,
        [
            "run.dir=runs/a b",
            'metrics.sinks=["jsonl", "tensorboard"]',
            "optim.betas=[0, 0.5]",
            "data.max_tasks=4",
        ],
    )
    assert config.run.dir == Path("runs/a b")
    assert config.metrics.sinks == ("jsonl", "tensorboard")
    assert config.optim.betas == (0.0, 0.5)
    assert config.data.max_tasks == 4


def test_every_old_name_of_the_optimizer_is_refused_with_the_one_that_both_commands_have(minimal: Path) -> None:
    for name in [name for name, field in OptimOptions.model_fields.items() if not field.exclude]:
        for section in ("train", "rl"):
            told = f"unknown key '{section}.{name}'; did you mean 'optim.{name}'?"
            assert told in refusal(minimal, f"{section}.{name}=1")
            with pytest.raises(ConfigError, match=re.escape(told)):
                load(RlConfig, None, ["rl.num_steps=5", f"{section}.{name}=1"])
    for name in [name for name, field in StepsOptions.model_fields.items() if not field.exclude]:
        assert f"unknown key 'rl.{name}'; did you mean 'train.{name}'?" in refusal(minimal, f"rl.{name}=1")
        with pytest.raises(ConfigError, match=rf"unknown key 'train\.{name}'; did you mean 'rl\.{name}'\?"):
            load(RlConfig, None, ["rl.num_steps=5", f"train.{name}=1"])


def nested(settings: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    """Return a copy of settings with another value of a dotted key."""
    name, _, rest = key.partition(".")
    return settings | {name: nested(settings.get(name, {}), rest, value) if rest else value}


OLD = [
    pytest.param(config, key, id=f"{config.__name__} {key}")
    for config in (SftConfig, RlConfig)
    for key in REMOVED
    if key.partition(".")[0] in config.model_fields
]


@pytest.mark.parametrize(("config_type", "key"), OLD)
def test_a_removed_setting_is_refused_with_what_holds_now_and_read_from_a_run_where_it_holds(
    config_type: type[Config], key: str
) -> None:
    least = {SftConfig: MINIMAL, RlConfig: "[rl]\nnum_steps = 20\n"}[config_type]
    settings, (value, told) = tomllib.loads(least), REMOVED[key]
    config = config_type.model_validate(settings)
    with pytest.raises(ConfigError, match=re.escape(f"{key} is a setting of earlier versions: {told}")) as caught:
        load(config_type, None, [*overrides_of(settings), f"{key}=7"])
    assert len(str(caught.value)) <= 300
    before = nested(config.model_dump(mode="json"), key, value)
    assert load_written(config_type, before, [], source="config.json") == config
    with pytest.raises(ConfigError, match=rf"config\.json: .*{re.escape(key)} is a setting of earlier versions"):
        load_written(config_type, nested(before, key, "x"), [], source="config.json")


def overrides_of(settings: dict[str, Any]) -> list[str]:
    return [f"{name}.{key}={value}" for name, section in settings.items() for key, value in section.items()]


@pytest.mark.parametrize("section", ["data", "eval"])
def test_one_path_stands_for_an_array_of_it(tmp_path: Path, section: str) -> None:
    text = '[train]\nnum_steps = 1\n[data]\nfiles = "a.jsonl"\n'
    config = load(SftConfig, written(tmp_path, text), [f"{section}.files=b.jsonl"])
    assert getattr(config, section).files == (Path("b.jsonl"),)
    assert load(SftConfig, written(tmp_path, text), [f'{section}.files=["b", "c"]']).data.files
    assert f"{section}.files: expected an array, got 7 (integer)" in refusal(
        tmp_path / "run.toml", f"{section}.files=7"
    )


@given(st.text(max_size=20) | st.text(alphabet="\n\r=\"'#[]{}, other1", max_size=30))
def test_no_override_value_can_set_another_key(text: str) -> None:
    class Named(Config):
        name: str = ""
        other: int = 0

    # A string setting refuses text that is a TOML number, for example.
    with contextlib.suppress(ConfigError):
        assert load(Named, None, [f"name={text}"]).other == 0


@pytest.mark.parametrize(
    ("override", "key", "near"),
    [
        ("train.learning_rat=1", "train.learning_rat", "optim.learning_rate"),
        ("trian.num_steps=1", "trian", "train"),
        ("data.max_task=1", "data.max_task", "data.max_tasks"),
        ("warmup_steps=1", "warmup_steps", "optim.warmup_steps"),
        ("model.num_step=1", "model.num_step", "train.num_steps"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(minimal: Path, override: str, key: str, near: str) -> None:
    assert f"unknown key '{key}'; did you mean '{near}'?" in refusal(minimal, override)


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("run.log=true", "metrics.sinks"),
        ("report_to=wandb", "metrics.sinks"),
        ("train.report_to=wandb", "metrics.sinks"),
        ("wandb.project=p", "metrics.sinks"),
        ("model.model_name_or_path=m", "model.path"),
        ("lora.r=8", "lora.rank"),
        ("run.output_dir=out", "run.dir"),
        ("optim.lr=1", "optim.learning_rate"),
        ("train.batch_size=8", "train.trees_per_step"),
        ("train.gradient_accumulation_steps=8", "train.trees_per_step"),
        ("data.path=a.jsonl", "data.files"),
        ("train.bf16=true", "model.dtype"),
        ("train.eval_steps=5", "eval.every"),
        ("eval.test_size=0.1", "eval.share"),
        ("train.warmup_ratio=0.1", "optim.warmup_steps"),
    ],
)
def test_a_name_of_another_library_is_refused_with_ours(minimal: Path, override: str, near: str) -> None:
    key = override.partition("=")[0].removesuffix(".project")
    assert f"unknown key '{key}'; did you mean '{near}' (" in refusal(minimal, override)


@pytest.mark.parametrize(
    "key", ["data.shuffle", "data.num_workers", "train.foo_size", "eval.epsilon", "engine.type", "lora.dropout"]
)
def test_a_key_of_another_section_is_not_suggested_for_its_letters(minimal: Path, key: str) -> None:
    assert "did you mean" not in refusal(minimal, f"{key}=1")


def test_pushing_from_the_configuration_is_refused_with_the_command(minimal: Path) -> None:
    told = "upload a checkpoint with `hf upload`, see docs/command_line.md"
    assert f"unknown key 'run.push_to_hub'; {told}" in refusal(minimal, "run.push_to_hub=true")


@pytest.mark.parametrize(
    ("text", "interval"), [("7", 7), ("30s", 30.0), ("10min", 600.0), ("0.5 h", 1800.0), (None, 600.0)]
)
def test_a_run_saves_every_few_steps_or_after_a_time(minimal: Path, text: str | None, interval: float) -> None:
    found = load(SftConfig, minimal, [f"run.save_every={text}"] if text else []).run.save_interval
    assert (found.total_seconds() if isinstance(found, timedelta) else found) == interval


@pytest.mark.parametrize("text", ["0", "-1", "true", "10", "10 days", "min", "1.5"])
def test_what_is_neither_a_count_nor_a_time_is_refused(minimal: Path, text: str) -> None:
    value = f'"{text}"' if text == "10" else text
    rule = 'run.save_every: an integer of at least 1, or a time such as "10min" (s, min or h), got'
    assert rule in refusal(minimal, f"run.save_every={value}")


def test_an_unknown_key_near_nothing_is_refused_with_the_keys_there_are(minimal: Path) -> None:
    assert "valid keys here: run.dir, run.save_every, run.keep" in refusal(minimal, "run.xyzzy=1")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('train.num_steps="3"', "train.num_steps: expected a valid integer, got '3' (string)"),
        ("train.num_steps=1.5", "train.num_steps: expected a valid integer, got 1.5 (float)"),
        ("train.seed=true", "train.seed: expected a valid integer, got True (boolean)"),
        ("train.layout=flat", "train.layout: expected 'tree', 'joined' or 'packed', got 'flat' (string)"),
        ("optim.learning_rate=nan", "optim.learning_rate: expected a finite number, got nan (float)"),
        ("run.keep=0", "run.keep: expected greater than or equal to 1, got 0 (integer)"),
        ("metrics.sinks=jsonl", "metrics.sinks: expected an array, got 'jsonl' (string)"),
        ("run.dir=3", "run.dir: expected a path, as a string, got 3 (integer)"),
        ("train=3", "train: expected a table of settings, got 3 (integer)"),
        ("optim.betas=[0.9]", "optim.betas.1 has no default and is not set"),
        (
            "data.files=[a.jsonl]",
            "a list or table in an override is TOML, whose texts have quotes, got [a.jsonl]",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_what_was_expected_and_what_came(
    minimal: Path, override: str, message: str
) -> None:
    assert message in refusal(minimal, override)


def test_all_problems_are_named_in_one_line(minimal: Path) -> None:
    message = refusal(minimal, "train.sed=1", "run.keep=0", "dat.x=1")
    assert message.startswith(f"{minimal}: 3 problems: ")
    assert "\n" not in message
    for part in ("'train.sed'", "run.keep", "'dat'"):
        assert part in message


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (
            ["model.path=m", "model.num_layers=2", "data.source=files", 'data.files=["a"]'],
            "has its own shape.*num_layers",
        ),
        (["model.hidden_size=72"], "must be a multiple of 32, or of 4 below 64, .*, got 72"),
        (['data.files=["a"]'], "reads no files"),
        (["data.source=files"], "at least one file"),
        (["data.template=hf"], "neither data.tokenizer nor model.path is set"),
        (["optim.warmup_steps=20"], "warmup_steps must be below num_steps = 20, got 20"),
        (["train.normalizer=constant"], "train.normalizer: one of token_mean, .*, got 'constant'"),
        (['metrics.sinks=["jsonl", "jsonl"]'], "must be distinct"),
        (["model.path=m"], "got the pre-trained model"),
        (["teacher.top_k=1", "teacher.weight=1"], "without teacher.path"),
        (["teacher.path=m"], "ids of its tokenizer"),
        (['eval.files=["a.jsonl"]'], r"set eval\.share instead"),
    ],
)
def test_settings_that_contradict_are_refused(minimal: Path, overrides: list[str], rule: str) -> None:
    message = refusal(minimal, *overrides)
    assert "1 problem: " in message
    assert re.search(rule, message)
    assert "; " in message, "the fix follows the rule"


def test_a_model_folder_allows_settings_that_are_not_its_shape(minimal: Path) -> None:
    files = ["data.source=files", 'data.files=["a"]']
    config = load(SftConfig, minimal, ["model.path=m", "model.dtype=bfloat16", "model.device=cpu", *files])
    assert (config.model.path, config.model.dtype, config.data.files) == ("m", "bfloat16", (Path("a"),))


def test_training_needs_an_end() -> None:
    assert "neither train.num_epochs nor train.num_steps" in refusal(None, "data.source=generated")


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    assert "no.toml (No such file" in refusal(tmp_path / "no.toml")


def test_a_file_that_is_not_toml_is_refused_with_its_line(tmp_path: Path) -> None:
    assert "run.toml is not TOML: " in refusal(written(tmp_path, "[train]\nnum_steps = = 3\n"))
    assert "line 2" in refusal(written(tmp_path, "[train]\nnum_steps = = 3\n"))
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"a = '\xff'")
    assert "byte 5 is not UTF-8" in refusal(binary)


@pytest.mark.parametrize("override", ["train.num_steps", "=3", "train.=3", "train..x=3"])
def test_an_override_without_a_key_or_value_is_refused(minimal: Path, override: str) -> None:
    assert f"an override must be section.key=value, got {override!r}" in refusal(minimal, override)


def test_an_override_below_a_value_is_refused(minimal: Path) -> None:
    assert "'train.num_steps' is the value 20" in refusal(minimal, "train.num_steps.x=3")
