"""Runs with [eval] and `treering eval` measure the same value for the same weights."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.runs import Commands, assert_same_weights, call, rows
from treering.cli.model_card import model_card
from treering.config import RlConfig, SftConfig, load
from treering.config.record import load_written
from treering.data import AgentSpec, generate_trajectories, write_trajectories
from treering.files.writing import MANIFEST, read_facts, seal
from treering.report.content import page_content, tiles_of


@pytest.fixture
def evaluate(commands: Commands, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Run `treering eval`; return the JSON it prints, or its one line of refusal."""

    def evaluated(*arguments: str) -> Any:
        code = call(monkeypatch, "eval", *arguments, "--json")
        out, err = capfd.readouterr()
        return err if code else json.loads(out)

    return evaluated


def evaluations(run: str = "out") -> dict[int, dict[str, Any]]:
    found = {row["step"]: {name: row[name] for name in row if name.startswith("eval/")} for row in rows(metrics(run))}
    return {step: values for step, values in found.items() if values}  # type: ignore[misc]


def metrics(run: str) -> Path:
    return Path(run) / "metrics.jsonl"


def test_a_supervised_run_and_the_command_agree_on_the_held_out_loss(commands: Commands, evaluate: Any) -> None:
    err = commands.done("sft", "eval.share=0.4", "eval.every=3", "train.trees_per_step=1")
    assert "held-out tasks are evaluated" in err
    assert "step 0/4: eval loss" in err
    found = evaluations()
    assert list(found) == [0, 3, 4]
    assert found[4]["eval/loss"] < found[0]["eval/loss"]
    again = evaluate("out")
    assert again["eval/loss"] == pytest.approx(found[4]["eval/loss"], rel=1e-6)
    assert again["eval/num_tokens"] == found[4]["eval/num_tokens"]
    earlier = evaluate("out", "--step", "2")
    assert earlier["weights"].endswith("step-000002")
    assert earlier["eval/num_tokens"] == again["eval/num_tokens"]
    assert earlier["eval/loss"] != again["eval/loss"]
    card = model_card(Path("out"), 4, has_tokenizer=False)
    assert (
        f"| held-out loss | {found[0]['eval/loss']:.4f} after step 0, {found[4]['eval/loss']:.4f} after step 4 |"
        in card
    )


def test_a_run_and_the_command_agree_on_held_out_rewards(commands: Commands, evaluate: Any) -> None:
    own = (
        "task.max_prompts=12",
        "eval.share=0.4",
        "eval.temperature=1.0",
        "eval.num_samples=2",
        "eval.pass_reward=0.0",
    )
    err = commands.done("train", *own)
    assert "held-out prompts are evaluated" in err
    found = evaluations()
    assert list(found) == [0, 4]
    assert evaluate("out") == {"weights": str(Path("out/checkpoints/step-000004").resolve()), **found[4]}
    assert found[4]["eval/pass_at_2"] == 1.0
    assert evaluate("out", "eval.temperature=0", "eval.num_samples=1")["eval/pass_at_1"] == 1.0
    commands.done("train", *own)
    assert evaluations() == found


def test_held_out_files_leave_weights_and_rollouts_as_they_are_without_them(commands: Commands) -> None:
    write("train.jsonl", seed=0), write("test.jsonl", seed=1)
    own = ("data.source=files", 'data.files=["train.jsonl"]')
    commands.done("sft", *own)
    commands.done("sft", *own, 'eval.files=["test.jsonl"]', "eval.every=1", "run.dir=evaluated")
    assert_same_weights(Path("out"), Path("evaluated"), 4)
    assert list(evaluations("evaluated")) == [0, 1, 2, 3, 4]


def test_a_model_is_evaluated_on_a_file(commands: Commands, evaluate: Any) -> None:
    write("test.jsonl", seed=1)
    commands.done("sft", "train.num_steps=1")
    found = evaluate("out/checkpoints/step-000001", "--file", "test.jsonl", "model.device=cpu")
    # The run trains on generated ids; a file of ids works too.
    assert found["eval/loss"] > 0
    assert "which has no held-out data" in evaluate("out/checkpoints/step-000001")
    assert "has no held-out data in [eval]" in evaluate("out")
    assert "--step names a checkpoint of a run" in evaluate("out/checkpoints/step-000001", "--step", "1")


