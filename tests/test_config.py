"""Configurations: what is read, what wins, and that every mistake is named with its fix."""

import contextlib
import re
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering.config import Config, SftConfig, load
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
    assert (config.train.shared, config.train.layout, config.metrics.sinks) == ("sum", "tree", ("jsonl",))


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones(minimal: Path) -> None:
    overrides = ["train.num_steps=5", "train.learning_rate=1e-3", "train.num_steps = 7", "data.stand_in.num_tasks=3"]
    config = load(SftConfig, minimal, overrides)
    assert (config.train.num_steps, config.train.learning_rate, config.data.stand_in.num_tasks) == (7, 1e-3, 3)


def test_an_override_is_read_as_toml_and_else_as_a_string(minimal: Path) -> None:
    config = load(
        SftConfig,
        minimal,
        [
            "run.dir=runs/a b",
            'metrics.sinks=["jsonl", "tensorboard"]',
            "train.betas=[0, 0.5]",
            "data.stand_in.seed=4",
        ],
    )
    assert config.run.dir == Path("runs/a b")
    assert config.metrics.sinks == ("jsonl", "tensorboard")
    assert config.train.betas == (0.0, 0.5)
    assert config.data.stand_in.seed == 4


@given(st.text(max_size=20) | st.text(alphabet="\n\r=\"'#[]{}, other1", max_size=30))
def test_no_override_value_can_set_another_key(text: str) -> None:
    class Named(Config):
        name: str = ""
        other: int = 0

    # Text that is a TOML number, for one, is refused for the string.
    with contextlib.suppress(ConfigError):
        assert load(Named, None, [f"name={text}"]).other == 0


@pytest.mark.parametrize(
    ("override", "key", "near"),
    [
        ("train.learning_rat=1", "train.learning_rat", "train.learning_rate"),
        ("trian.num_steps=1", "trian", "train"),
        ("data.stand_in.num_task=1", "data.stand_in.num_task", "data.stand_in.num_tasks"),
        ("warmup_steps=1", "warmup_steps", "train.warmup_steps"),
        ("model.num_step=1", "model.num_step", "train.num_steps"),
        ("data.stand_in.sed=1", "data.stand_in.sed", "data.stand_in.seed"),
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
    ],
)
def test_a_name_of_another_library_is_refused_with_ours(minimal: Path, override: str, near: str) -> None:
    key = override.partition("=")[0].removesuffix(".project")
    assert f"unknown key '{key}'; did you mean '{near}' (" in refusal(minimal, override)


def test_who_would_push_from_the_configuration_is_told_the_command(minimal: Path) -> None:
    told = "a run is uploaded when you ask for it: treering push RUN REPO_ID"
    assert f"unknown key 'run.push_to_hub'; {told}" in refusal(minimal, "run.push_to_hub=true")


@pytest.mark.parametrize(
    ("text", "interval"), [("7", 7), ("30s", 30.0), ("10min", 600.0), ("0.5 h", 1800.0), (None, 600.0)]
)
def test_a_run_saves_every_so_many_steps_or_after_a_time(minimal: Path, text: str | None, interval: float) -> None:
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
        ("train.layout=flat", "train.layout: expected 'tree' or 'packed', got 'flat' (string)"),
        ("train.learning_rate=nan", "train.learning_rate: expected a finite number, got nan (float)"),
        ("run.keep=0", "run.keep: expected greater than or equal to 1, got 0 (integer)"),
        ("metrics.sinks=jsonl", "metrics.sinks: expected an array, got 'jsonl' (string)"),
        ("run.dir=3", "run.dir: expected a path, as a string, got 3 (integer)"),
        ("train=3", "train: expected a table of settings, got 3 (integer)"),
        ("train.betas=[0.9]", "train.betas.1 has no default and is not set"),
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
        (["model.num_heads=4", "model.num_kv_heads=3"], "3 does not divide 4"),
        (['data.files=["a"]'], "reads no files"),
        (["data.source=files"], "at least one file"),
        (["data.template=hf"], "neither data.tokenizer nor model.path is set"),
        (["train.warmup_steps=20"], "warmup_steps = 20 is not below num_steps = 20"),
        (["train.divisor=3"], 'normalizer = "token_mean" with divisor = 3.0'),
        (["train.normalizer=constant"], 'normalizer = "constant" with divisor = None'),
        (["train.layout=packed", "train.shared=once"], "cannot hold"),
        (['metrics.sinks=["jsonl", "jsonl"]'], "repeats one"),
        (["model.path=m"], "is a pre-trained model"),
        (["train.objective=distill"], "teacher.path is not set"),
        (["teacher.path=m"], 'train.objective = "sft" with teacher.weight = None'),
        (["teacher.top_k=1", "teacher.weight=1"], "without teacher.path"),
        (["train.objective=distill", "teacher.path=m", "teacher.weight=1"], '"distill" with teacher.weight = 1.0'),
        (["train.objective=distill", "teacher.path=m"], "ids of its own tokenizer"),
        (["train.objective=distill", "teacher.path=m", "teacher.beta=0.5"], 'beta belongs to divergence = "jsd"'),
        (['eval.files=["a.jsonl"]'], r"set eval\.share instead"),
    ],
)
def test_settings_that_contradict_are_refused(minimal: Path, overrides: list[str], rule: str) -> None:
    message = refusal(minimal, *overrides)
    assert "1 problem: " in message
    assert re.search(rule, message)
    assert "; " in message, "the fix follows the rule"


def test_a_model_folder_goes_with_what_is_no_shape(minimal: Path) -> None:
    files = ["data.source=files", 'data.files=["a"]']
    config = load(SftConfig, minimal, ["model.path=m", "model.dtype=bfloat16", "model.device=cpu", *files])
    assert (config.model.path, config.model.dtype, config.data.files) == ("m", "bfloat16", (Path("a"),))


def test_training_needs_an_end() -> None:
    assert "neither num_epochs nor num_steps" in refusal(None, "data.source=generated")


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    assert "no.toml cannot (No such file" in refusal(tmp_path / "no.toml")


def test_a_file_that_is_not_toml_is_refused_with_its_line(tmp_path: Path) -> None:
    assert "run.toml is not TOML: " in refusal(written(tmp_path, "[train]\nnum_steps = = 3\n"))
    assert "line 2" in refusal(written(tmp_path, "[train]\nnum_steps = = 3\n"))
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"a = '\xff'")
    assert "byte 5 is not UTF-8" in refusal(binary)


@pytest.mark.parametrize("override", ["train.num_steps", "=3", "train.=3", "train..x=3"])
def test_an_override_without_a_key_or_value_is_refused(minimal: Path, override: str) -> None:
    assert f"an override reads section.key=value, got {override!r}" in refusal(minimal, override)


def test_an_override_below_a_value_is_refused(minimal: Path) -> None:
    assert "'train.num_steps' is the value 20" in refusal(minimal, "train.num_steps.x=3")
