"""Stop tokens: a rollout ends at every token with which its tokenizer, template, model or user ends a turn."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.processors import TemplateProcessing

from tests.data.conftest import save_tokenizer
from tests.engine.scripted import ScriptedEngine
from tests.rl.rollouts import rollout_of
from treering.data import Message, Renderer, Trajectory
from treering.engine.protocol import Request, Sampling
from treering.errors import ConfigError, InputError
from treering.rl.sampler import with_stops
from treering.rl.tasks.prompts_file import PromptsFile
from treering.rl.tasks.text_tokens import TextTokens, find_stop_tokens

LLAMA = ["<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"]
TURN = "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '%s' }}"


def write_tokenizer(folder: Path, end: str = "<|eot_id|>", guard: str = "") -> Path:
    """Write a tokenizer with Llama 3's markers, whose template ends a turn with `end` and begins with `guard`."""
    loop = "{% for message in messages %}" + TURN % end + "{% endfor %}"
    opens = "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    return save_tokenizer(folder, LLAMA, chat_template=guard + loop + opens, eos_token="<|end_of_text|>")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("stops") / "llama")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The files of a model folder from which stop tokens are read; it ends texts with three ids."""
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
    """It ends as the template ends a turn, or else as the model's folder says."""
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
    named: list[str | int] = ["<|eom_id|>", "a", 9]
    stops = find_stop_tokens(TextTokens(llama), Renderer(tokenizer=llama), model=model, named=named)
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
        ("<|eot|>", "must name single tokens, and '<|eot|>' is not one of"),
        ("", "must name single tokens, and '' is not one of"),
        (5000, "must hold ids of the tokenizer, and 5000 is not one of"),
    ],
)
def test_an_unknown_stop_token_is_refused_by_name(llama: Path, named: str | int, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("|", r"\|")):
        find_stop_tokens(TextTokens(llama), named=[named])


GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant"
    "{% for c in m.tool_calls or [] %} to={{ c.function.name }}<|channel|>commentary<|message|>"
    "{{ c.function.arguments | tojson }}<|call|>{% else %}<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.index == messages | length else '<|end|>' }}{% endfor %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% for t in tools or [] %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
MARKED = (
    "{%% for m in messages %%}<%s>{{ m.role }}\n{{ m.content }}%s{%% endfor %%}"
    "{%% if add_generation_prompt %%}<%s>assistant\n{%% endif %%}"
)
TURN_ENDS = {
    "chatml": (MARKED % ("s", "<|im_end|>\n", "s"), ["<|im_end|>"]),
    "gemma": (MARKED % ("s", "<end_of_turn>\n", "s"), ["<end_of_turn>"]),
    "mistral, by the end of the text": (MARKED % ("s", "{{ eos_token if m.role == 'assistant' }}", "s"), ["</s>"]),
    "two tokens, of which the last ends": (MARKED % ("s", "<|eom_id|><|eot_id|>", "s"), ["<|eot_id|>"]),
    "phi-3, whose last turn has more": (
        MARKED % ("s", "<|end|>\n{{ '</s>' if loop.last and not add_generation_prompt }}", "s"),
        ["<|end|>"],
    ),
    "glm, by the next role": (MARKED % ("|user|", "", "|user|"), ["<|user|>"]),
    "ordinary text": (MARKED % ("s", ".\n", "s"), []),
    "refuses": ("{{ raise_exception('no') }}", []),
    "gpt-oss": (GPT_OSS, ["<|return|>", "<|call|>"]),
}


@pytest.mark.parametrize("kind", TURN_ENDS)
def test_a_turn_ends_with_the_last_token_that_training_trains(tmp_path: Path, kind: str) -> None:
    template, expected = TURN_ENDS[kind]
    special = ["</s>", "<|im_end|>", "<end_of_turn>", "<|eom_id|>", "<|eot_id|>", "<|end|>", "<|user|>"]
    special += ["<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<|call|>"]
    folder = save_tokenizer(tmp_path, special, chat_template=template, eos_token="</s>", bos_token=None)
    renderer = Renderer(tokenizer=folder)
    assert [TextTokens(folder).text_of(token) for token in renderer.turn_ends] == expected
    if kind == "refuses":
        return
    chat = Message(role="user", content="2+2?"), Message(role="assistant", content="4")
    (one,) = Renderer(tokenizer=folder).render([Trajectory(task_id=1, messages=chat)])
    (last,) = one.tokens[one.turn_ends - 1]
    assert (last in renderer.turn_ends) == bool(expected)


def test_asking_for_the_ends_of_turns_logs_nothing_about_chats(llama: Path) -> None:
    renderer = Renderer(tokenizer=llama)
    assert renderer.turn_ends
    assert renderer.form_note is None


def test_turns_of_the_plain_form_end_with_its_marker_if_that_is_a_token(tmp_path: Path, llama: Path) -> None:
    marked = save_tokenizer(tmp_path, ["<|im_start|>", "<|im_end|>"])
    for folder, ends, strings in ((marked, [1], ()), (llama, [], ("<|im_end|>",))):
        renderer = Renderer(tokenizer=folder, template="plain")
        assert (list(renderer.turn_ends), renderer.stop_strings) == (ends, strings)


@pytest.mark.filterwarnings("ignore:.*holds? the text of special tokens")
@pytest.mark.parametrize("text", ["2+2?", "<s>2+2?", "<s>2+2?<s>"])
def test_a_prompt_of_text_begins_once_and_does_not_end_as_text_that_is_trained(tmp_path: Path, text: str) -> None:
    folder = save_tokenizer(tmp_path, ["<s>", "</s>"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = [("<s>", 0), ("</s>", 1)]
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    [body] = [tokenizer.encode(text.removeprefix("<s>"), add_special_tokens=False).ids]
    assert TextTokens(folder).encode(text, adds_special=True).tolist() == [0, *body]
    raw = Trajectory(task_id=1, format="raw", messages=(Message(role="assistant", content=text),))
    assert Renderer(tokenizer=folder).render([raw])[0].tokens.tolist() == [0, *body]


def test_the_stop_token_is_not_part_of_the_rewarded_text(file: Path, llama: Path) -> None:
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


def test_the_bytes_of_tokens_in_a_row_are_those_of_their_text(llama: Path, tmp_path: Path) -> None:
    text = " 4 \u00e4pfel\n\x7f\u00a0 \U0001f600\t"
    levels = TextTokens(llama)
    assert b"".join(map(levels.bytes_of, levels.encode(text).tolist())) == text.encode()
    assert levels.bytes_of(3) == b"<|eot_id|>"
    # Like SentencePiece: a mark for a space, and a token for each byte that no other token has.
    vocab = {"\u2581": 0, "\u25814": 1, "<0xC3>": 2, "<0xA4>": 3, "\u00fc": 4}
    pieces = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    pieces.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    pieces.add_special_tokens([AddedToken("<\u2581end>", special=True)])
    pieces.save(str(tmp_path / "tokenizer.json"))
    assert list(map(TextTokens(tmp_path).bytes_of, range(6))) == [
        *(b" ", b" 4", b"\xc3", b"\xa4", "\u00fc".encode(), "<\u2581end>".encode()),
    ]
