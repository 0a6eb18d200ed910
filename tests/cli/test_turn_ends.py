"""Checkpoints end and write turns as they were trained: `generate`, `apply_chat_template` and the server agree."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

from tests.cli.runs import Call
from tests.data.conftest import save_tokenizer
from tests.models import build
from tests.rl.tasks.test_stop_tokens import GPT_OSS, MARKED
from tests.serving.test_server import ask
from treering.cli.models import load_checkpoint
from treering.cli.options import ServeOptions
from treering.cli.run_serve import opened
from treering.data import Message, Renderer, ToolCall, Trajectory

EOS = "<|endoftext|>"
# The end of turn that is trained, and the template; None stands for the plain form.
KINDS: dict[str, tuple[str | None, str]] = {
    "chatml": (MARKED % ("|im_start|", "<|im_end|>\n", "|im_start|"), "<|im_end|>"),
    "llama 3": (MARKED % ("|h|", "<|eot_id|>", "|h|"), "<|eot_id|>"),
    "gemma": (MARKED % ("start_of_turn", "<end_of_turn>\n", "start_of_turn"), "<end_of_turn>"),
    "gpt-oss": (GPT_OSS, "<|return|>"),
    "the end of the text itself": (MARKED % ("|h|", "{{ eos_token if m.role == 'assistant' }}", "|h|"), EOS),
    "plain": (None, "<|im_end|>"),
}
TOKENS = [EOS, "<|im_start|>", "<|im_end|>", "<|h|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|start|>"]
TOKENS += ["<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def save_base(folder: Path, template: str | None, eos: int | list[int] | None = 0) -> Path:
    """Save a base model, whose eos is <|endoftext|>, with a tokenizer."""
    settings = {} if template is None else {"chat_template": template}
    save_tokenizer(folder, TOKENS, eos_token=EOS, **settings)
    num_ids = len(AutoTokenizer.from_pretrained(folder))
    model = build(vocab_size=num_ids, eos_token_id=eos)
    model.generation_config = GenerationConfig(eos_token_id=eos)
    model.save_pretrained(folder)
    return folder


def fitted(folder: Path, sft: Call, rows: list[dict[str, Any]], *overrides: str) -> tuple[Path, str]:
    """Return the checkpoint of a model that has memorised the rows, and stderr."""
    (folder / "rows.jsonl").write_text("".join(json.dumps({"task_id": i, **row}) + "\n" for i, row in enumerate(rows)))
    (folder / "run.toml").write_text(
        '[model]\npath = "base"\ndevice = "cpu"\n[data]\nfiles = ["rows.jsonl"]\n'
        '[train]\nnum_steps = 40\ntrees_per_step = 1\nlayers = "stock"\n'
        '[optim]\nlearning_rate = 1e-2\n[run]\ndir = "out"\n'
    )
    summary, err = sft(folder / "run.toml", *overrides)
    return Path(summary["checkpoint"]), err


def generated(model: Any, checkpoint: Path, **more: Any) -> str:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    inputs = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False, **more)
    return str(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :]))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_generated_from_a_checkpoint_ends_where_its_turns_were_trained_to_end(
    folder: Path, sft: Call, kind: str
) -> None:
    template, end = KINDS[kind]
    base = save_base(folder / "base", template)
    checkpoint, err = fitted(folder, sft, [{"messages": CHAT}])
    model = load_checkpoint(checkpoint)
    text = generated(model, checkpoint)
    assert text.endswith(f"4{end}"), text
    assert text.count(end) == 1
    ids = json.loads((checkpoint / "generation_config.json").read_text())["eos_token_id"]
    assert TOKENS.index(end) in ids
    assert "<|end|>" not in err
    assert base.is_dir()


def test_adapters_name_the_ends_too_and_the_card_loads_them(folder: Path, sft: Call) -> None:
    save_base(folder / "base", KINDS["llama 3"][0])
    checkpoint, _ = fitted(folder, sft, [{"messages": CHAT}], "lora.rank=8")
    peft = pytest.importorskip("peft")
    model = peft.AutoPeftModelForCausalLM.from_pretrained(checkpoint)
    ends = GenerationConfig.from_pretrained(checkpoint)
    assert ends.eos_token_id[0] == 0
    assert TOKENS.index("<|eot_id|>") in ends.eos_token_id
    model.generation_config = ends
    assert generated(model, checkpoint) == "4<|eot_id|>"
    assert "model.generation_config = GenerationConfig.from_pretrained(" in (checkpoint / "README.md").read_text()


def test_adapters_on_a_base_that_names_all_ends_name_them_too(folder: Path, sft: Call) -> None:
    ends = [0, TOKENS.index("<|im_end|>"), TOKENS.index("<|eot_id|>"), TOKENS.index("<|call|>")]
    base = save_base(folder / "base", KINDS["llama 3"][0], ends)
    checkpoint, _ = fitted(folder, sft, [{"messages": CHAT}], "lora.rank=8", "train.num_steps=1")
    assert GenerationConfig.from_pretrained(checkpoint).eos_token_id == ends
    # Other tools save no generation settings with adapters: the server asks the base model.
    (checkpoint / "generation_config.json").unlink()
    with opened(ServeOptions(name=str(checkpoint), port=0, max_batch=2, max_tokens=64, device="cpu")) as server:
        assert sorted(server._ends) == ends
    assert base.is_dir()


VICUNA = (
    "{% for m in messages %}{{ 'USER' if m.role == 'user' else 'ASSISTANT' }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def test_turns_that_end_with_ordinary_text_are_named_as_such(folder: Path, sft: Call) -> None:
    save_base(folder / "base", VICUNA)
    _, err = fitted(folder, sft, [{"messages": CHAT}], "train.num_steps=1")
    assert "warning: chats end turns with ordinary text, where `generate` does not stop" in err
    assert "turns end with" not in err


@pytest.mark.parametrize("eos", [None, [0, 2]])
def test_eos_ids_that_were_there_stay_first(folder: Path, sft: Call, eos: Any) -> None:
    save_base(folder / "base", KINDS["gemma"][0], eos)
    checkpoint, _ = fitted(folder, sft, [{"messages": CHAT}], "train.num_steps=1")
    ids = json.loads((checkpoint / "generation_config.json").read_text())["eos_token_id"]
    assert ids[: len(eos or [])] == (eos or [])
    assert sorted(ids) == [0, 2, 6]


def test_templates_are_saved_with_a_checkpoint(folder: Path, sft: Call) -> None:
    base = save_base(folder / "base", None)
    chatml = KINDS["chatml"][0] or ""
    (base / "chat_template.jinja").write_text(chatml)
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text(chatml + "{# tools #}")
    checkpoint, _ = fitted(folder, sft, [{"messages": CHAT}], "train.num_steps=1")
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        assert (checkpoint / name).read_text() == (base / name).read_text()
    assert sorted(AutoTokenizer.from_pretrained(checkpoint).chat_template) == ["default", "tool_use"]


BLANK = ("", " ", "null", '""', '"null"', {})
CALL = ToolCall(name="add", arguments={"a": 1, "b": "ü"}, id="c")
CHATS = [
    (Message(role="system", content=" Be kind. "), Message(role="user", content="2+2?")),
    (Message(role="user", content="2+2?"), Message(role="assistant", content="4", reasoning=" Hm. ")),
    (
        Message(role="user", content="2+2?"),
        Message(role="assistant", content="So:", tool_calls=(CALL, ToolCall(name="f", arguments='{"x": 1.50}'))),
        Message(role="tool", content="4", tool_call_id="c"),
    ),
    (
        Message(role="user", content="2+2?"),
        Message(role="assistant", content=None, tool_calls=tuple(ToolCall(name="now", arguments=a) for a in BLANK)),
    ),
]


@pytest.mark.parametrize("own", [None, KINDS["llama 3"][0]], ids=["no template", "another template"])
@pytest.mark.parametrize("begin", [False, True], ids=["no begin", "a begin"])
def test_a_checkpoint_of_the_plain_form_has_that_form_as_its_template(
    folder: Path, sft: Call, own: str | None, begin: bool
) -> None:
    base = save_base(folder / "base", own)
    if own:
        (base / "additional_chat_templates").mkdir()
        (base / "additional_chat_templates" / "tool_use.jinja").write_text(own)
    if begin:
        described = json.loads((base / "tokenizer.json").read_text())
        described["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": EOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {EOS: {"id": EOS, "ids": [0], "tokens": [EOS]}},
        }
        (base / "tokenizer.json").write_text(json.dumps(described))
    checkpoint, _ = fitted(folder, sft, [{"messages": CHAT}], "train.num_steps=1", "data.template=plain")
    trained, again = Renderer(tokenizer=base, template="plain"), Renderer(tokenizer=checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for chat in CHATS:
        prompt = trained.prompt(chat).tolist()
        assert (prompt[0] == 0) == begin
        assert (
            tokenizer.apply_chat_template(
                [openai(message) for message in chat], add_generation_prompt=True, return_dict=False
            )
            == prompt
        )
        assert again.prompt(chat).tolist() == prompt
        (ids,) = trained.render([Trajectory(task_id=1, messages=chat)])
        assert tokenizer.apply_chat_template([openai(one) for one in chat], return_dict=False) == ids.tokens.tolist()
    assert again.chat_template is None, "a checkpoint is read in the form that it was trained in"


def openai(message: Message) -> dict[str, Any]:
    record: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        record["reasoning_content"] = message.reasoning
    if message.tool_calls:
        calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
        record["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    return record


def test_the_server_ends_chats_and_completions_where_training_does(folder: Path, sft: Call) -> None:
    save_base(folder / "base", KINDS["llama 3"][0])
    checkpoint, _ = fitted(folder, sft, [{"messages": CHAT}])
    options = ServeOptions(name=str(checkpoint), port=0, max_batch=2, max_tokens=64, device="cpu")
    prompt = Renderer(tokenizer=checkpoint).prompt([Message(role="user", content="2+2?")]).tolist()
    greedy = {"temperature": 0, "max_tokens": 12}
    with opened(options) as server:
        _, chat = ask(server, "/v1/chat/completions", {"messages": CHAT[:1], **greedy})
        _, text = ask(server, "/v1/completions", {"prompt": prompt, **greedy})
        _, open_ended = ask(server, "/v1/completions", {"prompt": prompt, "ignore_eos": True, **greedy})
        _, tokens = ask(server, "/inference/v1/generate", {"token_ids": prompt, "sampling_params": greedy})
    assert (chat["choices"][0]["message"]["content"], chat["choices"][0]["finish_reason"]) == ("4", "stop")
    assert (text["choices"][0]["text"], text["choices"][0]["finish_reason"]) == ("4", "stop")
    assert tokens["choices"][0]["token_ids"][-1] == TOKENS.index("<|eot_id|>")
    assert open_ended["choices"][0]["finish_reason"] == "length"


@pytest.mark.filterwarnings("ignore:.*holds? the text of special tokens")
def test_texts_of_trl_end_in_training_and_one_line_reports_it(folder: Path, sft: Call) -> None:
    save_base(folder / "base", None)
    rows = [{"prompt": "2+2=", "completion": "4"}, {"prompt": "2+3=", "completion": f"5{EOS}"}]
    checkpoint, err = fitted(folder, sft, rows)
    (line,) = [line for line in err.splitlines() if "TRL" in line]
    assert f"2 texts of TRL's rows (prompt and completion, or chosen and rejected) end with {EOS}" in line
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model: PreTrainedModel = load_checkpoint(checkpoint)
    for row in rows:
        inputs = tokenizer(row["prompt"], return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        answer = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :])
        assert answer == row["completion"].removesuffix(EOS) + EOS


RL = """[model]
path = "base"
device = "cpu"
[task]
kind = "prompts"
file = "prompts.jsonl"
reward = "contains_answer"
stop_tokens = ["<|h|>"]
[sampling]
max_tokens = 4
[rl]
num_steps = 1
prompts_per_step = 1
group_size = 2
[run]
dir = "rl"
"""


@pytest.mark.parametrize("template", ["auto", "plain", "raw"])
def test_reinforcement_learning_saves_the_ends_of_its_rollouts_and_their_form(
    folder: Path, train: Call, template: str
) -> None:
    base = save_base(folder / "base", KINDS["llama 3"][0])
    (folder / "prompts.jsonl").write_text('{"prompt": "2+2?", "answer": "4"}\n')
    (folder / "rl.toml").write_text(RL)
    train(folder / "rl.toml", f"task.template={template}")
    (checkpoint,) = (folder / "rl" / "checkpoints").iterdir()
    ends = ["<|h|>", *(["<|eot_id|>"] if template == "auto" else [])]
    ids = json.loads((checkpoint / "generation_config.json").read_text())["eos_token_id"]
    assert sorted(ids) == sorted(map(TOKENS.index, [EOS, "<|im_end|>", *ends]))
    messages = [Message(role="user", content="2+2?")]
    trained = Renderer(tokenizer=base, template="plain" if template == "plain" else "auto").prompt(messages).tolist()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_dict=False) == trained
