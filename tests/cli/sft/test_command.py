"""`treering sft`: where it finds files, what it writes, and that a killed run resumes."""

import json
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from tests.cli.hub_cache import save_tokenizer
from tests.cli.runs import MODEL, Call, is_same, metrics_of, started, weights_of
from treering.config import SftConfig, load
from treering.data import Message, Trajectory, write_trajectories
from treering.errors import ConfigError, InputError, StateError
from treering.report.content import page_content

TINY = f"""{MODEL}
[data]
{{data}}
[train]
num_steps = 4
trees_per_step = 2
max_batch_tokens = 4000
[optim]
learning_rate = 1e-2
"""
GENERATED = 'source = "generated"\nmax_tasks = 5'


def config(folder: Path, data: str = GENERATED) -> Path:
    path = folder / "conf" / "run.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(TINY.format(data=data))
    return path


def write_set(path: Path, *tokens: list[int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = [np.array(sequence, np.int32) for sequence in tokens]
    write_trajectories(path, [Trajectory(task_id=str(i // 2), tokens=array) for i, array in enumerate(arrays)])


def test_a_run_trains_writes_metrics_and_a_model_that_hugging_face_loads(folder: Path, sft: Call) -> None:
    summary, err = sft(config(folder), "run.dir=out", 'metrics.sinks=["jsonl", "tensorboard"]', "train.num_steps=12")
    rows = metrics_of(folder / "out")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert (summary["first_loss"], summary["last_loss"]) == (rows[0]["train/loss"], rows[-1]["train/loss"])
    assert summary["last_loss"] < summary["first_loss"]
    assert summary["flat_tokens"] == sum(row["train/num_branch_tokens"] for row in rows)
    assert summary["unique_tokens"] == sum(row["train/num_tokens"] for row in rows) < summary["flat_tokens"]
    assert summary["sharing"] == pytest.approx(1 - summary["unique_tokens"] / summary["flat_tokens"])
    assert (summary["data"], summary["num_tasks"], summary["resumed_from_step"]) == ("generated", 5, None)
    model = AutoModelForCausalLM.from_pretrained(summary["checkpoint"])
    assert model.num_parameters() == summary["num_parameters"]
    assert model.config.vocab_size == 512
    assert sorted(path.name for path in (folder / "out" / "checkpoints").iterdir()) == ["step-000010", "step-000012"]
    [events] = (folder / "out" / "tensorboard").iterdir()
    assert events.name.startswith("events")
    assert "step 12/12 loss" in err
    page = page_content(folder / "out", lambda run: None)
    assert len(page["prompts"]) == 5
    assert page["prompts"][0]["forest"]["num_branch_tokens"] > page["prompts"][0]["forest"]["num_tokens"]
    assert page["runs"][0]["facts"]["table"]["parameters"] == f"{summary['num_parameters']:,}"


def test_a_running_step_is_reported_on_stderr_and_changes_no_weight(
    folder: Path, sft: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, silent = sft(config(folder), "run.dir=plain")
    assert ": training" not in silent
    monkeypatch.setattr("treering.cli.display.PART_EVERY_S", 0.0)
    told, err = sft(config(folder), "run.dir=told")
    sizes = [f"{int(row['train/num_tokens']):,}" for row in metrics_of(folder / "told")]
    for step, size in enumerate(sizes, start=1):
        assert f"step {step}/4: training 0 of {size} tokens\n" in err
        assert f"step {step}/4: training {size} of {size} tokens\n" in err
    assert is_same(plain, told)


def test_a_damaged_checkpoint_is_named_to_the_user(folder: Path, sft: Call) -> None:
    path = config(folder)
    summary, _ = sft(path, "run.dir=out")
    (Path(summary["checkpoint"]) / "training_state.pt").write_bytes(b"")
    again, err = sft(path, "run.dir=out")
    assert "warning: skipped damaged checkpoints: step-000004: training_state.pt has changed" in err
    assert again["resumed_from_step"] == 2
    assert again["last_loss"] == summary["last_loss"]


def test_files_are_looked_up_next_to_the_configuration_then_here_then_in_the_data_folder(
    folder: Path, sft: Call
) -> None:
    path = config(folder, 'files = ["set.jsonl"]')
    for name, num_tasks in (("data", 3), ("", 2), ("conf", 1)):
        write_set(folder / name / "set.jsonl", *[[1, 2, 3, i] for i in range(2 * num_tasks)])
        summary, _ = sft(path, f"run.dir=out{num_tasks}")
        assert (summary["data"], summary["num_tasks"]) == ("files", num_tasks)


def test_preference_pairs_are_refused_because_the_rejected_answer_would_be_trained(folder: Path, sft: Call) -> None:
    (folder / "a.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c", "prompt_id": 1}\n')
    path = config(folder, 'files = ["a.jsonl"]\nformat = "trl"')
    with pytest.raises(InputError, match=r"a\.jsonl: supervised training would train the rejected answers"):
        sft(path)


def test_without_the_real_data_folder_the_stand_in_is_trained_and_said(folder: Path, sft: Call) -> None:
    path = config(folder, GENERATED.replace('"generated"', '"real"\nfiles = ["set.jsonl"]\ntokenizer = "tokenizer"'))
    summary, err = sft(path, "run.dir=out")
    assert summary["data"] == "generated"
    assert "no real data here (TREERING_DATA names no folder): training on generated data instead" in err
    # If the folder exists, a missing file is an error; generated data is used only without the folder.
    (folder / "data").mkdir()
    with pytest.raises(InputError, match="tokenizer is not in"):
        sft(path, "run.dir=out2")


def test_equal_task_ids_of_two_files_are_two_tasks(folder: Path, sft: Call) -> None:
    path = config(folder, 'files = ["a.jsonl", "b.jsonl"]')
    for name in ("a", "b"):
        write_set(folder / f"{name}.jsonl", [1, 2], [1, 3], [1, 4])
    assert sft(path, "run.dir=out")[0]["num_tasks"] == 4
    assert sft(path, "run.dir=out2", "data.max_tasks=1")[0]["num_tasks"] == 2


def test_tasks_without_a_trained_token_are_left_out_and_counted(folder: Path, sft: Call) -> None:
    write_set(folder / "a.jsonl", [1, 2], [1, 3], [4])
    summary, err = sft(config(folder, 'files = ["a.jsonl"]'), "run.dir=out")
    assert summary["num_tasks"] == 1
    assert "1 task without a trained token is dropped" in err
    write_set(folder / "a.jsonl", [1], [2])
    with pytest.raises(InputError, match="training needs a trained token, but 1 task has none"):
        sft(config(folder, 'files = ["a.jsonl"]'), "run.dir=out2")


def test_messages_are_tokenized_trained_on_answers_and_saved_with_their_tokenizer(folder: Path, sft: Call) -> None:
    words = ["?", "hi", "yes", "no", "maybe"]
    save_tokenizer(folder / "words", words)
    said = [[Message(role="user", content="hi hi "), Message(role="assistant", content=word)] for word in ("yes", "no")]
    write_trajectories(
        folder / "a.jsonl", [Trajectory(task_id=0, format="raw", messages=tuple(messages)) for messages in said]
    )
    path = config(folder, 'files = ["a.jsonl"]\ntokenizer = "words"')
    summary, _ = sft(path, "run.dir=full")
    assert (Path(summary["checkpoint"]) / "tokenizer.json").is_file()
    assert weights_of(summary["checkpoint"])["lm_head.weight"].shape[0] == len(words)
    assert metrics_of(folder / "full")[0]["train/num_loss_tokens"] == 2
    # A model folder that a run wrote includes its tokenizer.
    further = folder / "further.toml"
    further.write_text(
        f'[model]\npath = "{summary["checkpoint"]}"\n[data]\nfiles = ["a.jsonl"]\n[train]\nnum_steps = 1\n'
    )
    again, _ = sft(further, "run.dir=further")
    assert metrics_of(folder / "further")[0]["train/num_loss_tokens"] == 2
    assert (Path(again["checkpoint"]) / "tokenizer.json").is_file()


def test_a_trained_model_can_be_trained_on_from_its_folder(folder: Path, sft: Call) -> None:
    first, _ = sft(config(folder), "run.dir=first")
    write_set(folder / "a.jsonl", [1, 2, 3], [1, 2, 4])
    path = folder / "second.toml"
    path.write_text(
        f'[model]\npath = "{first["checkpoint"]}"\n[data]\nfiles = ["a.jsonl"]\n[train]\nnum_steps = 1\n'
        "[optim]\nlearning_rate = 1e-30\n"
    )
    second, _ = sft(path, "run.dir=second")
    before, after = weights_of(first["checkpoint"]), weights_of(second["checkpoint"])
    assert all(torch.equal(before[name], after[name]) for name in before)
    write_set(folder / "a.jsonl", [1, 512], [1, 2])
    with pytest.raises(ConfigError, match="the token id 512, but the model's end at 511; use the tokenizer"):
        sft(path, "run.dir=third")
    (folder / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty has no config\.json, so .*; correct model\.path"):
        sft(path, "run.dir=fourth", "model.path=empty")


def test_the_random_model_follows_its_seed(folder: Path, sft: Call) -> None:
    path = config(folder)
    losses = {sft(path, f"run.dir=o{i}", f"train.seed={i % 2}")[0]["last_loss"] for i in range(3)}
    assert len(losses) == 2


def test_cuda_is_refused_where_there_is_none(folder: Path, sft: Call) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ConfigError, match=r'model\.device = "cuda" needs a CUDA device'):
        sft(config(folder), "model.device=cuda")


def test_the_example_is_a_valid_configuration() -> None:
    example = load(SftConfig, Path(__file__).parents[3] / "examples" / "agent_sft" / "config.toml")
    assert (example.data.source, len(example.data.files)) == ("real", 2)
    assert example.train.trees_per_step > 1


def test_ctrl_c_loses_no_whole_step(folder: Path, sft: Call) -> None:
    path, overrides = config(folder), ["train.trees_per_step=1", "run.save_every=10min"]
    ended = started(folder, "sft", str(path), "run.dir=ended", "train.num_steps=100000", *overrides)
    while ended.poll() is None and num_lines(folder / "ended" / "metrics.jsonl") < 3:
        time.sleep(0.005)
    ended.send_signal(signal.SIGINT)
    err = ended.communicate()[1]
    assert ended.returncode == 130
    assert "interrupted by SIGINT: saving the last whole step (again: end at once)" in err
    saved = r"step (\d+) is saved and \d+ is next; the same command resumes the run in ended"
    found = re.fullmatch(f"treering: interrupted by SIGINT; {saved}", err.splitlines()[-1])
    assert found is not None, err
    num_steps = int(found[1])
    assert num_steps == num_lines(folder / "ended" / "metrics.jsonl")
    further = [f"train.num_steps={num_steps + 2}", *overrides]
    rest, whole = (sft(path, f"run.dir={name}", *further)[0] for name in ("ended", "whole"))
    assert rest["resumed_from_step"] == num_steps
    assert is_same(rest, whole)


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


DATED = (
    "{{ strftime_now('%d %b %Y') }}{% for m in messages %} <{{ m.role }}> "
    "{{ m.content if not (m.role == 'assistant' and not loop.last) else '' }}{% endfor %}"
    "{% if add_generation_prompt %} <assistant> {% endif %}"
)


def write_dated_chats(folder: Path) -> str:
    """Write two chats of two turns for a template that writes today's date and cuts earlier answers."""
    words = ["26", "Jul", "2024", *map(str, range(1, 20)), "<", ">", "user", "assistant", "one", "two", "what"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*words, "?"])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (folder / "tok").mkdir()
    tokenizer.save(str(folder / "tok" / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": DATED}
    (folder / "tok" / "tokenizer_config.json").write_text(json.dumps(settings))
    chat = [("user", "what"), ("assistant", "one"), ("user", "what 1"), ("assistant", "two")]
    messages = tuple(Message(role=role, content=content) for role, content in chat)
    write_trajectories(folder / "chats.jsonl", [Trajectory(task_id=i, messages=messages) for i in range(2)])
    return 'files = ["../chats.jsonl"]\ntokenizer = "../tok"\ntemplate = "hf"'


def test_a_run_resumes_the_day_after_with_the_date_of_its_first_start(folder, sft):
    path = config(folder, write_dated_chats(folder))
    sft(path, "data.date=2024-07-26", "train.num_steps=2", "run.dir=r")
    summary, _ = sft(path, "run.dir=r")
    assert (summary["resumed_from_step"], summary["num_steps"]) == (2, 4)
    assert json.loads((folder / "r" / "config.json").read_text())["data"]["date"] == "2024-07-26"


def test_chats_that_become_branches_say_how_many_tokens_these_share(folder, sft):
    path = config(folder, write_dated_chats(folder))
    _, err = sft(path, "train.num_steps=1", "run.dir=r", "data.date=2024-07-26")
    # A chat's turns are 11 and 19 tokens; both begin with date, question and the header of the answer, 10 tokens.
    shared = "2 of 2 chats are one branch a turn, 4 branches: of their 60 tokens 20 are shared"
    assert shared in " ".join(err.split())


def test_a_run_that_began_in_the_plain_form_goes_on_with_it(folder, sft):
    path = config(folder, write_dated_chats(folder).replace('template = "hf"', ""))
    sft(path, "data.template=plain", "train.num_steps=2", "run.dir=r")
    summary, err = sft(path, "run.dir=r")
    assert (summary["resumed_from_step"], summary["num_steps"]) == (2, 4)
    assert "in the plain form, <|im_start|> and <|im_end|> as ordinary tokens" in " ".join(err.split())
    with pytest.raises(StateError, match=r"data.files\[0\] \(chats.jsonl\) has changed"):
        sft(path, "data.template=hf", "data.date=2024-07-26", "run.dir=r")
    assert "rendered by the chat template of" in sft(path, "run.dir=new")[1]


def test_the_number_of_trees_is_that_of_the_first_start(folder, sft):
    path = config(folder)
    path.write_text(path.read_text().replace("trees_per_step = 2\n", ""))
    sft(path, "train.trees_per_step=3", "train.num_steps=2", "run.dir=r")
    assert sft(path, "run.dir=r")[0]["resumed_from_step"] == 2
    assert json.loads((folder / "r" / "config.json").read_text())["train"]["trees_per_step"] == 3
    sft(path, "run.dir=new")
    assert json.loads((folder / "new" / "config.json").read_text())["train"]["trees_per_step"] == 1


def test_a_resumed_run_names_the_file_that_changed(folder: Path, sft: Call) -> None:
    path = config(folder, 'files = ["a.jsonl", "b.jsonl"]')
    write_set(folder / "a.jsonl", [1, 2], [1, 4])
    write_set(folder / "b.jsonl", [1, 2], [1, 3])
    sft(path, "run.dir=out", "train.num_steps=1")
    (folder / "b.jsonl").rename(folder / "c.jsonl")
    renamed = 'data.files=["a.jsonl", "c.jsonl"]'
    assert sft(path, "run.dir=out", "train.num_steps=2", renamed)[0]["resumed_from_step"] == 1
    write_set(folder / "c.jsonl", [1, 3], [1, 3])
    with pytest.raises(StateError, match=r": data.files\[1\] \(c.jsonl\) has changed; set these") as caught:
        sft(path, "run.dir=out", "train.num_steps=3", renamed)
    assert not re.search("[0-9a-f]{16}", str(caught.value))
    with pytest.raises(StateError, match=r"data.files\[1\] \([bc].jsonl\) is only there"):
        sft(path, "run.dir=out", "train.num_steps=3", 'data.files=["a.jsonl"]')


def test_the_advice_on_gradients_that_are_not_finite_works(folder: Path, sft: Call) -> None:
    path = config(folder, 'files = ["a.jsonl"]')
    write_set(folder / "a.jsonl", [1, 2, 3], [1, 3, 2])
    with pytest.raises(StateError, match=r"start a run in another folder \(run.dir=...\) with a lower learning_rate"):
        sft(path, "run.dir=out", "train.num_steps=4", "optim.learning_rate=1e30", "optim.max_grad_norm=0.0")
    assert sft(path, "run.dir=out2", "train.num_steps=4")[0]["num_steps"] == 4
