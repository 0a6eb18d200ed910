"""`treering init` writes a file that runs as it is, with sizes that fit, and overwrites nothing."""

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli import runs
from tests.cli.hub_cache import save_model, save_tokenizer
from treering.cli.toml import comments, pair
from treering.data import Trajectory, write_trajectories
from treering.families import FAMILIES

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}30 {% endif %}"


@pytest.fixture
def folder(folder: Path) -> Path:
    """The current folder, with a model of 32 ids that was made for 24 positions, and its tokenizer."""
    model = save_model(folder / "model")
    save_tokenizer(model)
    (model / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "unk_token": "0"})
    )
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 24}))
    return folder


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    return runs.call(monkeypatch, *words), *capsys.readouterr()


def retype(model: Path, model_type: str) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": model_type}))


def write_set(path: Path, num_tasks: int) -> None:
    """Write tasks of two trajectories of five tokens that share three; the last three tokens are trained."""
    mask = np.array([0, 0, 1, 1, 1], np.bool_)
    rows = [
        Trajectory(task_id=task, tokens=np.array([1, 2, task % 20, 20, last], np.int32), loss_mask=mask)
        for task in range(num_tasks)
        for last in (21, 22)
    ]
    write_trajectories(path, rows)


def summary_of(out: str) -> dict[str, Any]:
    return json.loads(out[out.index("{") :])


def test_a_file_for_trajectories_trains_as_it_is(folder, monkeypatch, capsys):
    write_set(folder / "traces.jsonl", 20)
    code, out, _ = call(monkeypatch, capsys, "init", "traces.jsonl", "--model", "model", "--json")
    assert (code, json.loads(out)) == (0, {"config": "sft.toml", "command": "treering sft sft.toml"})
    text = (folder / "sft.toml").read_text()
    words = " ".join(text.replace("\n#", "").split())
    # The first four of five tokens of each task are shared.
    assert "40 trajectories of 20 tasks with 200 tokens, of which 120 are distinct (sharing 0.40)" in words
    assert "The longest sequence has 5 tokens, the largest tree 6 distinct" in words
    settings = tomllib.loads(text)
    assert settings["data"] == {"files": ["traces.jsonl"]}
    # Two trees a step give 10 steps an epoch; three epochs.
    assert (settings["train"]["trees_per_step"], settings["train"]["num_epochs"]) == (2, 3)
    code, out, err = call(monkeypatch, capsys, "sft", "sft.toml", "--json")
    assert code == 0, err
    summary = summary_of(out)
    assert (summary["num_steps"], summary["run_dir"]) == (30, "runs/traces-sft")
    assert "Passes over the tasks: 30 steps." in words


def test_sequences_above_the_context_of_the_model_are_cut_to_it(folder, monkeypatch, capsys):
    mask = np.arange(30) > 1
    rows = [Trajectory(task_id=n, tokens=np.arange(n, n + 30, dtype=np.int32) % 32, loss_mask=mask) for n in range(20)]
    write_trajectories(folder / "traces.jsonl", rows)
    assert call(monkeypatch, capsys, "init", "traces.jsonl", "--model", "model")[0] == 0
    data = tomllib.loads((folder / "sft.toml").read_text())["data"]
    assert (data["max_length"], data["overlong"]) == (24, "cut")
    code, _, err = call(monkeypatch, capsys, "sft", "sft.toml", "train.num_steps=4", "--json")
    assert code == 0, err
    assert "20 of 20 sequences cut to data.max_length = 24" in " ".join(err.split())
    (folder / "sft.toml").write_text((folder / "sft.toml").read_text().replace("max_length = 24", "max_length = 30"))
    code, _, err = call(monkeypatch, capsys, "sft", "sft.toml", "train.num_steps=4", "run.dir=long", "--json")
    assert code == 2
    assert "20 of 20 are too long: set data.max_length = 24 and data.overlong" in " ".join(err.split())


