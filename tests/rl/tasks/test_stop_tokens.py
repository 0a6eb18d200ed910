"""Stop tokens: a rollout ends at every token with which its tokenizer, template, model or user end a turn."""

import json
from pathlib import Path

import pytest

from tests.data.conftest import save_tokenizer
from tests.rl.rollouts import rollout_of
from treering.data.rendering.template import ChatTemplate
from treering.engine.request import Request, Sampling
from treering.engine.scripted import ScriptedEngine
from treering.errors import ConfigError, InputError
from treering.rl.checks import with_stops
from treering.rl.tasks.prompts_file import PromptsFile
from treering.rl.tasks.stop_tokens import find_stop_tokens
from treering.rl.tasks.text_tokens import TextTokens, end_of_turn

LLAMA = ["<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"]
TURN = "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '%s' }}"


def write_tokenizer(folder: Path, end: str = "<|eot_id|>", guard: str = "") -> Path:
    """A tokenizer with Llama 3's markers, whose template ends a turn with `end` and begins with `guard`."""
    loop = "{% for message in messages %}" + TURN % end + "{% endfor %}"
    opens = "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    return save_tokenizer(folder, LLAMA, chat_template=guard + loop + opens, eos_token="<|end_of_text|>")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("stops") / "llama")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder, as far as stop tokens are read from it: it ends texts with three ids."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0, "text_config": {"eos_token_id": 7}}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 4, 3]}))
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hi?", "answer": "4"}\n')
    return path


@pytest.mark.parametrize("template", ["hf", "plain", "raw"])
def test_a_policy_that_ends_its_turn_in_its_own_way_stops(file: Path, llama: Path, model: Path, template: str) -> None:
    """As the template ends a turn, or else as the model's folder says."""
    folder = None if template == "hf" else model
    task = PromptsFile(file, tokenizer=llama, reward="exact_answer", template=template, model=folder)  # type: ignore[arg-type]
    engine = ScriptedEngine(lambda request: [20, 21, 3, 22])
    sampling = with_stops(Sampling(max_tokens=4), task)
    if template == "plain":
        assert sampling.stop_strings == ("<|im_end|>",)
        sampling = Sampling(max_tokens=4, stop_tokens=sampling.stop_tokens)
    (rollout,) = engine.generate([Request(prompt_id="p", prompt=task.prompts[0].tokens, sampling=sampling)])
    assert (rollout.tokens.tolist(), rollout.finish_reason) == ([20, 21, 3], "stop")


def test_all_origins_are_joined_and_each_token_is_named_once(llama: Path, model: Path) -> None:
    stops = find_stop_tokens(TextTokens(llama), end_of_turn="<|eot_id|>", model=model, named=["<|eom_id|>", "a", 9])
    a = TextTokens(llama).id_of("a")
    assert [(stop.token_id, stop.source) for stop in stops] == [
        (0, "tokenizer"),
        (3, "chat template"),
        (4, "generation_config.json"),
        (7, "config.json"),
        (a, "task.stop_tokens"),
        (9, "task.stop_tokens"),
    ]
    assert str(stops[1]) == "<|eot_id|> (3, chat template)"


@pytest.mark.parametrize(("value", "expected"), [(3, [0, 3]), ([3], [0, 3]), ([], [0]), (None, [0]), (-1, [0])])
def test_a_model_may_name_one_end_several_or_none(tmp_path: Path, llama: Path, value: object, expected: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    stops = find_stop_tokens(TextTokens(llama), model=tmp_path)
    assert [stop.token_id for stop in stops] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "is a JSON object, got list"),
        ("{", r"is a JSON object, .* \(Expecting"),
        ('{"eos_token_id": "</s>"}', "a token id or a list of them, got '</s>'"),
        ('{"eos_token_id": [true]}', r"a token id or a list of them, got \[True\]"),
    ],
)
def test_a_bad_file_of_the_model_is_named(tmp_path: Path, llama: Path, text: str, message: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(InputError, match=rf"generation_config\.json.*{message}"):
        find_stop_tokens(TextTokens(llama), model=tmp_path)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("<|eot|>", "names single tokens, and '<|eot|>' is none of"),
        ("", "names single tokens, and '' is none of"),
        (5000, "holds ids of the tokenizer, and 5000 is none of"),
    ],
)
def test_an_unknown_stop_token_is_refused_by_name(llama: Path, named: str | int, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("|", r"\|")):
        find_stop_tokens(TextTokens(llama), named=[named])


def test_the_end_of_a_turn_is_what_the_template_writes_after_an_answer(tmp_path: Path, llama: Path) -> None:
    def end(folder: Path) -> str | None:
        return end_of_turn(ChatTemplate(folder))

    assert end(llama) == "<|eot_id|>"
    assert end(write_tokenizer(tmp_path / "two", end="<|eom_id|><|eot_id|>\\n")) == "<|eom_id|><|eot_id|>"
    assert end(write_tokenizer(tmp_path / "shy", guard="{{ raise_exception('no') }}")) is None


def test_a_turn_without_an_end_of_its_own_ends_where_the_next_message_begins(tmp_path: Path) -> None:
    assert end_of_turn(ChatTemplate(write_tokenizer(tmp_path / "open", end=""))) == "<|start_header_id|>"


def test_the_stop_token_is_no_part_of_the_rewarded_text(file: Path, llama: Path) -> None:
    tokens = TextTokens(llama)
    said = [*tokens.encode("4\n"), *tokens.encode("5")]
    stopping = PromptsFile(file, tokenizer=llama, reward="exact_answer", template="raw", stop_tokens=["5"])
    plain = PromptsFile(file, tokenizer=llama, reward="exact_answer", template="raw")
    assert [task.reward(task.prompts[0], rollout_of(said)).reward for task in (stopping, plain)] == [1.0, 0.0]


def test_the_end_of_texts_may_stand_in_the_map_of_special_tokens(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "old")
    (folder / "tokenizer_config.json").write_text("{}")
    assert TextTokens(folder).end_tokens == ()
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|end_of_text|>"}}')
    assert TextTokens(folder).end_tokens == (0,)
