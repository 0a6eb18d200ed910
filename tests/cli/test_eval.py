"""Runs with [eval], and `treering eval`: one measurement of the same weights, whoever asks for it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.runs import Commands, assert_same_weights, call, rows
from treering.cli.push.card import model_card
from treering.config import RlConfig, SftConfig, load
from treering.config.load import load_written
from treering.data import AgentSpec, generate_trajectories, write_trajectories


@pytest.fixture
def evaluate(commands: Commands, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs `treering eval`; returns what it prints as JSON, or its one line of refusal."""

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
    earlier = evaluate("out", "--step", "2", "eval.max_tasks=1")
    assert earlier["weights"].endswith("step-000002")
    assert earlier["eval/num_tokens"] < again["eval/num_tokens"]
    card = model_card(Path("out"), 4, has_tokenizer=False)
    assert (
        f"| held-out loss | {found[0]['eval/loss']:.4f} after step 0, {found[4]['eval/loss']:.4f} after step 4 |"
        in card
    )


def test_a_run_and_the_command_agree_on_held_out_rewards(commands: Commands, evaluate: Any) -> None:
    own = (
        "task.num_prompts=12",
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
    own = ("data.source=files", 'data.files=["train.jsonl"]', "data.stand_in={}")
    commands.done("sft", *own)
    commands.done("sft", *own, 'eval.files=["test.jsonl"]', "eval.every=1", "run.dir=evaluated")
    assert_same_weights(Path("out"), Path("evaluated"), 4)
    assert list(evaluations("evaluated")) == [0, 1, 2, 3, 4]


def test_a_model_is_evaluated_on_a_file(commands: Commands, evaluate: Any) -> None:
    write("test.jsonl", seed=1)
    commands.done("sft", "train.num_steps=1")
    found = evaluate("out/checkpoints/step-000001", "--file", "test.jsonl", "model.device=cpu")
    # The run trains on generated ids; a file of ids is as good.
    assert found["eval/loss"] > 0
    assert "which says nothing of held-out data" in evaluate("out/checkpoints/step-000001")
    assert "no [eval] that names held-out data" in evaluate("out")
    assert "--step names a checkpoint of a run" in evaluate("out/checkpoints/step-000001", "--step", "1")


def write(name: str, *, seed: int) -> None:
    spec = AgentSpec(num_tasks=4, num_trials=2, vocab_size=32, seed=seed)
    write_trajectories(Path(name), generate_trajectories(spec))


def test_a_split_with_an_empty_side_is_refused(commands: Commands) -> None:
    assert "holds out 0 of 5 tasks, and both sides need some" in commands.refused("sft", "eval.share=0.001")
    assert "holds out 4 of 4 prompts" in commands.refused("train", "eval.share=0.999")


def test_the_settings_that_a_run_has_written_read_back_as_they_were() -> None:
    for kind, overrides in (
        (SftConfig, ["train.num_steps=3", "data.source=generated", "eval.share=0.2", "train.betas=[0.8, 0.9]"]),
        (
            RlConfig,
            ["rl.num_steps=3", "task.kind=prompts", "task.file=p.jsonl", "task.tokenizer=t", "rl.clip=[0.1, 0.2]"],
        ),
    ):
        config = load(kind, None, overrides)
        written = json.loads(json.dumps(config.model_dump(mode="json")))
        assert load_written(kind, written, [], source="config.json") == config
        assert load_written(kind, written, ["run.keep=7"], source="config.json").run.keep == 7