def test_a_file_for_prompts_trains_as_it_is(folder, monkeypatch, capsys):
    lines = [{"prompt": f"{i} {i + 1}", "answer": str(i)} for i in range(4)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, err = call(monkeypatch, capsys, "init", "prompts.jsonl", "--model", "model", "--rl", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["command"] == "treering train train.toml"
    text = (folder / "train.toml").read_text()
    settings = tomllib.loads(text)
    # Prompts of two numbers and the opening of a turn take 3 of the 24 positions.
    assert settings["sampling"]["max_tokens"] == 24 - 3
    assert (settings["rl"]["prompts_per_step"], settings["rl"]["num_epochs"]) == (1, 3)
    assert "4 prompts, 4 of them with an answer" in " ".join(text.replace("\n#", "").split())
    code, out, err = call(monkeypatch, capsys, "train", "train.toml", "--json")
    assert code == 0, err
    num_steps = summary_of(out)["num_steps"]
    assert f"Passes over the prompts: {num_steps} steps." in text


def chat(**answer: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", **answer}]}


def ids(prompt: int, answer: int) -> dict[str, Any]:
    return {"task_id": prompt, "tokens": [1] * (prompt + answer), "loss_mask": [0] * prompt + [1] * answer}


KINDS = {
    "trained tokens beyond the context": ([ids(30, 2), ids(2, 2)], None),
    "no others": ([ids(30, 2)], "cut to data.max_length = 24, 1 of them before their first trained token; raise it"),
    "calls that the template drops": (
        [chat(content=None, tool_calls=[{"name": "f", "arguments": {"a": 1}}])],
        "it drops the call of 'f' in messages[1] of role 'assistant'; use --template plain",
    ),
    "pairs": ([{"prompt": "1", "chosen": "2", "rejected": "3"}], "preference"),
    "long prompts": ([{"prompt": "1 " * n, "answer": "2"} for n in (4, 30, 22, 12)], None),
    "long prompts only": ([{"prompt": "1 " * 30, "answer": "2"}], "the shortest prompt has 31 tokens, and model takes"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_init_writes_runs_as_it_is_and_other_data_is_refused_with_the_reason(folder, monkeypatch, capsys, kind):
    lines, reason = KINDS[kind]
    (folder / "set.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command, rl = ("train", ["--rl"]) if "prompts" in kind else ("sft", [])
    code, out, err = call(monkeypatch, capsys, "init", "set.jsonl", "--model", "model", *rl)
    assert (folder / f"{command}.toml").exists() == (reason is None)
    if reason is not None:
        assert reason in err
        return
    code, out, err = call(monkeypatch, capsys, *out.split("Next: treering ")[1].split(), "--json")
    assert code == 0, err


def test_long_prompts_leave_half_of_the_context_to_responses(folder, monkeypatch, capsys):
    (folder / "set.jsonl").write_text("".join(json.dumps(line) + "\n" for line in KINDS["long prompts"][0]))
    assert call(monkeypatch, capsys, "init", "set.jsonl", "--model", "model", "--rl")[0] == 0
    text = (folder / "train.toml").read_text()
    settings = tomllib.loads(text)
    # The opening of a turn is one token, so that only the prompt of 4 fits into half of 24 positions.
    assert (settings["task"]["max_prompt_tokens"], settings["sampling"]["max_tokens"]) == (12, 12)
    assert "3 longer ones are dropped" in text


def test_nothing_is_overwritten_and_paths_hold_where_another_folder_is_named(folder, monkeypatch, capsys):
    write_set(folder / "traces.jsonl", 2)
    (folder / "sft.toml").write_text("mine")
    code, _, err = call(monkeypatch, capsys, "init", "traces.jsonl", "--model", "model")
    assert code == 2
    assert "sft.toml exists, and init overwrites nothing" in err
    assert (folder / "sft.toml").read_text() == "mine"
    (folder / "conf").mkdir()
    code, out, err = call(monkeypatch, capsys, "init", "traces.jsonl", "--model", "model", "--out", "conf/a.toml")
    assert (code, out) == (0, "wrote conf/a.toml\nNext: treering sft conf/a.toml\n")
    settings = tomllib.loads((folder / "conf" / "a.toml").read_text())
    assert settings["data"]["files"] == [str(folder / "traces.jsonl")]
    assert settings["model"]["path"] == str(folder / "model")
    assert call(monkeypatch, capsys, "init", "traces.jsonl", "--model", "model", "--out", "no/a.toml")[0] == 2
    (folder / "prompts.jsonl").write_text('{"prompt": "1 2", "answer": "3"}\n')
    (folder / "own.py").write_text("def short(prompt, text): return -len(text)\n")
    words = ["prompts.jsonl", "--model", "model", "--rl", "--reward", "own.py:short", "--out", "conf/b.toml"]
    assert call(monkeypatch, capsys, "init", *words)[0] == 0
    assert tomllib.loads((folder / "conf" / "b.toml").read_text())["task"]["reward"] == f"{folder / 'own.py'}:short"


@pytest.mark.parametrize(
    ("tokens", "mask", "part"),
    [
        ([1, 32], [0, 1], "the token id 32, but those of model end at 31"),
        ([1, 2], [0, 0], "training needs a trained token, but 1 task has none; give assistant turns"),
        ([1] * 25, [0] * 24 + [1], "cut to data.max_length = 24, 1 of them before their first trained token"),
    ],
)
def test_data_that_could_not_be_trained_is_refused_before_anything_is_written(
    folder, monkeypatch, capsys, tokens, mask, part
):
    row = Trajectory(task_id=1, tokens=np.array(tokens, np.int32), loss_mask=np.array(mask, np.bool_))
    write_trajectories(folder / "bad.jsonl", [row])
    code, _, err = call(monkeypatch, capsys, "init", "bad.jsonl", "--model", "model")
    assert code == 2
    assert part in err
    assert not (folder / "sft.toml").exists()


@pytest.mark.parametrize(
    ("options", "part"),
    [(["--rl", "--format", "trl"], "--rl reads prompts, got trl"), (["--reward", "a:b"], "this reads trajectories")],
)
def test_options_of_the_other_kind_of_file_are_refused(folder, monkeypatch, capsys, options, part):
    write_set(folder / "traces.jsonl", 1)
    code, _, err = call(monkeypatch, capsys, "init", "traces.jsonl", "--model", "model", *options)
    assert code == 2
    assert part in err


def test_a_model_without_a_configuration_is_refused_by_name(folder, monkeypatch, capsys):
    write_set(folder / "traces.jsonl", 1)
    (folder / "empty").mkdir()
    code, _, err = call(monkeypatch, capsys, "init", "traces.jsonl", "--model", "empty")
    assert code == 2
    assert "empty/config.json is a JSON object, and this one cannot be read" in err


@pytest.mark.parametrize("name", [family for family in FAMILIES if FAMILIES[family].counts_flops is None])
def test_a_family_whose_flops_are_not_counted_has_a_configuration_too(folder, monkeypatch, capsys, name):
    write_set(folder / "traces.jsonl", 1)
    retype(folder / "model", name)
    assert call(monkeypatch, capsys, "init", "traces.jsonl", "--model", "model")[0] == 0
    assert "(qwen3-8b), because" in (folder / "sft.toml").read_text().replace("\n# ", " ")


def test_a_model_of_another_family_is_refused_before_anything_is_written(folder, monkeypatch, capsys):
    write_set(folder / "traces.jsonl", 1)
    retype(folder / "model", "gpt2")
    code, _, err = call(monkeypatch, capsys, "init", "traces.jsonl", "--model", "model")
    assert (code, (folder / "sft.toml").exists()) == (2, False)
    assert "model type 'gpt2' is not supported; supported are llama, " in err


def test_no_text_of_a_file_ends_its_comment_or_its_value():
    assert comments("a\nb = 1\u2028c\x85d") == "# a b = 1 c d\n"
    text = 'a "b"\n\x7f\\ é'
    assert tomllib.loads(pair("key", text, "two\nlines")) == {"key": text}


def test_a_table_is_written_inline_without_what_is_unset() -> None:
    value = {"temperature": 0.5, "stop": None, "two words": {"a": ["x", {}]}}
    assert pair("parameters", value) == 'parameters = { temperature = 0.5, "two words" = { a = ["x", {}] } }\n'
    assert tomllib.loads(pair("key", value)) == {"key": {"temperature": 0.5, "two words": {"a": ["x", {}]}}}