@pytest.mark.parametrize(("name", "figure"), [("sft", "held-out loss"), ("train", "held-out reward")])
def test_what_a_run_measured_on_held_out_data_is_in_its_last_table_its_report_and_a_comparison(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str, figure: str
) -> None:
    assert call(monkeypatch, name, f"{name}.toml", "eval.share=0.4") == 0
    key = figure.replace("held-out ", "eval/")
    values = [row[key] for row in evaluations().values()]
    words = f"{values[0]:.4f} after step 0, {values[-1]:.4f} after step 4"
    table = next(line for line in capfd.readouterr().out.splitlines() if figure in line)
    assert words in table
    content = page_content(Path("out"), lambda run: None)
    assert content["runs"][0]["facts"]["table"][figure] == words
    assert name == "sft" or (figure, f"{values[-1]:.3f}") in [tile[:2] for tile in tiles_of(content)]
    compared = page_content(Path("out"), lambda run: None, others=[Path("out")])
    assert [run["facts"]["table"][figure] for run in compared["runs"]] == [words, words]


def write(name: str, *, seed: int) -> None:
    spec = AgentSpec(num_tasks=4, num_trials=2, vocab_size=32, seed=seed)
    write_trajectories(Path(name), generate_trajectories(spec))


def test_the_nearest_share_that_leaves_both_sides_some_is_taken_and_logged(commands: Commands) -> None:
    assert "eval.share = 0.001 of 5 tasks is 0 by their ids; 1 held out instead" in commands.done(
        "sft", "eval.share=0.001"
    )
    told = "eval.share = 0.999 of 4 prompts is 4 by their ids; 3 held out instead"
    assert told in commands.done("train", "eval.share=0.999", "rl.prompts_per_step=1", "run.dir=rl")
    told = "eval.share = 0.5 needs at least two tasks, one on each side, got 1"
    assert told in commands.refused("sft", "eval.share=0.5", "data.max_tasks=1", "run.dir=one")


def test_the_settings_that_a_run_has_written_read_back_as_they_were() -> None:
    for kind, overrides in (
        (SftConfig, ["train.num_steps=3", "data.source=generated", "eval.share=0.2", "optim.betas=[0.8, 0.9]"]),
        (
            RlConfig,
            ["rl.num_steps=3", "task.kind=prompts", "task.file=p.jsonl", "task.tokenizer=t", "rl.clip=[0.1, 0.2]"],
        ),
    ):
        config = load(kind, None, overrides)
        written = json.loads(json.dumps(config.model_dump(mode="json")))
        assert load_written(kind, written, [], source="config.json") == config
        assert load_written(kind, written, ["run.keep=7"], source="config.json").run.keep == 7


def aged(run: Path, values: dict[str, Any]) -> None:
    """Write more settings into the files of a run, as an earlier version did."""
    config = json.loads((run / "config.json").read_text())
    for key, value in values.items():
        section, _, name = key.partition(".")
        config[section][name] = value
    (run / "config.json").write_text(json.dumps(config))
    identity = json.loads((run / "run.json").read_text()) | values
    (run / "run.json").write_text(json.dumps(identity))
    for checkpoint in (run / "checkpoints").glob("step-*"):
        facts = read_facts(checkpoint) | {"identity": identity}
        (checkpoint / MANIFEST).unlink()
        seal(checkpoint, facts)


def test_a_run_of_an_earlier_version_is_evaluated_resumed_and_shown_or_refused_by_name(
    commands: Commands, evaluate: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    own = ("eval.share=0.5", "task.max_prompts=4")
    commands.done("train", *own)
    found = evaluate("out")
    aged(Path("out"), {"warmup.num_prompts": 4096, "history.shape": "tree", "optim.eps": 1e-8, "rl.importance": None})
    assert evaluate("out") == found
    assert "resuming the run in out after step 4" in commands.done("train", *own, "rl.num_steps=5")
    aged(Path("out"), {"warmup.num_prompts": 20, "history.shape": "chain"})
    told = "config.json: 2 problems: warmup.num_prompts is a setting of earlier versions: 4096 are drawn"
    assert told in evaluate("out")
    assert "history.shape is a setting of earlier versions: drafts are trees" in evaluate("out")
    assert "warmup.num_prompts is 20 there and 'nothing' here" in commands.refused("train", *own, "rl.num_steps=6")
    # These commands read settings as the run wrote them.
    for command in ("report", "inspect", "doctor"):
        words = {"report": ["out"], "inspect": ["--drafts", "out"], "doctor": ["out"]}[command]
        assert call(monkeypatch, command, *words) == 0, capfd.readouterr().err
    assert page_content(Path("out"), lambda run: None)["runs"][0]["facts"]["settings"]["history.shape"] == '"chain"'
